"""Measures every step on every rank and, on rank 0, writes a row of averages every few steps:
`Recorder`."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel2d.files import for_terminal
from parallel2d.metrics import keys
from parallel2d.metrics.anomalies import Deviation, Stragglers
from parallel2d.metrics.communication import CommunicationMeter
from parallel2d.metrics.console import ConsoleDisplay
from parallel2d.metrics.goodput import Goodput
from parallel2d.metrics.out_of_memory import resident_gib
from parallel2d.metrics.profile import StepProfiler
from parallel2d.metrics.watch import Position
from parallel2d.metrics.writer import MetricsWriter
from parallel2d.progress import Progress, RankReport, StepOutcome

log = logging.getLogger(__name__)

_GIB = 2**30


def measure_rank(
    device: torch.device, *, busy_s: float, communication: Mapping[str, float] | None = None
) -> RankReport:
    """This rank's report: its memory now, and what the caller measured."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_rss_gib, rss_gib = peak_kib / 2**20, resident_gib()
    moved = communication or {}
    if device.type != "cuda":
        return RankReport(busy_s, peak_rss_gib, rss_gib, communication=moved)
    held = torch.cuda.memory_stats(device)
    return RankReport(
        busy_s,
        peak_rss_gib,
        rss_gib,
        peak_gib=held.get("allocated_bytes.all.peak", 0) / _GIB,
        allocated_gib=held.get("allocated_bytes.all.current", 0) / _GIB,
        reserved_gib=held.get("reserved_bytes.all.current", 0) / _GIB,
        # How often the allocator had to give all cached blocks back and try again
        allocation_retries=float(held.get("num_alloc_retries", 0)),
        communication=moved,
    )


class Recorder:
    """Called by every rank after every step; only rank 0 has a ``writer`` and a ``display``.

    Args:
        ranks: of the world; ``tokens_per_step``: input tokens, or images, of a global batch, tensor
            ranks counted once.
        flops_per_step: of the model over a global batch, or None when unknown; ``peak_flops``: of
            one device, or None.
        hosts: by rank; ``meter``: installed while the recorder is open; ``predicted``: bytes per
            axis to compare with.
        slow_axes: axes whose groups cross hosts; ``profiler``: traces the steps it was made for.
        exact_bytes: that exact fp32 gradients would send over the replicate axis per step, 0 if
            nothing crosses it.
    """

    def __init__(
        self,
        *,
        log_every: int,
        steps: int,
        ranks: int,
        tokens_per_step: int,
        flops_per_step: float | None,
        peak_flops: float | None,
        writer: MetricsWriter | None,
        display: ConsoleDisplay | None,
        device: torch.device | None = None,
        hosts: Sequence[str] = (),
        meter: CommunicationMeter | None = None,
        predicted: Mapping[str, float] | None = None,
        slow_axes: Sequence[str] = (),
        exact_bytes: float = 0.0,
        profiler: StepProfiler | None = None,
    ) -> None:
        self.log_every = log_every
        self.steps = steps
        self.ranks = ranks
        self.tokens_per_step = tokens_per_step
        self.flops_per_step = flops_per_step
        self.peak_flops = peak_flops
        self.writer = writer
        self.display = display
        self.device = device or torch.device("cpu")
        self.meter = meter
        self.slow_axes = tuple(slow_axes)
        self.profiler = profiler
        self._takes_turns = _takes_turns(self.device, hosts)
        self._waited_before_s = 0.0
        self._goodput = Goodput()
        self._stragglers = Stragglers(hosts)
        self.predicted = dict(predicted or {})
        self._deviation = Deviation(self.predicted)
        self._exact_bytes = exact_bytes
        # Over the replicate axis, and the steps that took them
        self._crossed_bytes = 0.0
        self._crossed_steps = 0
        self._outer_norm: float | None = None
        self._segment = 1
        self._step = 0
        self._first = True
        self._saved_at: float | None = None  # when the last checkpoint was written
        self._given: dict[str, float] = {}  # metrics of hooks since the last row
        # Over the steps since the last row
        self._sums: dict[str, float] = {}
        self._counted = 0
        # Over all steps but the first, for the time that the rest will take
        self._steady_s = 0.0
        self._steady_steps = 0

    def begin(
        self, step: int, segment: int = 1, *, restarted: bool = False, not_before: float = 0.0
    ) -> None:
        """Opens what is written to, after ``step`` finished steps (0, or those of a restored
        run). ``segment``: which start of the run this is, from 1; ``restarted``: workers replaced
        others; ``not_before``: as of `Goodput.resume`."""
        self._segment = segment
        if self.meter:
            self.meter.install()
        if self.writer:
            self._goodput.resume(
                step, *self.writer.begin(step), restarted=restarted, not_before=not_before
            )
        if self.display:
            self.display.begin(step)

    def start_step(self, step: int) -> None:
        """Begins the measurement of ``step`` on this rank."""
        self._step = step
        if self._takes_turns:
            self._waited_before_s = _waited_for_core_s()
        if self.profiler:
            self.profiler.start_step(step)
        if self.meter:
            self.meter.start()

    def position(self) -> Position:
        """How far this rank is; safe to call from another thread."""
        if self.meter is None:
            return Position(
                self._step, 0, "a collective (which one is known with metrics.communication=true)"
            )
        return Position(self._step, *self.meter.position())

    def measure(self, seconds: Mapping[str, float], busy_cpu_s: float) -> RankReport:
        """Ends the measurement of a step that took ``seconds``, empty before the first. The other
        ranks learn the report in the next step's agreement.

        Busy are the seconds of the step without those spent in collectives and in the agreement.
        Where these are not known (on GPU, where they run beside the rest, or unmeasured) it is
        ``busy_cpu_s``, the CPU seconds used. On a host with more ranks than cores the wait for a
        core is left out: it falls to any rank.
        """
        if self.profiler and "step_s" in seconds:
            self.profiler.end_step(self._step)
        if self.meter is None:
            return measure_rank(self.device, busy_s=busy_cpu_s)
        moved = dict(zip(keys.COMMUNICATION_KEYS, self.meter.read(), strict=True))
        busy_s = busy_cpu_s
        if self.device.type == "cpu" and "step_s" in seconds:
            held_up_s = sum(moved[key] for key in keys.COMMUNICATION_SECONDS)
            # Not zero, which would mean that this rank was not measured.
            busy_s = max(1e-9, seconds["step_s"] - seconds.get("sync_s", 0.0) - held_up_s)
            if self._takes_turns:
                waited_s = _waited_for_core_s() - self._waited_before_s
                busy_s = max(min(busy_s, busy_cpu_s), busy_s - waited_s)
        return measure_rank(self.device, busy_s=busy_s, communication=moved)

    def record(
        self,
        progress: Progress,
        outcome: StepOutcome,
        learning_rate: float,
        seconds: dict[str, float],
        validation: Mapping[str, float] | None,
        *,
        last: bool,
        given: Mapping[str, float] | None = None,
    ) -> None:
        """Takes one step; writes a row every ``log_every`` steps, at the first and last one, and
        with a validation.

        ``validation``: its losses by key; None: there was none. ``given``: metrics of hooks; the
        next row holds the newest value of each.
        """
        row: dict[str, Any] = {
            keys.STEP: progress.step,
            keys.SEGMENT: self._segment,
            keys.LOSS: outcome.loss,
            keys.GRAD_NORM: outcome.grad_norm,
            keys.LEARNING_RATE: learning_rate,
            keys.TOKENS: progress.tokens,
            keys.SAMPLES: progress.samples,
            keys.BATCH_HASH: outcome.batch_hash,
            keys.SKIPPED_STEPS: progress.skipped,
            **_memory(outcome.ranks),
        }
        busy_s = [report.busy_s for report in outcome.ranks]
        if not self._first:  # the reports of the first step are from before it
            row |= _slowest(busy_s)
        if outcome.outer_norm is not None:
            self._outer_norm = outcome.outer_norm
        if self._outer_norm is not None:
            row[keys.OUTER_NORM] = self._outer_norm
        row |= validation or {}
        self._given |= given or {}
        self._goodput.add(seconds, first=self._first)
        row |= self._goodput.row()
        if seconds.get("checkpoint_s"):
            self._saved_at = time.perf_counter()
        if self._first:
            self._first = False
            self._emit_first(row, seconds["step_s"])
            return
        self._warn(self._stragglers.check(busy_s))
        self._add(seconds, outcome.ranks)
        due = progress.step % self.log_every == 0 or last or validation is not None
        if not due:
            return
        row |= self._averages()
        self._emit(row, busy_s)

    def _emit_first(self, row: dict[str, Any], step_s: float) -> None:
        """Compilation and warm-up make the first step of a process long: its time is reported
        apart, and never averaged in."""
        row[keys.FIRST_STEP_S] = step_s
        self._emit(row)
        if self.display:
            self.display.say(f"first step {step_s:.2f} s (not counted in the averages)")

    def _add(self, seconds: Mapping[str, float], reports: Sequence[RankReport]) -> None:
        """Adds one step to the sums: the seconds of this one, what was moved in the one before."""
        for name, value in [*seconds.items(), *_mean_communication(reports)]:
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._counted += 1
        self._steady_s += seconds["step_s"]
        self._steady_steps += 1

    def _averages(self) -> dict[str, float]:
        """Time, communication and throughput of a step: the means since the last row, from which
        the sums begin anew."""
        means = {name: total / self._counted for name, total in self._sums.items()}
        self._crossed_bytes += self._sums.get(keys.communication_key("replicate", "bytes"), 0.0)
        self._crossed_steps += self._counted
        self._sums = {}
        self._counted = 0
        moved = {key: means.pop(key) for key in keys.COMMUNICATION_KEYS if key in means}
        row = {keys.time_key(name): value for name, value in means.items()}
        row |= moved
        if moved:
            crossing = [moved[keys.communication_key(axis, "bytes")] for axis in self.slow_axes]
            row[keys.BYTES_BETWEEN_HOSTS] = sum(crossing)
            self._warn(self._deviation.check(moved))
        if self._exact_bytes and self._crossed_bytes:
            exact = self._exact_bytes * self._crossed_steps
            row[keys.COMPRESSION] = exact / self._crossed_bytes
        return row | self._throughput(means["step_s"])

    def _throughput(self, step_s: float) -> dict[str, float]:
        tokens_per_s = self.tokens_per_step / step_s
        row = {
            keys.TOKENS_PER_S: tokens_per_s,
            keys.TOKENS_PER_S_PER_RANK: tokens_per_s / self.ranks,
        }
        if self.flops_per_step is not None:
            flops_per_rank = self.flops_per_step / step_s / self.ranks
            row[keys.MODEL_TFLOPS_PER_RANK] = flops_per_rank / 1e12
            if self.peak_flops is not None:
                row[keys.MFU] = flops_per_rank / self.peak_flops
        return row

    def _emit(self, row: dict[str, Any], busy_s: Sequence[float] = ()) -> None:
        row |= self._given
        self._given = {}
        if self.writer:
            self.writer.write(row, busy_s)
        if self.display is None:
            return
        eta_s = age_s = None
        if self._steady_steps:
            eta_s = self._steady_s / self._steady_steps * (self.steps - row[keys.STEP])
        if self._saved_at is not None:
            age_s = time.perf_counter() - self._saved_at
        self.display.step(row, eta_s, age_s)

    def _warn(self, sentences: Sequence[str]) -> None:
        if self.display is None:  # every rank comes to the same sentences, and one shows them
            return
        for sentence in sentences:
            log.warning("%s", sentence)
            self.display.say(f"warning: {sentence}")

    def say(self, text: str) -> None:
        """A line for people, in ``train.log`` and on the console; nothing on other ranks than the
        first."""
        if self.display is not None:
            log.info("%s", text)
            self.display.say(text)

    def show_text(self, tag: str, text: str, step: int) -> None:
        """As `say`, with the step and below it ``text``, which TensorBoard shows under ``tag``."""
        self.say(f"{tag} at step {step}:\n{for_terminal(text)}")
        if self.writer:
            self.writer.text(tag, text, step)

    def close(self) -> None:
        """Ends the measurements and closes what is written to."""
        if self.meter:
            self.meter.remove()
        if self.profiler:
            self.profiler.close()
        if self.writer:
            self.writer.close()
        if self.display:
            self.display.close()


def _takes_turns(device: torch.device, hosts: Sequence[str]) -> bool:
    """Whether this rank's host has more ranks than cores, all of which compute on them."""
    if device.type != "cpu" or not dist.is_initialized() or dist.get_rank() >= len(hosts):
        return False
    return hosts.count(hosts[dist.get_rank()]) > len(os.sched_getaffinity(0))


def _waited_for_core_s() -> float:
    """How long this thread has been ready to run without a core, as Linux counts it; 0 where it
    does not."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            _, waited_ns, _ = file.read().split()
    except (OSError, ValueError):
        return 0.0
    return int(waited_ns) / 1e9


def _memory(reports: Sequence[RankReport]) -> dict[str, float]:
    """Of the rank that has most, for each quantity; that of the device only where there is one."""
    row = {
        keys.PEAK_RSS_GIB: _largest(reports, "peak_rss_gib"),
        keys.RSS_GIB: _largest(reports, "rss_gib"),
    }
    peak_gib = _largest(reports, "peak_gib")
    if peak_gib:
        allocated_gib = _largest(reports, "allocated_gib")
        reserved_gib = _largest(reports, "reserved_gib")
        row[keys.PEAK_GIB] = peak_gib
        row[keys.ALLOCATED_GIB] = allocated_gib
        row[keys.RESERVED_GIB] = reserved_gib
        row[keys.FRAGMENTATION] = 1 - allocated_gib / reserved_gib if reserved_gib else 0.0
        row[keys.ALLOCATION_RETRIES] = _largest(reports, "allocation_retries")
    return row


def _largest(reports: Sequence[RankReport], field: str) -> float:
    found: float = max(getattr(report, field) for report in reports)
    return found


def _slowest(busy_s: Sequence[float]) -> dict[str, float]:
    """The rank that was busy longest and its part of the mean; empty where nothing was measured."""
    mean = sum(busy_s) / len(busy_s)
    if not mean:
        return {}
    longest = max(busy_s)
    return {keys.SLOWEST_RANK: busy_s.index(longest), keys.SKEW: longest / mean}


def _mean_communication(reports: Sequence[RankReport]) -> list[tuple[str, float]]:
    """Each quantity by its key, mean over the ranks; empty where nothing was measured."""
    # One tuple of the ranks' values per key; the keys are the same on all ranks.
    columns = zip(*(report.communication.values() for report in reports), strict=True)
    keyed = zip(reports[0].communication, columns, strict=True)
    return [(key, sum(column) / len(column)) for key, column in keyed]

"""`Recorder` measures every step on every rank, and computes MFU, tokens/s and TFLOP/s. Every few
steps, rank 0 writes a row of averages with totals of the run (`Goodput`), and logs warnings
(`Deviation`, `Stragglers`)."""

from __future__ import annotations

import logging
import os
import resource
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist

from parallel2d.base.device import memory_stats
from parallel2d.base.files import for_terminal
from parallel2d.base.replicas import ranks_with_state
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.communication import CommunicationMeter
from parallel2d.training.metrics.console import ConsoleDisplay
from parallel2d.training.metrics.late_ranks import Position
from parallel2d.training.metrics.metrics_row import seconds_in
from parallel2d.training.metrics.phases import StepProfiler
from parallel2d.training.metrics.writer import MetricsWriter
from parallel2d.training.progress import Progress, RankReport, RankReports, StepOutcome

log = logging.getLogger(__name__)

_GIB = 2**30
# Relative deviation of an axis's bytes from the prediction above which a warning is logged
TOLERANCE = 0.05
# Number of steps for the median of a rank's ratio, so that single pauses do not matter
WINDOW = 12
SLOW = 1.5  # multiple of the other ranks' busy time


@dataclass(kw_only=True, eq=False)
class Recorder:
    """Records the measurements of a run. Every rank calls `record` after every step; only rank 0
    has a ``writer`` and a ``display``. ``meter`` is installed from `begin` until `close`."""

    log_every: int
    steps: int
    ranks: int  # world size
    tokens_per_step: int  # input tokens or samples of a global batch
    flops_per_step: float | None  # FLOPs of the model for a global batch; None: unknown
    peak_flops: float | None  # peak FLOP/s of one device; None: unknown
    writer: MetricsWriter | None
    display: ConsoleDisplay | None
    device: torch.device = torch.device("cpu")
    hosts: Sequence[str] = ()  # by rank
    meter: CommunicationMeter | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)  # predicted bytes by key
    warmup: float = 0.0  # number of first steps whose traffic differs from the prediction
    slow_axes: Sequence[str] = ()  # axes with process groups that span several hosts
    # Bytes per step of exact fp32 gradients over the replicate axis; 0: no gradient crosses it
    exact_bytes: float = 0.0
    profiler: StepProfiler | None = None

    def __post_init__(self) -> None:
        self._goodput = Goodput()
        self._stragglers = Stragglers(self.hosts)
        self._deviation = Deviation(self.predicted)
        # Bytes over the replicate axis, and the number of steps with this traffic
        self._crossed_bytes, self._crossed_steps = 0.0, 0
        self._outer: dict[str, float] = {}  # the newest norm of an outer step
        self._was_short = False  # True if replicas were missing since the last row
        self._segment, self._step, self._first = 1, 0, True
        self._saved_at: float | None = None  # time of the last checkpoint
        self._given: dict[str, float] = {}  # metrics of hooks and data since the last row
        self._emitted: tuple[dict[str, Any], Sequence[float]] | None = None  # the last row
        self._stands = 0  # step of the last row in the file; earlier rows are not written again
        # Sums over the steps since the last row
        self._sums: dict[str, float] = defaultdict(float)
        self._counted, self._rank_s = 0, 0.0
        # Sums over all steps of this process except the first, for the estimate of the remaining
        # time
        self._steady_s, self._steady_steps = 0.0, 0

    def begin(
        self, step: int, segment: int = 1, *, restarted: bool = False, not_before: float = 0.0
    ) -> None:
        """Open the writer and the display after ``step`` finished steps.

        Args:
            segment: number of this start, counted from 1.
            restarted: True if these workers replace earlier workers.
            not_before: as in `Goodput.resume`.
        """
        self._segment = segment
        if self.meter:
            self.meter.install()
        if self.writer:
            found = self.writer.begin(step)
            self._goodput.resume(step, *found, restarted=restarted, not_before=not_before)
        if self.display:
            self.display.begin(step)
        if step == 0 and self.writer:
            self._warn_of_loss(found[0], restarted)

    def _warn_of_loss(self, last: Mapping[str, Any] | None, restarted: bool) -> None:
        """Warn that the steps of an earlier start are lost. ``last``: the last row of that start;
        None if unknown."""
        if last is None and not restarted:
            return
        lost = f"{last[keys.STEP]} steps are lost" if last else "nothing is known of its steps"
        self.log(
            "warning: this run has begun before, and there is no checkpoint and no copy in memory "
            f"to continue from: it begins at step 1 again, {lost}"
        )

    def take_over(
        self, display: ConsoleDisplay, writer: MetricsWriter, step: int, segment: int
    ) -> None:
        """Make this rank the writing rank after ``step``, in place of the failed rank."""
        self.display, self.writer, self._segment = display, writer, segment
        last, standing = writer.begin(step)
        self._goodput.resume(step, last, standing, restarted=False)
        self._stands = standing[keys.STEP] if standing else 0
        if self._emitted:
            self._write(*self._emitted)
        log.info("rank %d writes from step %d on", dist.get_rank(), step + 1)

    def go_back(self, step: int) -> None:
        """Continue from ``step`` after a rollback. Rows that are already written stay in the
        file."""
        row, _ = self._emitted or ({keys.STEP: 0}, ())
        self._stands = max(self._stands, row[keys.STEP])
        self._goodput.resume(step, row, None)
        self._emitted, self._was_short = None, True

    def start_step(self, step: int) -> None:
        """Begin the measurement of ``step`` on this rank."""
        self._step = step
        if self.profiler:
            self.profiler.start_step(step)
        if self.meter:
            self.meter.start()

    def position(self) -> Position:
        """Return the position of this rank; other threads may call it."""
        if self.meter is not None:
            return Position(self._step, *self.meter.position())
        doing = "a collective (which one is known with metrics.communication=true)"
        return Position(self._step, 0, doing)

    def measure(self, seconds: Mapping[str, float], busy_cpu_s: float) -> RankReport:
        """End the measurement of a step, and return the report of this rank. ``seconds``: durations
        by phase; empty before the first step. The other ranks receive the report in the next step's
        status all-reduce.

        The busy time is the time of the step without its collectives and its status all-reduce. On
        GPU, collectives overlap with computation; if a host has more ranks than cores, ranks wait
        for cores. In both cases the busy time is ``busy_cpu_s``, the CPU seconds that the process
        has used.
        """
        if self.profiler and "step_s" in seconds:
            self.profiler.end_step(self._step)
        if self.meter is None:
            return RankReport(busy_cpu_s, _memory(self.device), {})
        moved = dict(zip(keys.COMMUNICATION_KEYS, self.meter.read(), strict=True))
        busy_s, rank = busy_cpu_s, dist.get_rank() if dist.is_initialized() else 0
        ranks_here, cores = self.hosts.count(self.hosts[rank]), len(os.sched_getaffinity(0))
        if self.device.type == "cpu" and "step_s" in seconds and ranks_here <= cores:
            held_up_s = sum(map(moved.__getitem__, keys.COMMUNICATION_SECONDS))
            # Above zero, because zero means that a rank has no measurements.
            busy_s = max(1e-9, seconds["step_s"] - seconds.get("sync_s", 0.0) - held_up_s)
        return RankReport(busy_s, _memory(self.device), moved)

    def record(
        self,
        progress: Progress,
        outcome: StepOutcome,
        learning_rate: float,
        seconds: dict[str, float],
        validation: Mapping[str, float] | None,
        *,
        last: bool,
        lost_s: float,
        given: Mapping[str, float],
    ) -> dict[str, Any] | None:
        """Record one step. A row is written every ``log_every`` steps, at the first and the last
        step, and after a validation. Returns the row; None if no row is due.

        Args:
            validation: validation losses by key; None if this step had no validation.
            last: True at the last step.
            lost_s: as in `Goodput.add`.
            given: metrics of hooks and data; the next row contains the newest value of each.
        """
        first, self._first = self._first, False
        with_state = ranks_with_state()
        live_ranks = self.ranks if with_state is None else len(with_state)
        self._goodput.add(seconds, first=first, live=live_ranks / self.ranks, lost_s=lost_s)
        self._was_short |= live_ranks < self.ranks
        self._given |= given
        if outcome.outer_norm is not None:
            self._outer[keys.OUTER_NORM] = outcome.outer_norm
        if seconds.get("checkpoint_s"):
            self._saved_at = time.perf_counter()
        busy_s = outcome.reports.busy_s
        if not first:
            self._warn(self._stragglers.check(busy_s))
            self._add(seconds, outcome.reports, live_ranks)
        is_due = progress.step % self.log_every == 0
        if not any((first, last, is_due, validation is not None)):
            return None
        row = {**self._totals(progress, outcome, learning_rate), **(validation or {})}
        if first:
            # Compilation and warm-up make the first step of a process slow, so its time has a
            # separate key and is not averaged. The reports of the ranks in this step describe the
            # time before it and are omitted.
            step_s = seconds["step_s"]
            self._emit(row | {keys.FIRST_STEP_S: step_s})
            if self.display:
                self.display.log(f"first step {step_s:.2f} s (not counted in the averages)")
        else:
            longest, mean = max(busy_s), sum(busy_s) / len(busy_s)
            if mean:  # zero if no rank has measured a step yet
                row |= {keys.SLOWEST_RANK: busy_s.index(longest), keys.SKEW: longest / mean}
            self._emit(row | self._averages(), busy_s)
        assert self._emitted is not None
        return self._emitted[0]

    def _totals(
        self, progress: Progress, outcome: StepOutcome, learning_rate: float
    ) -> dict[str, Any]:
        """Return all values of a row that are not averages."""
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
        }
        row |= outcome.reports.memory
        if row.get(keys.RESERVED_GIB):
            row[keys.FRAGMENTATION] = 1 - row[keys.ALLOCATED_GIB] / row[keys.RESERVED_GIB]
        return row | self._goodput.row() | self._outer

    def _add(self, seconds: Mapping[str, float], reports: RankReports, live_ranks: int) -> None:
        """Add one step of ``live_ranks`` to the sums: the seconds of this step, and the traffic of
        the previous step."""
        self._rank_s += seconds["step_s"] * live_ranks
        # The busy time of a failed rank is zero.
        reporting = len(reports.busy_s) - reports.busy_s.count(0.0) or len(reports.busy_s)
        for name, value in seconds.items():
            self._sums[keys.time_key(name)] += value
        for key, total in reports.communication.items():
            self._sums[key] += total / reporting
        self._counted += 1
        self._steady_s += seconds["step_s"]
        self._steady_steps += 1

    def _averages(self) -> dict[str, float]:
        """Return the means since the last row: time, communication and throughput of a step."""
        row = {}
        for key, total in self._sums.items():
            row[key] = total / self._counted
        self._crossed_bytes += self._sums[keys.communication_key("replicate", "bytes")]
        self._crossed_steps += self._counted
        # The counted traffic belongs to the previous step.
        as_predicted = max(self._step - self._counted, 1) > self.warmup
        # Seconds of a step, multiplied by the number of live ranks
        rank_s = self._rank_s / self._counted
        self._sums.clear()
        self._counted, self._rank_s = 0, 0.0
        if self.meter:
            row[keys.BYTES_BETWEEN_HOSTS] = sum(
                row[keys.communication_key(axis, "bytes")] for axis in self.slow_axes
            )
            # The prediction does not apply to the first steps, nor to steps with fewer replicas.
            if as_predicted and not self._was_short:
                self._warn(self._deviation.check(row))
        if self.exact_bytes and self._crossed_bytes:
            exact = self.exact_bytes * self._crossed_steps
            row[keys.COMPRESSION] = exact / self._crossed_bytes
        row[keys.TOKENS_PER_S] = self.tokens_per_step / row[keys.STEP_S]
        row[keys.TOKENS_PER_S_PER_RANK] = self.tokens_per_step / rank_s
        if self.flops_per_step is not None:
            flops_per_rank = self.flops_per_step / rank_s
            row[keys.MODEL_TFLOPS_PER_RANK] = flops_per_rank / 1e12
            if self.peak_flops is not None:
                row[keys.MFU] = flops_per_rank / self.peak_flops
        return row

    def _emit(self, row: dict[str, Any], busy_s: Sequence[float] = ()) -> None:
        row |= self._given
        self._given = {}
        self._emitted = row, busy_s
        self._write(row, busy_s)
        if self.display is None:
            return
        eta_s = age_s = None
        if self._steady_steps:
            eta_s = self._steady_s / self._steady_steps * (self.steps - row[keys.STEP])
        if self._saved_at is not None:
            age_s = time.perf_counter() - self._saved_at
        self.display.step(row, eta_s, age_s)

    def _write(self, row: dict[str, Any], busy_s: Sequence[float]) -> None:
        # After a failure, this rank may repeat steps that already have rows in the file. Each step
        # must have only one row, so these rows are not written again.
        if self.writer and row[keys.STEP] > self._stands:
            self.writer.write(row, busy_s)

    def _warn(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            # Every rank computes the same warnings, and one rank logs them.
            if self.display is not None:
                log.warning("%s", sentence)
                self.display.log(f"warning: {sentence}")

    def log(self, text: str) -> None:
        """Log a line in ``train.log`` and on the console, on rank 0 only."""
        if self.display is not None:
            log.info("%s", text)
            self.display.log(text)

    def show_text(self, tag: str, text: str, step: int) -> None:
        """Log ``text`` with its tag and step, and show it in TensorBoard under ``tag``."""
        self.log(f"{tag} at step {step}:\n{for_terminal(text)}")
        if self.writer:
            self.writer.text(tag, text, step)

    def close(self) -> None:
        """End the measurements, and close writer, display and profiler."""
        if self.meter:
            self.meter.remove()
        for part in (self.profiler, self.writer, self.display):
            if part is not None:
                part.close()


def _memory(device: torch.device) -> dict[str, float]:
    memory = {
        keys.PEAK_RSS_GIB: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB,
        keys.RSS_GIB: psutil.Process().memory_info().rss / _GIB,
    }
    held = memory_stats(device)
    if held:
        memory[keys.PEAK_GIB] = held.get("allocated_bytes.all.peak", 0) / _GIB
        memory[keys.ALLOCATED_GIB] = held.get("allocated_bytes.all.current", 0) / _GIB
        memory[keys.RESERVED_GIB] = held.get("reserved_bytes.all.current", 0) / _GIB
        # Number of times that the allocator had to return all cached blocks and retry
        memory[keys.ALLOCATION_RETRIES] = held.get("num_alloc_retries", 0)
    return memory


class Deviation:
    """Warns once for each axis whose traffic deviates from the prediction. ``predicted``: bytes by
    key."""

    def __init__(self, predicted: Mapping[str, float]) -> None:
        self._predicted = dict(predicted)

    def check(self, row: Mapping[str, float]) -> list[str]:
        """Return the warnings for one row of measurements."""
        warnings = []
        for key, predicted in tuple(self._predicted.items()):
            measured, expected = row.get(key, predicted), max(predicted, 1.0)
            if abs(measured - predicted) > TOLERANCE * expected:
                del self._predicted[key]
                axis = key.split("/")[1]
                warnings.append(
                    f"the {axis} axis moves {measured / 1e6:.4g} MB per step and rank, "
                    f"{measured / expected:.2f} times the predicted {predicted / 1e6:.4g} MB: look "
                    "for collectives that the layout does not need"
                )
        return warnings


class Stragglers:
    """Warns once for each slow rank. ``hosts``: host by rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._ratios: list[deque[float]] = [deque(maxlen=WINDOW) for _ in hosts]
        self._named: set[int] = set()

    def check(self, busy_s: Sequence[float]) -> list[str]:
        """Return the warnings for one step. ``busy_s``: busy seconds by rank, without waits for
        other ranks."""
        # Zero means that a rank has no measurements.
        if len(busy_s) < 2 or not all(busy_s):
            return []
        warnings = []
        # All ranks are compared with the same median, of all ranks except the slowest. A median of
        # the other ranks for each rank would take tens of milliseconds with hundreds of ranks.
        others = statistics.median(sorted(busy_s)[:-1])
        for rank, seconds in enumerate(busy_s):
            ratios = self._ratios[rank]
            ratios.append(seconds / others)
            if len(ratios) < WINDOW or ratios[-1] < SLOW or rank in self._named:
                continue
            ratio = statistics.median(ratios)
            if ratio >= SLOW:
                self._named.add(rank)
                host = self._hosts[rank].split("/")[0]
                warnings.append(
                    f"rank {rank} on {host} is slow: {ratio:.1f} times the busy time of the other "
                    f"ranks over the last {WINDOW} steps; all others wait for it"
                )
        return warnings


class Goodput:
    """Goodput: the fraction of the wall time that was useful, and the seconds lost to each cause.
    Useful time is the time of steps without the wait for data. The totals are computed on rank 0.

    The totals cover the time since the first start of the run, because a resumed run continues with
    the totals of its last row. If workers replace others, the time from that row until they begin
    is lost to ``restart``. If a user starts the run again, this pause does not count. If steps are
    repeated, the time of their first execution moves from useful to ``repeated``.
    """

    def __init__(self) -> None:
        self._lost = dict.fromkeys(keys.LOSSES, 0.0)
        self._useful = 0.0
        # Start of the wall time: the current time minus the counted wall time
        self._begun = time.time()

    def resume(
        self,
        step: int,
        last_row: dict[str, Any] | None,
        kept_row: dict[str, Any] | None,
        *,
        restarted: bool = True,
        not_before: float = 0.0,
    ) -> None:
        """Continue after ``step`` with the totals of ``last_row``.

        Args:
            last_row: the last row of the file. Its step may be after ``step``, if steps are
                repeated.
            kept_row: the last row up to ``step``.
            restarted: True if these workers replace earlier workers; False after a manual start.
            not_before: begin of the start of the replaced workers, as of `time.time`.
        """
        if not last_row or keys.WALL_S not in last_row:
            return
        for cause in keys.LOSSES:
            self._lost[cause] = seconds_in(last_row, keys.lost_key(cause))
        self._useful = seconds_in(last_row, keys.USEFUL_S)
        if last_row[keys.STEP] > step:
            kept = kept_row or {keys.STEP: 0}
            # Rows may be several steps apart: the time between two rows is divided evenly.
            share = (last_row[keys.STEP] - step) / (last_row[keys.STEP] - kept[keys.STEP])
            again = share * max(0.0, self._useful - seconds_in(kept, keys.USEFUL_S))
            self._useful -= again
            self._lost["repeated"] += again
        pause = 0.0
        if restarted:
            pause = max(0.0, time.time() - max(not_before, seconds_in(last_row, keys.UNIX_S)))
        self._lost["restart"] += pause
        self._begun = time.time() - seconds_in(last_row, keys.WALL_S) - pause

    def add(
        self,
        seconds: dict[str, float],
        *,
        first: bool,
        live: float = 1.0,
        lost_s: float = 0.0,
    ) -> None:
        """Add one step. All of the first step of a process counts as lost, because it includes
        compilation and memory allocation.

        Args:
            live: the fraction of the ranks that computed the step. The rest of the step's time is
                lost to ``replicas``.
            lost_s: seconds of the step before its last attempt, which are also lost to
                ``replicas``.
        """
        if first:
            self._lost["first_step"] += seconds["step_s"]
        else:
            lost_s = min(lost_s, seconds["step_s"])
            data = min(seconds.get("data_s", 0.0), seconds["step_s"] - lost_s)
            self._lost["data"] += data
            self._lost["replicas"] += lost_s
            computed = seconds["step_s"] - lost_s - data
            self._useful += live * computed
            self._lost["replicas"] += (1 - live) * computed
        self._lost["checkpoint"] += seconds.get("checkpoint_s", 0.0)
        self._lost["validation"] += seconds.get("validation_s", 0.0)

    def row(self) -> dict[str, float]:
        """Return the totals by key; ``goodput/fraction`` is useful time over wall time."""
        now = time.time()
        wall = now - self._begun
        return {
            keys.GOODPUT: self._useful / wall if wall > 0 else 0.0,
            keys.USEFUL_S: self._useful,
            keys.WALL_S: wall,
            keys.UNIX_S: now,
            **{keys.lost_key(cause): seconds for cause, seconds in self._lost.items()},
        }

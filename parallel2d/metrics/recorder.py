"""From steps to rows: averages over the steps between two logged ones, throughput, memory; handed
to files and console."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallel2d.metrics.communication import KEYS, CommunicationMeter
from parallel2d.metrics.console import ConsoleDisplay
from parallel2d.metrics.deviation import Deviation
from parallel2d.metrics.goodput import Goodput
from parallel2d.metrics.memory import resident_gib
from parallel2d.metrics.profile import StepProfiler
from parallel2d.metrics.stragglers import Stragglers
from parallel2d.metrics.watch import Position
from parallel2d.metrics.writer import MetricsWriter
from parallel2d.progress import Progress, StepOutcome

log = logging.getLogger(__name__)

_GIB = 2**30
# What a rank tells the others after a step, in this order; followed by `KEYS` when communication is
# measured
_RANK = ("busy_s", "peak_rss", "rss", "peak", "allocated", "reserved", "retries")


def measure_rank(device: torch.device, *, busy_s: float) -> list[float]:
    """The values of ``_RANK``: seconds the rank was busy, peak and present resident memory, and of
    the device peak, allocated and reserved memory (all GiB) and how often the allocator had to give
    everything back and try again. Zeros without a GPU."""
    memory = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, resident_gib()]
    if device.type != "cuda":
        return [busy_s, *memory, 0.0, 0.0, 0.0, 0.0]
    held = torch.cuda.memory_stats(device)
    names = (
        "allocated_bytes.all.peak",
        "allocated_bytes.all.current",
        "reserved_bytes.all.current",
    )
    return [
        busy_s,
        *memory,
        *(held.get(name, 0) / _GIB for name in names),
        float(held.get("num_alloc_retries", 0)),
    ]


class Recorder:
    """Called by every rank after every step; only rank 0 has a ``writer`` and a ``display``.

    Args:
        ranks: of the world; ``tokens_per_step``: input tokens, or images, of a global batch, tensor
            ranks counted once.
        flops_per_step: of the model over a global batch, or None when unknown; ``peak_flops``: of
            one device, or None.
        hosts: by rank; ``meter``: installed while the recorder is open; ``predicted``: bytes per
            axis to compare with.
        slow_axes: axes whose groups cross hosts; ``profiler``: traces the steps it was told to.
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
        profiler: StepProfiler | None = None,
    ) -> None:
        self.log_every, self.steps, self.ranks, self.tokens_per_step = (
            log_every,
            steps,
            ranks,
            tokens_per_step,
        )
        self.flops_per_step, self.peak_flops = flops_per_step, peak_flops
        self.writer, self.display = writer, display
        self.device, self.meter, self.slow_axes = (
            device or torch.device("cpu"),
            meter,
            tuple(slow_axes),
        )
        self._goodput, self._stragglers, self._deviation = (
            Goodput(),
            Stragglers(hosts),
            Deviation(predicted or {}),
        )
        self.profiler, self._step = profiler, 0
        self._saved_at: float | None = None
        self._sums: dict[str, float] = {}
        self._counted = 0
        self._first = True
        self._started = time.perf_counter()
        self._steady_s, self._steady_steps = 0.0, 0

    def begin(self, step: int) -> None:
        """Opens what is written to, after ``step`` finished steps (0, or those of a restored
        run)."""
        if self.meter:
            self.meter.install()
        if self.writer:
            self._goodput.resume(step, *self.writer.begin(step))
        if self.display:
            self.display.begin(step)

    def start_step(self, step: int) -> None:
        """Begins the measurement of ``step`` on this rank."""
        self._step = step
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

    def measure(self, seconds: Mapping[str, float], busy_cpu_s: float) -> list[float]:
        """What this rank tells the others about the step that ends now; rides on the next step's
        agreement.

        Busy are the seconds of the step without those spent in collectives and in the agreement.
        Where these are not known (on GPU, where they run beside the rest, or unmeasured) it is
        ``busy_cpu_s``, the CPU seconds used.
        """
        if self.profiler and "step_s" in seconds:
            self.profiler.end_step(self._step)
        if self.meter is None:
            return measure_rank(self.device, busy_s=busy_cpu_s)
        moved = self.meter.read()
        busy = busy_cpu_s
        if self.device.type == "cpu" and "step_s" in seconds:
            held_up_s = sum(
                value for key, value in zip(KEYS, moved, strict=True) if key.endswith("/seconds")
            )
            busy = max(1e-9, seconds["step_s"] - seconds.get("sync_s", 0.0) - held_up_s)
        return [*measure_rank(self.device, busy_s=busy), *moved]

    def record(
        self,
        progress: Progress,
        outcome: StepOutcome,
        learning_rate: float,
        seconds: dict[str, float],
        validation_loss: float | None,
        *,
        last: bool,
    ) -> None:
        """Takes one step; writes a row every ``log_every`` steps, at the first and last one, and
        with a validation."""
        row: dict[str, Any] = {
            "step": progress.step,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": learning_rate,
            "tokens": progress.tokens,
            "samples": progress.samples,
            "data/batch_hash": outcome.batch_hash,
            "skipped_steps": progress.skipped,
            **self._over_ranks(outcome.ranks),
        }
        if validation_loss is not None:
            row["validation/loss"] = validation_loss
        self._goodput.add(seconds, first=self._first)
        row |= self._goodput.row()
        if seconds.get("checkpoint_s"):
            self._saved_at = time.perf_counter()
        if self._first:  # compilation and warm-up: reported apart, never averaged in
            self._first = False
            row["time/first_step_s"] = seconds["step_s"]
            self._emit(row)
            if self.display:
                self.display.say(
                    f"first step {seconds['step_s']:.2f} s (not counted in the averages)"
                )
            return
        self._warn(self._stragglers.check([rank[0] for rank in outcome.ranks]))
        for name, value in [*seconds.items(), *self._moved(outcome.ranks)]:
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._counted += 1
        self._steady_s += seconds["step_s"]
        self._steady_steps += 1
        if progress.step % self.log_every and not last and validation_loss is None:
            return
        means = {name: total / self._counted for name, total in self._sums.items()}
        moved = {name: means.pop(name) for name in KEYS if name in means}
        row |= {f"time/{name}": value for name, value in means.items()}
        row |= moved
        if moved:
            row["comm/between_hosts/bytes"] = sum(
                moved[f"comm/{axis}/bytes"] for axis in self.slow_axes
            )
            self._warn(self._deviation.check(moved))
        tokens_per_s = self.tokens_per_step / means["step_s"]
        row["throughput/tokens_per_s"] = tokens_per_s
        row["throughput/tokens_per_s_per_rank"] = tokens_per_s / self.ranks
        if self.flops_per_step is not None:
            per_rank = self.flops_per_step / means["step_s"] / self.ranks
            row["throughput/model_tflops_per_rank"] = per_rank / 1e12
            if self.peak_flops is not None:
                row["throughput/mfu"] = per_rank / self.peak_flops
        self._sums, self._counted = {}, 0
        self._emit(row, [rank[0] for rank in outcome.ranks])

    def _emit(self, row: dict[str, Any], busy_s: Sequence[float] = ()) -> None:
        if self.writer:
            self.writer.write(row, busy_s)
        if self.display:
            mean = self._steady_s / self._steady_steps if self._steady_steps else None
            eta = mean * (self.steps - row["step"]) if mean is not None else None
            age = time.perf_counter() - self._saved_at if self._saved_at is not None else None
            self.display.step(row, eta, age)

    def _warn(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            if self.display:
                log.warning("%s", sentence)
                self.display.say(f"warning: {sentence}")

    @staticmethod
    def _moved(ranks: list[list[float]]) -> list[tuple[str, float]]:
        """`KEYS`, mean over the ranks, of the step before; nothing when communication is not
        measured."""
        columns = list(zip(*(rank[len(_RANK) :] for rank in ranks), strict=True))
        return [
            (key, sum(column) / len(column)) for key, column in zip(KEYS, columns, strict=False)
        ]

    def _over_ranks(self, ranks: list[list[float]]) -> dict[str, float]:
        """Memory (its maximum over the ranks) and the slowest rank, from what every rank measured;
        see `measure_rank`."""
        columns = dict(zip(_RANK, zip(*ranks, strict=True), strict=False))
        row = {
            "memory/peak_rss_gib": max(columns["peak_rss"]),
            "memory/rss_gib": max(columns["rss"]),
        }
        if max(columns["peak"]):
            allocated, reserved = max(columns["allocated"]), max(columns["reserved"])
            row["memory/peak_gib"] = max(columns["peak"])
            row["memory/allocated_gib"], row["memory/reserved_gib"] = allocated, reserved
            row["memory/fragmentation"] = 1 - allocated / reserved if reserved else 0.0
            row["memory/allocation_retries"] = max(columns["retries"])
        busy = columns["busy_s"]
        if not self._first and (mean := sum(busy) / len(busy)):
            row["rank/slowest"] = busy.index(max(busy))
            row["rank/skew"] = max(busy) / mean
        return row

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

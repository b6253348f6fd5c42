"""From steps to rows: averages over the steps between two logged ones, throughput, memory; handed to files and console."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from parallel2d.metrics.console import ConsoleDisplay
from parallel2d.metrics.writer import MetricsWriter
from parallel2d.progress import Outcome, Progress


def measure_rank(device: torch.device, *, busy_s: float) -> list[float]:
    """What a rank tells the others after a step: CPU seconds it was busy (waiting for collectives is not), peak resident memory
    and peak device memory in GiB."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return [busy_s, rss, peak]


class Recorder:
    """Called by every rank after every step; only rank 0 has a ``writer`` and a ``display``.

    Args:
        ranks: of the world; ``tokens_per_step``: input tokens of a global batch, tensor ranks counted once.
        flops_per_step: of the model over a global batch, or None when unknown; ``peak_flops``: of one device, or None.
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
    ) -> None:
        self.log_every, self.steps, self.ranks, self.tokens_per_step = (
            log_every,
            steps,
            ranks,
            tokens_per_step,
        )
        self.flops_per_step, self.peak_flops = flops_per_step, peak_flops
        self.writer, self.display = writer, display
        self._sums: dict[str, float] = {}
        self._counted = 0
        self._first = True
        self._started = time.perf_counter()
        self._steady_s, self._steady_steps = 0.0, 0

    def begin(self, step: int) -> None:
        """Opens what is written to, after ``step`` finished steps (0, or those of a restored run)."""
        if self.writer:
            self.writer.begin(step)
        if self.display:
            self.display.begin(step)

    def record(
        self,
        progress: Progress,
        outcome: Outcome,
        learning_rate: float,
        seconds: dict[str, float],
        validation_loss: float | None,
        *,
        last: bool,
    ) -> None:
        """Takes one step; writes a row every ``log_every`` steps, at the first and last one, and with a validation."""
        row: dict[str, Any] = {
            "step": progress.step,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": learning_rate,
            "tokens": progress.tokens,
            "data/batch_hash": outcome.batch_hash,
            "skipped_steps": progress.skipped,
            **self._over_ranks(outcome.ranks),
        }
        if validation_loss is not None:
            row["validation/loss"] = validation_loss
        if self._first:  # compilation and warm-up: reported apart, never averaged in
            self._first = False
            row["time/first_step_s"] = seconds["step_s"]
            self._emit(row)
            if self.display:
                self.display.say(f"first step {seconds['step_s']:.2f} s (not counted in the averages)")
            return
        for name, value in seconds.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._counted += 1
        self._steady_s += seconds["step_s"]
        self._steady_steps += 1
        if progress.step % self.log_every and not last and validation_loss is None:
            return
        means = {name: total / self._counted for name, total in self._sums.items()}
        row |= {f"time/{name}": value for name, value in means.items()}
        tokens_per_s = self.tokens_per_step / means["step_s"]
        row["throughput/tokens_per_s"] = tokens_per_s
        row["throughput/tokens_per_s_per_rank"] = tokens_per_s / self.ranks
        if self.flops_per_step is not None:
            per_rank = self.flops_per_step / means["step_s"] / self.ranks
            row["throughput/model_tflops_per_rank"] = per_rank / 1e12
            if self.peak_flops is not None:
                row["throughput/mfu"] = per_rank / self.peak_flops
        self._sums, self._counted = {}, 0
        self._emit(row)

    def _emit(self, row: dict[str, Any]) -> None:
        if self.writer:
            self.writer.write(row)
        if self.display:
            mean = self._steady_s / self._steady_steps if self._steady_steps else None
            self.display.step(row, mean * (self.steps - row["step"]) if mean is not None else None)

    def _over_ranks(self, ranks: list[list[float]]) -> dict[str, float]:
        """Memory peaks and the slowest rank, from what every rank measured; see `measure_rank`."""
        busy, rss, peak = (list(column) for column in zip(*ranks, strict=True))
        row = {"memory/peak_rss_gib": max(rss)}
        if max(peak):
            row["memory/peak_gib"] = max(peak)
        if not self._first and (mean := sum(busy) / len(busy)):
            row["rank/slowest"] = busy.index(max(busy))
            row["rank/skew"] = max(busy) / mean
        return row

    def close(self) -> None:
        if self.writer:
            self.writer.close()
        if self.display:
            self.display.close()

"""What a person sees: a header, then a live line on a terminal or plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ConsoleDisplay:
    """``mode``: ``rich`` (a live line; off a terminal the same as plain), ``plain`` (lines, about one every few seconds),
    ``silent``."""

    def __init__(self, mode: str, steps: int) -> None:
        self._steps = steps
        self._silent = mode == "silent"
        self._rich = mode == "rich" and sys.stderr.isatty()
        self._live: Progress | None = None
        self._task: Any = None
        self._last_line = 0.0

    def begin(self, step: int) -> None:
        """Starts the live line, after ``step`` finished steps."""
        if step:
            self.say(f"resumed after step {step}")
        if self._rich:
            self._live = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(compact=True),
                console=Console(stderr=True),
            )
            self._task = self._live.add_task("", total=self._steps, completed=step, text="")
            self._live.start()

    def step(self, row: dict[str, Any], eta_s: float | None, checkpoint_age_s: float | None = None) -> None:
        """Shows one logged row, in 80 columns."""
        if self._silent:
            return
        parts = describe(row, checkpoint_age_s)
        if self._live is not None:
            width = max(20, self._live.console.width - 44)  # beside step count, bar and remaining time
            self._live.update(self._task, completed=row["step"], text=fit(parts, width))
            return
        now = time.monotonic()
        if row["step"] in (1, self._steps) or now - self._last_line > 5 or "validation/loss" in row:
            self._last_line = now
            if "validation/loss" in row:
                parts.insert(1, f"validation {row['validation/loss']:.4f}")
            if eta_s is not None and row["step"] < self._steps:
                parts.insert(2, f"ETA {_duration(eta_s)}")
            self.say(fit([f"step {row['step']}/{self._steps}", *parts], 80))

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._silent:
            return
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def describe(row: dict[str, Any], checkpoint_age_s: float | None) -> list[str]:
    """What a row says, the most wanted first: loss, speed, bytes between hosts, memory, age of the last checkpoint."""
    parts = [f"loss {row['loss']:.4f}"]
    if "throughput/tokens_per_s" in row:
        parts.append(f"{_count(row['throughput/tokens_per_s'])} tok/s")
    if "throughput/mfu" in row:
        parts.append(f"MFU {row['throughput/mfu']:.0%}")
    elif "throughput/model_tflops_per_rank" in row:
        parts.append(f"{row['throughput/model_tflops_per_rank']:.3g} TFLOP/s")
    if row.get("comm/between_hosts/bytes"):
        parts.append(f"net {_count(row['comm/between_hosts/bytes'])}B")
    memory = row.get("memory/peak_gib") or row.get("memory/peak_rss_gib")
    if memory:
        parts.append(f"{memory:.3g}GiB")
    if checkpoint_age_s is not None:
        parts.append(f"saved {_duration(checkpoint_age_s)}")
    return parts


def fit(parts: list[str], width: int) -> str:
    """As many of ``parts`` as ``width`` columns hold, the first ones first."""
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 2 + len(part) > width:
            break
        text += "  " + part
    return text


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

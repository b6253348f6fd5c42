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

    def step(self, row: dict[str, Any], eta_s: float | None) -> None:
        """Shows one logged row."""
        if self._silent:
            return
        text = f"loss {row['loss']:.4f}"
        if "throughput/tokens_per_s" in row:
            text += f"  {_count(row['throughput/tokens_per_s'])} tok/s"
        if self._live is not None:
            self._live.update(self._task, completed=row["step"], text=text)
            return
        now = time.monotonic()
        if row["step"] in (1, self._steps) or now - self._last_line > 5 or "validation/loss" in row:
            self._last_line = now
            validation = f"  validation {row['validation/loss']:.4f}" if "validation/loss" in row else ""
            eta = f"  ETA {_duration(eta_s)}" if eta_s is not None and row["step"] < self._steps else ""
            self.say(f"step {row['step']}/{self._steps}  {text}{validation}{eta}")

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


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

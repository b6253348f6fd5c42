"""What a person sees: a header, then a live display on a terminal or plain lines elsewhere, in 80
columns. Rank 0 only."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parallel2d.files import for_terminal

WIDTH = 80


class ConsoleDisplay:
    """``mode``: ``rich`` (a bar and the newest row, live; off a terminal the same as plain),
    ``plain`` (a row every few seconds), ``silent``. ``unit``: what is counted, in short."""

    def __init__(self, mode: str, steps: int, unit: str = "tok") -> None:
        self._steps, self._unit = steps, unit
        self._silent = mode == "silent"
        self._rich = mode == "rich" and sys.stderr.isatty()
        self._live: Live | None = None
        self._last_line = 0.0

    def begin(self, step: int) -> None:
        """Starts the live display, after ``step`` finished steps."""
        if step:
            self.say(f"resumed after step {step}")
        if self._rich:
            self._live = Live(
                self._view(step, [], None), console=Console(stderr=True), auto_refresh=False
            )
            self._live.start(refresh=True)

    def step(
        self, row: dict[str, Any], eta_s: float | None, checkpoint_age_s: float | None = None
    ) -> None:
        """Shows one logged row. ``eta_s``: seconds that the rest will take; ``checkpoint_age_s``:
        since the last save."""
        if self._silent:
            return
        parts = describe(row, checkpoint_age_s, self._unit)
        eta = f"ETA {_duration(eta_s)}" if eta_s is not None and row["step"] < self._steps else None
        now = time.monotonic()
        if self._live is not None:
            if row["step"] == self._steps or now - self._last_line > 0.1:
                self._last_line = now
                self._live.update(self._view(row["step"], parts, eta), refresh=True)
        elif (
            row["step"] in (1, self._steps) or now - self._last_line > 5 or "validation/loss" in row
        ):
            self._last_line = now
            for line in wrap(
                [f"step {row['step']}/{self._steps}", *parts, *([eta] if eta else [])]
            ):
                self.say(line)

    def _view(self, step: int, parts: list[str], eta: str | None) -> Group:
        """A line with the bar, and below it what the newest row says."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            f"step {step}/{self._steps}", ProgressBar(total=self._steps, completed=step), eta or ""
        )
        return Group(bar, *(Text(line, no_wrap=True) for line in wrap(parts)))

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._silent:
            return
        if self._live is not None:
            self._live.console.print(for_terminal(text), markup=False, highlight=False)
        else:
            print(for_terminal(text), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def describe(row: dict[str, Any], checkpoint_age_s: float | None, unit: str = "tok") -> list[str]:
    """What a row says: loss, speed, bytes between hosts, memory, age of the last checkpoint."""
    parts = [f"loss {row['loss']:.4f}"]
    if "validation/loss" in row:
        parts.append(f"validation {row['validation/loss']:.4f}")
    if "throughput/tokens_per_s" in row:
        parts.append(f"{_count(row['throughput/tokens_per_s'])} {unit}/s")
    if "throughput/mfu" in row:
        parts.append(f"MFU {row['throughput/mfu']:.0%}")
    elif "throughput/model_tflops_per_rank" in row:
        parts.append(f"{row['throughput/model_tflops_per_rank']:.3g} TFLOP/s")
    if row.get("comm/between_hosts/bytes"):
        parts.append(f"net {_count(row['comm/between_hosts/bytes'])}B/step")
    memory = row.get("memory/peak_gib") or row.get("memory/peak_rss_gib")
    if memory:
        parts.append(f"{memory:.3g} GiB")
    if checkpoint_age_s is not None:
        parts.append(f"saved {_duration(checkpoint_age_s)} ago")
    return parts


def wrap(parts: list[str], width: int = WIDTH) -> list[str]:
    """``parts`` in lines of at most ``width`` columns; those after the first are indented."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return lines


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""`ConsoleDisplay`: the console output of rank 0 in 80 columns, as a live display or as lines."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from parallel2d.base.files import for_terminal
from parallel2d.training.metrics import keys

WIDTH = 80
_REDRAWN_EVERY_S = 0.1  # minimum interval of the live display
_LINE_EVERY_S = 5.0  # interval of lines with mode ``plain``


class ConsoleDisplay:
    """Shows the progress of a run.

    Args:
        mode: ``rich`` (a live progress bar with the newest row), ``plain`` (a line every few
            seconds) or ``silent``. If stderr is not a terminal, ``rich`` acts as ``plain``.
        steps: number of steps of the run.
        unit: abbreviation of the unit of throughput, such as ``tok``.
        label: prefix of every line, for several jobs that print to one terminal. A label disables
            the progress bar.
    """

    def __init__(self, mode: str, steps: int, unit: str = "tok", label: str = "") -> None:
        self._steps, self._unit = steps, unit
        self._label = f"{label} " if label else ""
        self._is_silent = mode == "silent"
        self._is_live = mode == "rich" and sys.stderr.isatty() and not label
        self._live: Live | None = None
        self._last_shown = 0.0

    def begin(self, step: int) -> None:
        """Start the live display after ``step`` finished steps."""
        if step:
            self.log(f"resumed after step {step}")
        if self._is_live:
            # Automatic refresh would run in a thread, which would slow down the loop.
            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
            self._live.update(self._view(step, [], ""), refresh=True)

    def step(
        self, row: dict[str, Any], eta_s: float | None, checkpoint_age_s: float | None = None
    ) -> None:
        """Show a row if its output is due, with the estimated time to the end and the age of the
        last checkpoint."""
        now, step = time.monotonic(), row[keys.STEP]
        since_last_s = now - self._last_shown
        is_due = step in (1, self._steps) or since_last_s > _LINE_EVERY_S
        if self._is_live:
            is_due |= since_last_s > _REDRAWN_EVERY_S
        else:  # Printed lines stay visible, so each validation gets a line.
            is_due |= keys.VALIDATION_LOSS in row or bool(keys.set_losses(row))
        if self._is_silent or not is_due:
            return
        self._last_shown = now
        parts, eta = describe(row, checkpoint_age_s, self._unit), ""
        if eta_s is not None and step < self._steps:
            eta = f"ETA {_duration(eta_s)}"
        if self._live is not None:
            self._live.update(self._view(step, parts, eta), refresh=True)
            return
        shown = [f"step {step}/{self._steps}", *parts, eta]
        for line in wrap(list(filter(None, shown))):
            self.log(line)

    def _view(self, step: int, parts: list[str], eta: str) -> Group:
        left, right = Column(no_wrap=True), Column(no_wrap=True)
        bar = Table.grid(left, Column(ratio=1), right, padding=(0, 1), expand=True)
        progress = ProgressBar(total=self._steps, completed=step)
        bar.add_row(f"step {step}/{self._steps}", progress, eta)
        return Group(bar, *(Text(line, no_wrap=True) for line in wrap(parts)))

    def log(self, text: str) -> None:
        """Print a permanent line."""
        if self._is_silent:
            return
        if self._live is not None:
            self._live.console.print(for_terminal(text), markup=False, highlight=False)
            return
        lines = [f"{self._label}{line}\n" for line in for_terminal(text).splitlines()]
        # Standard error may be a file on a full disk, which must not end the run.
        with contextlib.suppress(OSError):
            print("".join(lines), end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def describe(row: dict[str, Any], checkpoint_age_s: float | None, unit: str = "tok") -> list[str]:
    """Format a row: loss, speed, bytes between hosts, memory, age of the last checkpoint."""
    parts = [f"loss {row[keys.LOSS]:.4f}"]
    if keys.VALIDATION_LOSS in row:
        parts.append(f"validation {row[keys.VALIDATION_LOSS]:.4f}")
    for name, loss in keys.set_losses(row).items():
        parts.append(f"{name} {loss:.4f}")
    if keys.TOKENS_PER_S in row:
        parts.append(f"{_count(row[keys.TOKENS_PER_S])} {unit}/s")
    for forms in _ALTERNATIVES:
        key = next(filter(row.get, forms), None)
        if key is not None:
            parts.append(forms[key](row[key]))
    if checkpoint_age_s is not None:
        parts.append(f"saved {_duration(checkpoint_age_s)} ago")
    return parts


# From each entry, only the first key with a nonzero value is shown, in its format. MFU comes before
# TFLOP/s: if the device's peak is known, MFU is more informative.
_ALTERNATIVES: tuple[dict[str, Callable[[float], str]], ...] = (
    {keys.MFU: "MFU {:.0%}".format, keys.MODEL_TFLOPS_PER_RANK: "{:.3g} TFLOP/s".format},
    {keys.BYTES_BETWEEN_HOSTS: lambda value: f"net {_count(value)}B/step"},
    {keys.PEAK_GIB: "{:.3g} GiB".format, keys.PEAK_RSS_GIB: "{:.3g} GiB".format},
)


def wrap(parts: list[str]) -> list[str]:
    """Join ``parts`` into lines of at most ``WIDTH`` columns. Lines after the first are
    indented."""
    # Break lines only between parts: non-breaking spaces keep each part together.
    whole = []
    for part in parts:
        whole.append(part.replace(" ", "\xa0"))
    lines = textwrap.wrap("  ".join(whole), WIDTH, subsequent_indent="    ", break_long_words=False)
    found: list[str] = []
    for line in lines:
        found.append(line.replace("\xa0", " "))
    return found


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    """Format a duration as ``1:01:40``, or ``1:40`` below an hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours = f"{minutes // 60}:{minutes % 60:02}" if minutes >= 60 else f"{minutes}"
    return f"{hours}:{rest:02}"

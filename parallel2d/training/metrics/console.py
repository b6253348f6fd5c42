"""What rank 0 shows on the console, in 80 columns: a header, then a live display on a terminal or
plain lines elsewhere (`ConsoleDisplay`)."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parallel2d.base.files import for_terminal
from parallel2d.training.metrics import keys

WIDTH = 80
_REDRAWN_EVERY_S = 0.1  # the live display, at most
_LINE_EVERY_S = 5.0  # of plain lines


class ConsoleDisplay:
    """``mode``: ``rich`` (a bar and the newest row, live; off a terminal the same as plain),
    ``plain`` (a row every few seconds), ``silent``. ``unit``: what is counted, in short.
    ``label``: what every line begins with, where several jobs print to one terminal: then there is
    no bar."""

    def __init__(self, mode: str, steps: int, unit: str = "tok", label: str = "") -> None:
        self._steps = steps
        self._unit = unit
        self._silent = mode == "silent"
        self._label = f"{label} " if label else ""
        self._is_live = mode == "rich" and sys.stderr.isatty() and not label
        self._live: Live | None = None
        self._last_shown = 0.0

    def begin(self, step: int) -> None:
        """Starts the live display, after ``step`` finished steps."""
        if step:
            self.say(f"resumed after step {step}")
        if self._is_live:
            # No refresh by itself: that would be a thread, which takes time from the loop.
            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
            self._live.update(self._view(step, [], ""), refresh=True)

    def step(
        self, row: dict[str, Any], eta_s: float | None, checkpoint_age_s: float | None = None
    ) -> None:
        """Shows one logged row. ``eta_s``: seconds that the rest will take; ``checkpoint_age_s``:
        since the last save."""
        now = time.monotonic()
        if self._silent or not self._is_due(row, now - self._last_shown):
            return
        self._last_shown = now
        step = row[keys.STEP]
        parts = describe(row, checkpoint_age_s, self._unit)
        eta = f"ETA {_duration(eta_s)}" if eta_s is not None and step < self._steps else ""
        if self._live is not None:
            self._live.update(self._view(step, parts, eta), refresh=True)
            return
        shown = [f"step {step}/{self._steps}", *parts, eta]
        for line in wrap([part for part in shown if part]):
            self.say(line)

    def _is_due(self, row: dict[str, Any], since_last_s: float) -> bool:
        if row[keys.STEP] in (1, self._steps):
            return True
        # Plain lines stay, so every validation gets one.
        if self._live is None and (keys.VALIDATION_LOSS in row or keys.set_losses(row)):
            return True
        return since_last_s > (_LINE_EVERY_S if self._live is None else _REDRAWN_EVERY_S)

    def _view(self, step: int, parts: list[str], eta: str) -> Group:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        progress = ProgressBar(total=self._steps, completed=step)
        bar.add_row(f"step {step}/{self._steps}", progress, eta)
        lines = [Text(line, no_wrap=True) for line in wrap(parts)]
        return Group(bar, *lines)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._silent:
            return
        if self._live is not None:
            self._live.console.print(for_terminal(text), markup=False, highlight=False)
            return
        lines = [f"{self._label}{line}\n" for line in for_terminal(text).splitlines()]
        # Standard error may be a file on a full disk, which ends no run.
        with contextlib.suppress(OSError):
            print("".join(lines), end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def describe(row: dict[str, Any], checkpoint_age_s: float | None, unit: str = "tok") -> list[str]:
    """A row in words: loss, speed, bytes between hosts, memory, age of the last checkpoint."""
    parts = [f"loss {row[keys.LOSS]:.4f}"]
    if keys.VALIDATION_LOSS in row:
        parts.append(f"validation {row[keys.VALIDATION_LOSS]:.4f}")
    parts += [f"{name} {loss:.4f}" for name, loss in keys.set_losses(row).items()]
    if keys.TOKENS_PER_S in row:
        speed = _count(row[keys.TOKENS_PER_S])
        parts.append(f"{speed} {unit}/s")
    # Where the peak of the device is known, the fraction of it says more.
    if keys.MFU in row:
        parts.append(f"MFU {row[keys.MFU]:.0%}")
    elif keys.MODEL_TFLOPS_PER_RANK in row:
        parts.append(f"{row[keys.MODEL_TFLOPS_PER_RANK]:.3g} TFLOP/s")
    between_hosts = row.get(keys.BYTES_BETWEEN_HOSTS)
    if between_hosts:
        parts.append(f"net {_count(between_hosts)}B/step")
    # Of the device, where there is one
    memory = row.get(keys.PEAK_GIB) or row.get(keys.PEAK_RSS_GIB)
    if memory:
        parts.append(f"{memory:.3g} GiB")
    if checkpoint_age_s is not None:
        parts.append(f"saved {_duration(checkpoint_age_s)} ago")
    return parts


def wrap(parts: list[str]) -> list[str]:
    """``parts`` in lines of at most ``WIDTH`` columns; those after the first are indented."""
    # A line is broken between parts alone: at no space that cannot be broken.
    whole = [part.replace(" ", "\xa0") for part in parts]
    lines = textwrap.wrap("  ".join(whole), WIDTH, subsequent_indent="    ", break_long_words=False)
    return [line.replace("\xa0", " ") for line in lines]


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"

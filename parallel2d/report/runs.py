"""Reads run directories: rows, layout, and the figures that a comparison shows."""

from __future__ import annotations

import errno
import json
import os
import statistics
from dataclasses import dataclass
from typing import Any

from parallel2d import files
from parallel2d.errors import ConfigError

AXES = ("replicate", "shard", "tensor")
_MOST_ROWS = 20_000
_LONGEST_ROW = 1 << 16  # bytes
PHASES = ("forward_backward", "data", "sync", "optimizer")
LOSSES = ("first_step", "data", "checkpoint", "validation", "restart")
SHOWN = frozenset(
    (
        "step",
        "loss",
        "validation/loss",
        "throughput/tokens_per_s",
        "throughput/model_tflops_per_rank",
        "throughput/mfu",
        "time/step_s",
        "goodput/fraction",
        "memory/peak_gib",
        "memory/peak_rss_gib",
        *(f"comm/{axis}/{kind}" for axis in AXES for kind in ("bytes", "seconds")),
        *(f"time/{phase}_s" for phase in PHASES),
        *(f"goodput/lost_{name}_s" for name in LOSSES),
    )
)
_LARGEST_LAYOUT = 2**20
_LARGEST_FILE = 16 * 2**30
_LARGEST_NUMBER = 1e30


@dataclass(frozen=True)
class Run:
    """One run directory as it was found. ``rows``: the numbers in those of ``metrics.jsonl``, as
    they came."""

    name: str
    path: str
    rows: list[dict[str, float]]
    layout: dict[str, Any]

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of the rows that have a finite ``key``."""
        return [(row["step"], row[key]) for row in self.rows if key in row]

    def median(self, key: str) -> float | None:
        """Median over the rows that have ``key``; None without any."""
        values = [value for _, value in self.series(key)]
        return statistics.median(values) if values else None

    def last(self, key: str) -> float | None:
        """The newest value of ``key``; None without any."""
        values = self.series(key)
        return values[-1][1] if values else None


def read_run(path: str) -> Run:
    """Raises `ConfigError` with one sentence for a folder that is no run, or holds no finished
    step."""
    file, shown = os.path.join(path, "metrics.jsonl"), files.printable(path, 300)
    if not os.path.isdir(path):
        raise ConfigError(f"{shown}: no such run directory")
    if not os.path.lexists(file):
        raise ConfigError(f"{shown}: no metrics.jsonl here, so this is not a run directory")
    try:
        rows = _read_rows(file)
    except OSError as error:
        raise ConfigError(f"{shown}/metrics.jsonl cannot be read: {error.strerror}") from None
    if not rows:
        raise ConfigError(f"{shown}/metrics.jsonl: no finished step in it")
    layout: Any = {}
    try:
        layout = files.read_json(os.path.join(path, "layout.json"), _LARGEST_LAYOUT)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{shown}/layout.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{shown}/layout.json is not JSON: {files.printable(error)}") from None
    return Run(
        files.printable(os.path.basename(os.path.abspath(path))),
        shown,
        rows,
        layout if isinstance(layout, dict) else {},
    )


def _read_rows(path: str) -> list[dict[str, float]]:
    """The numbers of each row, of at most `_MOST_ROWS` rows: of longer runs every second, fourth,
    ... and the last."""
    rows: list[dict[str, float]] = []
    every, count, last = 1, 0, None
    with files.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
            raise OSError(errno.EFBIG, f"more than {_LARGEST_FILE >> 30} GiB")
        while line := file.readline(_LONGEST_ROW):
            # else torn by a kill, or longer than any row
            row = _numbers(line) if line.endswith(b"\n") else None
            if row is None:
                continue
            last = row
            if count % every == 0:
                rows.append(row)
            count += 1
            if len(rows) > _MOST_ROWS:
                rows, every = rows[::2], 2 * every
    if last is not None and rows[-1] is not last:
        rows.append(last)
    return rows


def _numbers(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not is_number(row.get("step")) or type(row["step"]) is not int:
        return None
    return {key: value for key, value in row.items() if is_number(value) and key in SHOWN}


def is_number(value: Any) -> bool:
    """A finite number of a size that something measured can have."""
    return type(value) in (int, float) and abs(value) < _LARGEST_NUMBER


def _part(layout: dict[str, Any], key: str) -> dict[str, Any]:
    found = layout.get(key)
    return found if isinstance(found, dict) else {}


def figures(run: Run) -> dict[str, str]:
    """The comparison's columns, as text; ``-`` for what was not measured."""
    mesh = _part(run.layout, "mesh")
    shown = {
        "run": run.name,
        "strategy": files.printable(run.layout.get("strategy", "-"), 40),
        "mesh": " x ".join(files.printable(mesh.get(axis, "?"), 20) for axis in AXES),
        "steps": str(run.rows[-1]["step"]),
        "loss": _number(run.last("loss"), "{:.4f}"),
        "tokens/s": _number(run.median("throughput/tokens_per_s"), "{:,.0f}"),
        "step s": _number(run.median("time/step_s"), "{:.4g}"),
        "TFLOP/s per rank": _number(run.median("throughput/model_tflops_per_rank"), "{:.4g}"),
        "MFU": _number(run.median("throughput/mfu"), "{:.1%}"),
        "goodput": _number(run.last("goodput/fraction"), "{:.1%}"),
    }
    for axis in AXES:
        shown[f"{axis} MB/step"] = _number(run.median(f"comm/{axis}/bytes"), "{:.4g}", 1e-6)
    memory = run.last("memory/peak_gib") or run.last("memory/peak_rss_gib")
    shown["peak GiB"] = _number(memory, "{:.3g}")
    return shown


def measured_and_predicted(run: Run) -> list[tuple[str, float, float | None]]:
    """(axis, median bytes sent per rank and step, predicted bytes or None) of the axes that were
    measured."""
    predicted = _part(run.layout, "predicted")
    found = []
    for axis in AXES:
        measured = run.median(f"comm/{axis}/bytes")
        if measured is not None:
            expected = predicted.get(f"comm/{axis}/bytes")
            found.append((axis, measured, expected if is_number(expected) else None))
    return found


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)

"""Reads run directories (`read_run`), and computes the figures of a comparison (`figures`)."""

from __future__ import annotations

import errno
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from parallel2d import files
from parallel2d.errors import ConfigError
from parallel2d.metrics import keys

# Causes with a column of their own
LOSSES = ("first_step", "data", "checkpoint", "validation", "restart")


def phase_key(phase: str) -> str:
    return keys.time_key(f"{phase}_s")


# Other numbers are not kept, so that rows take little memory whatever is in them.
SHOWN = frozenset(
    (
        keys.STEP,
        keys.LOSS,
        keys.VALIDATION_LOSS,
        keys.TOKENS_PER_S,
        keys.MODEL_TFLOPS_PER_RANK,
        keys.MFU,
        keys.STEP_S,
        keys.GOODPUT,
        keys.PEAK_GIB,
        keys.PEAK_RSS_GIB,
        *(keys.communication_key(axis, "bytes") for axis in keys.AXES),
        *keys.COMMUNICATION_SECONDS,
        *map(phase_key, keys.PHASES),
        *map(keys.lost_key, LOSSES),
    )
)
_MOST_ROWS = 20_000
_LONGEST_ROW = 1 << 16  # bytes
_LARGEST_CERTIFICATE = 2**24
_CERTIFIED = {"True": "yes", "False": "no"}
_LARGEST_LAYOUT = 2**20
_LARGEST_FILE = 16 * 2**30
_LARGEST_NUMBER = 1e30

Points = list[tuple[float, float]]  # (step, value)
Moved = tuple[str, float, float | None]  # axis, bytes measured, bytes predicted


@dataclass(frozen=True)
class Run:
    """The contents of one run directory. ``rows`` are the numbers of each row of
    ``metrics.jsonl``, in order."""

    name: str
    path: str
    rows: list[dict[str, float]]
    layout: dict[str, Any]
    certificate: dict[str, Any]  # empty where there is none

    def series(self, key: str) -> Points:
        """(step, value) of the rows that have a finite ``key``."""
        return [(row[keys.STEP], row[key]) for row in self.rows if key in row]

    def median(self, key: str) -> float | None:
        """Median over the rows that have ``key``; None without any."""
        values = [value for _, value in self.series(key)]
        if not values:
            return None
        return statistics.median(values)

    def mean(self, key: str) -> float | None:
        """Mean over the rows that have ``key``; None without any."""
        values = [value for _, value in self.series(key)]
        return statistics.fmean(values) if values else None

    def last(self, key: str) -> float | None:
        """The newest value of ``key``; None without any."""
        values = self.series(key)
        if not values:
            return None
        _, newest = values[-1]
        return newest


def read_run(path: str) -> Run:
    """Reads the run in folder ``path``. Raises `ConfigError` if the folder is not a run directory
    or has no finished step."""
    file = os.path.join(path, "metrics.jsonl")
    shown = files.printable(path, 300)
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
    name = files.printable(os.path.basename(os.path.abspath(path)))
    layout = _read_object(path, shown, "layout.json", _LARGEST_LAYOUT)
    certificate = _read_object(path, shown, "certificate.json", _LARGEST_CERTIFICATE)
    return Run(name, shown, rows, layout, certificate)


def _read_object(path: str, shown: str, name: str, largest: int) -> dict[str, Any]:
    """The contents of the file ``name`` of a run. Empty if there is none, as in older runs."""
    try:
        found = files.read_json(os.path.join(path, name), largest)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{shown}/{name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{shown}/{name} is not JSON: {files.printable(error)}") from None
    return found if isinstance(found, dict) else {}


def _read_rows(path: str) -> list[dict[str, float]]:
    """The numbers of each row, of at most `_MOST_ROWS` rows. Of longer runs every second, fourth,
    ... and the last row are kept."""
    rows: list[dict[str, float]] = []
    every = 1
    last = None
    with files.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
            raise OSError(errno.EFBIG, f"more than {_LARGEST_FILE >> 30} GiB")
        for count, row in enumerate(_all_rows(file)):
            last = row
            if count % every == 0:
                rows.append(row)
            # Remove every second row, and from now on keep half as many.
            if len(rows) > _MOST_ROWS:
                rows = rows[::2]
                every *= 2
    if last is not None and rows[-1] is not last:
        rows.append(last)
    return rows


def _all_rows(file: BinaryIO) -> Iterator[dict[str, float]]:
    while line := file.readline(_LONGEST_ROW):
        row = _numbers(line)
        if row is not None:
            yield row


def _numbers(line: bytes) -> dict[str, float] | None:
    """The numbers of one row. None for a line that is not a row: it is incomplete after a kill, or
    too long."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    step = row.get(keys.STEP)
    if type(step) is not int or not is_number(step):
        return None
    # The writer puts null for a number that is not finite.
    numbers = {}
    for key in SHOWN.intersection(row):
        if is_number(row[key]):
            numbers[key] = row[key]
    return numbers


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number of a size that a measurement can have."""
    return type(value) in (int, float) and abs(value) < _LARGEST_NUMBER


def _part(layout: dict[str, Any], key: str) -> dict[str, Any]:
    found = layout.get(key)
    # The file may have been edited.
    if not isinstance(found, dict):
        return {}
    return found


def figures(run: Run) -> dict[str, str]:
    """The columns of the comparison, as text; ``-`` where nothing was measured."""
    mesh = _part(run.layout, "mesh")
    shown = {
        "run": run.name,
        "strategy": files.printable(run.layout.get("strategy", "-"), 40),
        "mesh": " x ".join(files.printable(mesh.get(axis, "?"), 20) for axis in keys.AXES),
        "certified": _CERTIFIED.get(str(run.certificate.get("passed")), "-"),
        "steps": str(run.rows[-1][keys.STEP]),
        "loss": number_text(run.last(keys.LOSS), "{:.4f}"),
        "tokens/s": number_text(run.median(keys.TOKENS_PER_S), "{:,.0f}"),
        "step s": number_text(run.median(keys.STEP_S), "{:.4g}"),
        "TFLOP/s per rank": number_text(run.median(keys.MODEL_TFLOPS_PER_RANK), "{:.4g}"),
        "MFU": number_text(run.median(keys.MFU), "{:.1%}"),
        "goodput": number_text(run.last(keys.GOODPUT), "{:.1%}"),
    }
    for axis in keys.AXES:
        # The mean: with sync=diloco most steps send nothing between replicas.
        measured = run.mean(keys.communication_key(axis, "bytes"))
        shown[f"{axis} MB/step"] = number_text(measured, "{:.4g}", 1e-6)
    memory = run.last(keys.PEAK_GIB) or run.last(keys.PEAK_RSS_GIB)
    shown["peak GiB"] = number_text(memory, "{:.3g}")
    return shown


def measured_and_predicted(run: Run) -> list[Moved]:
    """(axis, mean bytes sent per rank and step, predicted bytes or None) of the axes that were
    measured."""
    predicted = _part(run.layout, "predicted")
    found: list[Moved] = []
    for axis in keys.AXES:
        key = keys.communication_key(axis, "bytes")
        measured = run.mean(key)
        if measured is None:
            continue
        expected = predicted.get(key)
        found.append((axis, measured, expected if is_number(expected) else None))
    return found


def number_text(value: float | None, form: str, scale: float = 1.0) -> str:
    """``value * scale`` formatted by ``form``, or ``-`` for None."""
    if value is None:
        return "-"
    return form.format(value * scale)

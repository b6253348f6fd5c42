"""Reads run directories (`find_runs`, `read_run`), and divides a run at changes of its layout
(`parts_of`). The contents of a directory are untrusted and are checked before use.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel2d.base import files
from parallel2d.base.errors import ConfigError
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.metrics_row import Row, read_lines, read_rows
from parallel2d.training.run_directory.start import Segment, read_segments

# In rows with a non-finite loss, which the writer stores as null, this key has the step
NOT_FINITE = "report/loss_not_finite"
# Label in a report -> key: phases of a step, bytes of an axis, waits, causes of lost time
PHASES = {phase.replace("_", " "): keys.time_key(f"{phase}_s") for phase in keys.PHASES}
BYTES = {axis: keys.communication_key(axis, "bytes") for axis in keys.AXES}
WAITS = {f"waits for {axis}": keys.communication_key(axis, "exposed_seconds") for axis in keys.AXES}
LOST = {cause.replace("_", " "): keys.lost_key(cause) for cause in keys.LOSSES}
RATES = (keys.TOKENS_PER_S, keys.MODEL_TFLOPS_PER_RANK, keys.MFU)
# Keys that are measured for every step. If rows are joined, the result has the mean of these keys,
# and the newest value of all other keys.
_MEANS = (
    *(keys.STEP_S, keys.time_key("checkpoint_s"), keys.SKEW, *RATES),
    *(*PHASES.values(), *BYTES.values(), *WAITS.values()),
)
_NEWEST = (
    *(keys.STEP, keys.SEGMENT, keys.LOSS, keys.VALIDATION_LOSS, keys.GRAD_NORM, NOT_FINITE),
    *(keys.LEARNING_RATE, keys.TOKENS, keys.SKIPPED_STEPS, keys.GOODPUT, keys.USEFUL_S),
    *(keys.WALL_S, keys.PEAK_GIB, keys.PEAK_RSS_GIB, keys.SLOWEST_RANK, *LOST.values()),
    *(keys.REPLICAS, keys.REPLICAS_JOINED, keys.REPEATED_SAMPLES, keys.REPLICAS_LOST_S),
)
# Other keys of a row are dropped, so that the memory of a row is limited.
COLUMNS = {key: place for place, key in enumerate((*_MEANS, *_NEWEST))}
_MOST_ROWS = 2_000  # number of points of a curve
_LARGEST_OBJECT = 2**20
_LARGEST_NUMBER = 1e30

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """Contents of one run directory, or of a part of the run.

    ``table`` [rows, `COLUMNS`] has the numbers of ``metrics.jsonl``, with NaN for missing numbers.
    ``before`` is the row before the first row of ``table``.
    """

    name: str
    table: Numbers
    layout: dict[str, Any]
    segments: tuple[Segment, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)  # empty while the run trains
    before: Numbers = field(default_factory=lambda: np.zeros(len(COLUMNS)))

    def __getitem__(self, key: str) -> Numbers:
        """Return the value of ``key`` in each row."""
        return self.table[:, COLUMNS[key]]

    def known(self, key: str) -> Numbers:
        """Return the values of ``key`` without NaN."""
        return self[key][~np.isnan(self[key])]

    def last(self, key: str) -> float:
        """Return the newest value of ``key`` that is not NaN; NaN if all values are NaN."""
        return float(np.append(math.nan, self.known(key))[-1])

    def total(self, key: str) -> float:
        """Return the growth of ``key`` over the rows. The values of ``key`` are totals since the
        first start of the run."""
        return self.last(key) - float(np.nan_to_num(self.before[COLUMNS[key]]))

    def mean(self, key: str) -> float:
        """Return the mean over the rows that have ``key``. The mean of a rate is weighted by the
        seconds of the steps."""
        weights = self[keys.STEP_S] if key in RATES else np.ones(len(self.table))
        weights = np.where(np.isnan(self[key]), 0.0, np.nan_to_num(weights))
        return ratio(float(np.nan_to_num(self[key]) @ weights), float(weights.sum()))

    def predicted(self, key: str) -> float:
        """Return the layout's prediction for ``key``; NaN if it is not a number."""
        predictions = self.layout.get("predicted")
        # A user may have edited the file, so the type is checked.
        return files.number(predictions.get(key)) if isinstance(predictions, dict) else math.nan


def ratio(one: float, other: float) -> float:
    """Return ``one / other``, or NaN if ``other`` is zero."""
    return one / other if other else math.nan


def find_runs(paths: Sequence[str]) -> list[str]:
    """Return the run directories at ``paths`` or below them, by name; a path without run
    directories is returned unchanged."""
    found: dict[str, None] = {}  # a set in order
    for path in paths:
        below: list[str] = []
        if not os.path.lexists(os.path.join(path, "metrics.jsonl")):
            below = sorted(_folders_with_rows(path))
        found |= dict.fromkeys(below or [path])
    return list(found)


def _folders_with_rows(path: str) -> Iterator[str]:
    try:
        for folder, names in files.walk(path):
            if "metrics.jsonl" in names:
                yield folder
    except OSError as error:
        where = files.printable(error.filename, 300)
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None


def read_run(path: str) -> Run:
    """Read a run. Raises `ConfigError` if ``path`` is not a run directory, is not readable, or has
    no finished step."""
    shown = files.printable(path, 300)
    if not os.path.lexists(os.path.join(path, "metrics.jsonl")):
        raise ConfigError(f"{shown}: no metrics.jsonl here, so this is not a run directory")
    readers = {
        "metrics.jsonl": _read_rows,
        "layout.json": _read_object,
        "segments.jsonl": lambda file: tuple(read_segments(os.path.dirname(file))),
        "summary.json": _read_object,
    }
    found: list[Any] = []
    for name, read in readers.items():
        try:
            found.append(read(os.path.join(path, name)))
        except OSError as error:
            raise ConfigError(f"{shown}/{name} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{shown}/{name} is not JSON: {files.printable(error)}") from None
    run = Run(files.printable(os.path.basename(os.path.abspath(path))), *found)
    if not len(run.table):
        raise ConfigError(f"{shown}/metrics.jsonl: no finished step in it")
    return run


def _read_object(path: str) -> dict[str, Any]:
    found: Any = None
    with contextlib.suppress(FileNotFoundError):
        found = files.read_json(path, _LARGEST_OBJECT)
    return found if isinstance(found, dict) else {}


def _read_rows(path: str) -> Numbers:
    """Return the numbers in the file as [rows, `COLUMNS`]. Consecutive rows are joined if the file
    has more than `_MOST_ROWS` rows."""
    found: list[Numbers] = []
    with files.open_regular(path) as file:
        length = sum(1 for _ in read_lines(file)) // _MOST_ROWS + 1
        file.seek(0)
        rows = _numbers(read_rows(file))
        while block := list(itertools.islice(rows, length)):
            found.append(_joined(np.array(block)))
    table = np.array(found).reshape(-1, len(COLUMNS))
    return table[~np.isnan(table[:, COLUMNS[keys.STEP]])]


def _numbers(rows: Iterable[Row]) -> Iterator[list[float]]:
    """Yield the numbers of each row, `COLUMNS`."""
    for row in rows:
        if row.get(keys.LOSS, 0.0) is None:
            row[NOT_FINITE] = row[keys.STEP]
        values = [math.nan] * len(COLUMNS)
        for key in COLUMNS.keys() & row.keys():
            values[COLUMNS[key]] = files.number(row[key])
        yield values


def _joined(rows: Numbers) -> Numbers:
    """Join several rows; see `_MEANS`."""
    # No measurement is larger than this limit. Sums of larger numbers could be infinite.
    rows[np.abs(rows) > _LARGEST_NUMBER] = math.nan
    is_known = ~np.isnan(rows)
    joined = np.nansum(rows, axis=0) / np.maximum(1, is_known.sum(axis=0))
    newest = np.where(is_known, np.arange(len(rows))[:, None], 0).max(axis=0)
    places = np.arange(len(_MEANS), len(COLUMNS))
    joined[places] = rows[newest[places], places]
    return np.where(is_known.any(axis=0), joined, math.nan)


def parts_of(*runs: Run) -> list[Run]:
    """Return the runs. A run that changed its layout is divided into one part per layout."""
    parts: list[Run] = []
    for run in runs:
        starts, kinds = {}, {}
        for segment in run.segments:
            starts[segment.number] = segment
            kinds[segment.number] = _kind_of(segment.layout)
        # None for rows of a start that has no line in segments.jsonl
        of_rows = np.array(list(map(kinds.get, run[keys.SEGMENT])), dtype=object)
        begins = np.flatnonzero(of_rows[1:] != of_rows[:-1]) + 1
        before = run.before
        for table in np.split(run.table, begins):
            numbers = starts.keys() & set(table[:, COLUMNS[keys.SEGMENT]])
            own = tuple(map(starts.__getitem__, sorted(numbers)))
            # layout.json describes the last start, which may have no rows yet.
            layout = own[0].layout if own else run.layout
            part = replace(run, table=table, layout=layout, segments=own, before=before)
            before = table[-1]
            if len(begins):
                first, last = part[keys.STEP][[0, -1]]
                part = replace(part, name=f"{run.name}: steps {first:.0f} to {last:.0f}")
            parts.append(part)
    return parts


def _kind_of(layout: Mapping[str, Any]) -> int:
    """Return a number that is equal for equal layouts, independent of host names."""
    hosts = host_names(layout)
    numbers = dict(zip(hosts, itertools.count(), strict=False))
    order = list(map(numbers.get, hosts))
    return hash(json.dumps({**layout, "hosts": order, "torch": None}, sort_keys=True))


def host_names(layout: Mapping[str, Any]) -> list[str]:
    """Return the host of each rank; empty if the layout does not list hosts."""
    hosts = layout.get("hosts")
    return list(map(str, hosts)) if isinstance(hosts, list) else []

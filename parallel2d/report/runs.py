"""Reads run directories (`find_runs`, `read_run`), and takes a run apart where its layout changed
(`parts_of`)."""

from __future__ import annotations

import errno
import itertools
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, TypeGuard

from parallel2d import files
from parallel2d.errors import ConfigError
from parallel2d.metrics import keys
from parallel2d.metrics.row_file import parse_row
from parallel2d.run_directory import Segment, read_segments

# 1 in a row whose loss was not finite. The writer puts null there.
NOT_FINITE = "report/loss_not_finite"
CHECKPOINT_S = keys.time_key("checkpoint_s")


def phase_key(phase: str) -> str:
    """Of the seconds of one of `keys.PHASES`."""
    return keys.time_key(f"{phase}_s")


# Other numbers are not kept, so that rows take little memory whatever is in them.
SHOWN = frozenset(
    (
        keys.STEP,
        keys.SEGMENT,
        keys.LOSS,
        keys.VALIDATION_LOSS,
        keys.GRAD_NORM,
        keys.LEARNING_RATE,
        keys.TOKENS,
        keys.SKIPPED_STEPS,
        keys.TOKENS_PER_S,
        keys.MODEL_TFLOPS_PER_RANK,
        keys.MFU,
        keys.STEP_S,
        keys.GOODPUT,
        keys.USEFUL_S,
        keys.WALL_S,
        keys.PEAK_GIB,
        keys.PEAK_RSS_GIB,
        keys.SLOWEST_RANK,
        keys.SKEW,
        CHECKPOINT_S,
        *(keys.communication_key(axis, "bytes") for axis in keys.AXES),
        *(keys.communication_key(axis, "exposed_seconds") for axis in keys.AXES),
        *map(phase_key, keys.PHASES),
        *map(keys.lost_key, keys.LOSSES),
    )
)
_MOST_ROWS = 20_000
_LONGEST_ROW = 1 << 16  # bytes
_LARGEST_CERTIFICATE = 2**24
_LARGEST_LAYOUT = 2**20
_LARGEST_SUMMARY = 2**20
_LARGEST_FILE = 16 * 2**30
_LARGEST_NUMBER = 1e30

Points = list[tuple[float, float]]  # (step, value)


@dataclass(frozen=True)
class Run:
    """The contents of one run directory. ``rows`` are the numbers of each row of
    ``metrics.jsonl``, in order; ``before``, of a part of a run: the row before its first."""

    name: str
    path: str
    rows: list[dict[str, float]]
    layout: dict[str, Any]
    certificate: dict[str, Any]  # empty where there is none
    segments: tuple[Segment, ...] = ()
    before: dict[str, float] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)  # empty while it trains

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of its last start; empty of an older run."""
        return self.segments[-1].config if self.segments else {}

    def setting(self, *names: str) -> Any:
        """The value of a key of the configuration, by section and name; None where it is not
        known."""
        found: Any = self.config
        for name in names:
            if not isinstance(found, dict):
                return None
            found = found.get(name)
        return found

    def section(self, name: str) -> dict[str, Any]:
        """One of the mappings of the layout; empty where there is none."""
        found = self.layout.get(name)
        # The file may have been edited.
        return found if isinstance(found, dict) else {}

    def series(self, key: str) -> Points:
        """(step, value) of the rows that have a finite ``key``."""
        return [(row[keys.STEP], row[key]) for row in self.rows if key in row]

    def predicted(self, key: str) -> float | None:
        """What the layout predicts for ``key``; None where that is no number."""
        found = self.section("predicted").get(key)
        return found if is_number(found) else None

    def median(self, key: str) -> float | None:
        """Median over the rows that have ``key``; None without any."""
        values = [value for _, value in self.series(key)]
        return statistics.median(values) if values else None

    def mean(self, key: str) -> float | None:
        """Mean over the rows that have ``key``; None without any."""
        values = [value for _, value in self.series(key)]
        return statistics.fmean(values) if values else None

    def last(self, key: str) -> float | None:
        """The newest value of ``key``; None without any."""
        values = self.series(key)
        return values[-1][1] if values else None

    def seconds(self, key: str) -> float:
        """The newest value of ``key``; 0 without any."""
        return self.last(key) or 0.0

    def total(self, key: str) -> float | None:
        """How much ``key``, a total since the run first began, has grown over the rows; None
        without any."""
        newest = self.last(key)
        return None if newest is None else newest - self.before.get(key, 0.0)

    def share(self, key: str) -> float | None:
        """Which part of the seconds of its steps ``key``, in seconds of a step, is, over the rows
        that have both; None without any. First steps of processes have neither."""
        both = [row for row in self.rows if key in row and keys.STEP_S in row]
        whole = sum(row[keys.STEP_S] for row in both)
        return sum(row[key] for row in both) / whole if whole else None


def find_runs(paths: Sequence[str]) -> list[str]:
    """The run directories at ``paths``; for a folder that is none, those below it, by name. A path
    with none is returned as it is, for `read_run` to refuse."""
    found: list[str] = []
    for path in paths:
        if os.path.lexists(os.path.join(path, "metrics.jsonl")):
            found.append(path)
            continue
        below: list[str] = []
        for folder, names, files_in_it in os.walk(path):
            if "metrics.jsonl" in files_in_it:
                below.append(folder)
                names.clear()  # A run has no runs in it.
        found += sorted(below) or [path]
    return list(dict.fromkeys(found))


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
    try:
        segments = tuple(read_segments(path))
    except OSError as error:
        raise ConfigError(f"{shown}/segments.jsonl cannot be read: {error.strerror}") from None
    summary = _read_object(path, shown, "summary.json", _LARGEST_SUMMARY)
    return Run(name, shown, rows, layout, certificate, segments, summary=summary)


# Settings in which the parts of a run differ
_OF_A_PART = (
    "strategy",
    "mesh",
    "ranks",
    "precision",
    "bucketing",
    "global_batch_size",
    "accumulation",
    "predicted",
)


def all_parts(runs: Sequence[Run]) -> list[Run]:
    """`parts_of` each run, in one list."""
    return list(itertools.chain.from_iterable(map(parts_of, runs)))


def parts_of(run: Run) -> list[Run]:
    """A run that went on with another layout as several, each with the layout that its rows were
    measured on; any other run as it is."""
    by_number = {segment.number: segment for segment in run.segments}
    found: list[Run] = []
    layout: dict[str, Any] | None = None
    for row in run.rows:
        segment = by_number.get(int(row.get(keys.SEGMENT, 0)))
        if segment is not None and (layout is None or _differs(layout, segment.layout)):
            layout = segment.layout
            before = found[-1].rows[-1] if found else {}
            found.append(replace(run, rows=[], layout=layout, before=before))
        if not found:
            found.append(replace(run, rows=[]))
        found[-1].rows.append(row)
    found = [_with_own_starts(part, by_number) for part in found]
    if len(found) == 1:
        return found
    return [replace(part, name=f"{run.name}: {_steps(part)}") for part in found]


def _with_own_starts(part: Run, by_number: dict[int, Segment]) -> Run:
    numbers = dict.fromkeys(int(row.get(keys.SEGMENT, 0)) for row in part.rows)
    own = tuple(by_number[number] for number in numbers if number in by_number)
    return replace(part, segments=own)


def first_names(names: Sequence[str]) -> str:
    """``a, b, c, d and 3 more``."""
    shown = ", ".join(names[:4])
    left = len(names) - 4
    return f"{shown} and {left} more" if left > 0 else shown


def settings_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= settings_of(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _differs(layout: dict[str, Any], other: dict[str, Any]) -> bool:
    if _hosts(layout) != _hosts(other):
        return True
    return any(layout.get(key) != other.get(key) for key in _OF_A_PART)


def _hosts(layout: dict[str, Any]) -> list[int]:
    """Which ranks share a host, whatever the hosts are called."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(host, len(numbers)) for host in host_names(layout)]


def host_names(layout: Mapping[str, Any]) -> list[str]:
    """The host of each rank; empty where a layout does not say."""
    hosts = layout.get("hosts")
    return [str(host) for host in hosts] if isinstance(hosts, list) else []


def _steps(part: Run) -> str:
    first, last = part.rows[0][keys.STEP], part.rows[-1][keys.STEP]
    return f"steps {first} to {last}"


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
    row = parse_row(line)
    if row is None or not is_number(row[keys.STEP]):
        return None
    # The writer puts null for a number that is not finite.
    numbers = {}
    for key in SHOWN.intersection(row):
        if is_number(row[key]):
            numbers[key] = row[key]
    if row.get(keys.LOSS, 0.0) is None:
        numbers[NOT_FINITE] = 1
    return numbers


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a finite number of a size that a measurement can have."""
    return type(value) in (int, float) and abs(value) < _LARGEST_NUMBER

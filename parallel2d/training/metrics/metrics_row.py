"""Reads the rows of ``metrics.jsonl``: `read_rows`. `set_aside_after` removes the rows of steps
that a restart repeats.

The file is treated as untrusted. At most `LONGEST_ROW` bytes of a line are read at a time, and
files that would take minutes to read are refused.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
from collections.abc import Iterator
from itertools import count, filterfalse
from typing import Any, BinaryIO

from parallel2d.base.files import regular
from parallel2d.training.metrics.keys import STEP

LONGEST_ROW = 1 << 16  # bytes
_LARGEST_FILE = 4 << 30  # bytes
_MOST_LINES = 10_000_000
_MOST_BROKEN = 100_000  # lines that are not rows; each kill leaves at most one

Row = dict[str, Any]


def parse_row(line: bytes) -> Row | None:
    """Parse a row. Return None for a line that is not a row, such as the incomplete line of a
    killed process."""
    row: Any = None
    if line.endswith(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
    return row if isinstance(row, dict) and type(row.get(STEP)) is int else None


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of ``metrics.jsonl``. A long line is yielded in pieces. Raises OSError as
    `read_rows`."""
    _check_size(file)
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_ROW), b"")):
        if number >= _MOST_LINES:
            raise OSError(errno.EFBIG, f"more than {_MOST_LINES:,} lines", file.name)
        yield line


def read_rows(file: BinaryIO) -> Iterator[Row]:
    """Yield the rows of ``metrics.jsonl``, and skip invalid lines. Raises OSError if the file has
    more bytes, lines or invalid lines than a run can produce."""
    broken = 0
    for line in read_lines(file):
        row = parse_row(line)
        if row is not None:
            yield row
        else:
            broken += 1
            _check_broken(broken, file)


def _check_size(file: BinaryIO) -> None:
    if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
        raise OSError(errno.EFBIG, f"more than {_LARGEST_FILE >> 30} GiB", file.name)


def _check_broken(lines: int, file: BinaryIO) -> None:
    if lines > _MOST_BROKEN:
        raise OSError(errno.EINVAL, f"more than {_MOST_BROKEN:,} lines are no rows", file.name)


def seconds_in(row: Row, key: str) -> float:
    """Return the seconds under ``key``, or 0 for an impossible value: the file may be edited."""
    value: Any = row.get(key)
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        return 0.0
    return float(value)


def set_aside_after(path: str, from_step: int) -> tuple[Row | None, Row | None]:
    """Keep the rows up to ``from_step``, and move later rows to a separate file in the same folder,
    because the run repeats their steps. Raises OSError as `read_rows`.

    The function reads backwards from the end of the file to the first row that stays, so that its
    duration does not depend on the length of the run. Returns the last row of the file before the
    move, and the last row that stays.
    """
    if not os.path.exists(path) or not os.path.getsize(path):  # an empty file cannot be mapped
        return None, None
    last = standing = None
    with open(path, "r+b", opener=regular) as file:
        _check_size(file)
        cut = os.fstat(file.fileno()).st_size  # start of the rows to be moved
        broken = 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            while cut:
                # A line longer than `LONGEST_ROW` is read in pieces, none of which is a row.
                lowest = max(cut - LONGEST_ROW, 0)
                begin = max(data.rfind(b"\n", lowest, cut - 1) + 1, lowest)
                row = parse_row(data[begin:cut])
                last = last or row
                # Steps only increase, so all earlier rows stay too.
                if row is not None and row[STEP] <= from_step:
                    standing = row
                    break
                broken += row is None
                _check_broken(broken, file)
                cut = begin
        if cut < os.fstat(file.fileno()).st_size:
            base = path.removesuffix(".jsonl")
            unused = (f"{base}.before-restart-{number}.jsonl" for number in count(1))
            # The copy is written before the rows are cut off. If the process is killed in between,
            # the rows are in both files, and the next start moves them again. In the reverse order
            # the rows would be lost.
            with open(next(filterfalse(os.path.lexists, unused)), "xb") as aside:
                file.seek(cut)
                shutil.copyfileobj(file, aside)
            file.truncate(cut)
    return last, standing

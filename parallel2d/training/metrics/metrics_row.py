"""``metrics.jsonl``: `parse_row` reads a line, `set_aside_after` removes rows that a restart
undid."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from itertools import count, filterfalse
from typing import Any

from parallel2d.base.files import regular
from parallel2d.training.metrics.keys import STEP

Row = dict[str, Any]


def parse_row(line: bytes) -> Row | None:
    """Parse a row; None for an incomplete line, as a kill may leave it, and for any other text."""
    row: Any = None
    if line.endswith(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
    return row if isinstance(row, dict) and type(row.get(STEP)) is int else None


def seconds_in(row: Row, key: str) -> float:
    """Return the seconds under ``key``, or 0 for an impossible value: the file may be edited."""
    value: Any = row.get(key)
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        return 0.0
    return float(value)


def set_aside_after(path: str, from_step: int) -> tuple[Row | None, Row | None]:
    """Keep rows up to ``from_step``, and move later rows, which a restart has undone, to a file
    next to ``metrics.jsonl``. Raises OSError.

    Reads and writes only the later rows, from the end of the file, so that the duration of a
    restart does not depend on the length of the run. Returns the last row of the file before the
    move and the last row that stays.
    """
    if not os.path.exists(path) or not os.path.getsize(path):  # an empty file cannot be mapped
        return None, None
    last = standing = None
    with open(path, "r+b", opener=regular) as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cut = len(data)  # offset of the first row to move
            while cut:
                begin = data.rfind(b"\n", 0, cut - 1) + 1
                row = parse_row(data[begin:cut])
                last = last or row
                # Steps only grow, so all rows before this one stay too.
                if row is not None and row[STEP] <= from_step:
                    standing = row
                    break
                cut = begin
            undone = data[cut:]
        if undone:
            base = path.removesuffix(".jsonl")
            unused = (f"{base}.before-restart-{number}.jsonl" for number in count(1))
            # The copy is written before the rows are cut off: after a kill between the two, the
            # rows are in both files and the next start moves them again. In the other order they
            # would be lost.
            with open(next(filterfalse(os.path.lexists, unused)), "xb") as aside:
                aside.write(undone)
            file.truncate(cut)
    return last, standing

"""``metrics.jsonl``: a line of it (`parse_row`), what a restart undid (`set_aside_after`)."""

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
    """Reads a row; None for a line of which a kill left only a part, and for one that is no row."""
    row: Any = None
    if line.endswith(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
    return row if isinstance(row, dict) and type(row.get(STEP)) is int else None


def seconds_in(row: Row, key: str) -> float:
    """0 for a value that no run writes: the file may have been changed."""
    value: Any = row.get(key)
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        return 0.0
    return float(value)


def set_aside_after(path: str, from_step: int) -> tuple[Row | None, Row | None]:
    """Keeps rows up to ``from_step`` in place, and moves later ones, whose steps a restart undid,
    to a file beside it. Raises OSError.

    Reads and writes only those, from the end: a restart takes no longer because the run is long.
    Returns the last row that was there and the last one that stays.
    """
    if not os.path.exists(path) or not os.path.getsize(path):  # which no memory can be mapped to
        return None, None
    last = standing = None
    with open(path, "r+b", opener=regular) as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cut = len(data)  # where the rows to be moved begin
            while cut:
                begin = data.rfind(b"\n", 0, cut - 1) + 1
                row = parse_row(data[begin:cut])
                last = last or row
                # Steps only grow, so all rows before this one stand too.
                if row is not None and row[STEP] <= from_step:
                    standing = row
                    break
                cut = begin
            undone = data[cut:]
        if undone:
            base = path.removesuffix(".jsonl")
            unused = (f"{base}.before-restart-{number}.jsonl" for number in count(1))
            with open(next(filterfalse(os.path.lexists, unused)), "xb") as aside:
                aside.write(undone)
            file.truncate(cut)
    return last, standing

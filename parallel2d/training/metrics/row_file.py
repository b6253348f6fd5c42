"""The file ``metrics.jsonl``: a line of it (`parse_row`), and what a restart undid
(`set_aside_after`)."""

from __future__ import annotations

import json
import mmap
import os
from typing import Any

from parallel2d.training.metrics.keys import STEP

Row = dict[str, Any]


def parse_row(line: bytes) -> Row | None:
    """None for a line of which a kill left only a part, and for one that is no row."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get(STEP)) is not int:
        return None
    return row


def set_aside_after(path: str, from_step: int) -> tuple[Row | None, Row | None]:
    """Keeps rows up to ``from_step`` in place, and moves later ones, whose steps a restart undid,
    to a file beside it. Raises OSError.

    Reads and writes only those, from the end: a restart takes no longer because the run is long.
    Returns the last row that was there and the last one that stays.
    """
    if not os.path.exists(path) or not os.path.getsize(path):  # which no memory can be mapped to
        return None, None
    last = standing = None
    with open(path, "r+b") as file:
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
            with open(_unused_path(path), "wb") as aside:
                aside.write(undone)
            file.truncate(cut)
    return last, standing


def _unused_path(path: str) -> str:
    number = 1
    while True:
        aside = path.replace(".jsonl", f".before-restart-{number}.jsonl")
        if not os.path.exists(aside):
            return aside
        number += 1

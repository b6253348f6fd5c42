"""The file ``metrics.jsonl``: a line of it (`parse_row`), and what a restart undid
(`set_aside_after`)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any, BinaryIO

from parallel2d.metrics.keys import STEP

Row = dict[str, Any]

_BLOCK = 1 << 20  # bytes read at once from the end of a file


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
    to a file beside it.

    Reads and writes only those, from the end: a restart takes no longer because the run is long.
    Returns the last row that was there and the last one that stays.
    """
    if not os.path.exists(path):
        return None, None
    last = standing = None
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        cut = end  # where the rows to be moved begin
        for begin, line in _lines_backwards(file):
            row = parse_row(line)
            last = last or row
            # Steps only grow, so all rows before this one stand too.
            if row is not None and row[STEP] <= from_step:
                standing = row
                break
            cut = begin
        if cut < end:
            file.seek(cut)
            with open(_unused_path(path), "wb") as undone:
                shutil.copyfileobj(file, undone)
            file.truncate(cut)
    return last, standing


def _unused_path(path: str) -> str:
    number = 1
    while True:
        aside = path.replace(".jsonl", f".before-restart-{number}.jsonl")
        if not os.path.exists(aside):
            return aside
        number += 1


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file and where each begins, from the last to the first."""
    begin = file.seek(0, os.SEEK_END)
    rest = b""  # the beginning of a line that goes on in the block after
    while begin:
        size = min(_BLOCK, begin)
        begin -= size
        file.seek(begin)
        data = file.read(size) + rest
        lines = data.splitlines(keepends=True)
        at = begin + len(data)
        # The first line may begin before this block.
        rest = lines.pop(0) if begin else b""
        for line in reversed(lines):
            at -= len(line)
            yield at, line

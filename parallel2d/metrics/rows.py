"""Reads a line of ``metrics.jsonl``: `parse_row`."""

from __future__ import annotations

import json
from typing import Any

from parallel2d.metrics.keys import STEP

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

"""Goodput: which part of the wall time trained the model, and what took the rest, by name.

Seconds of steps, checkpoints and validations flow in; totals since the run first began flow out,
restarts included: a restarted run goes on from the totals of its last row, and what lies between
that row and its first new step is lost to the restart. Steps that it does again were useful for
nothing: their time moves from useful to ``repeated``.
"""

from __future__ import annotations

import time
from typing import Any

LOSSES = ("first_step", "data", "checkpoint", "validation", "restart", "repeated")


class Goodput:
    """Rank 0's ledger. ``useful`` = step time without the wait for data; everything is in
    seconds."""

    def __init__(self) -> None:
        self._lost = dict.fromkeys(LOSSES, 0.0)
        self._useful = 0.0
        self._wall_before = 0.0
        self._begun = time.time()

    def resume(
        self, step: int, last_row: dict[str, Any] | None, kept_row: dict[str, Any] | None
    ) -> None:
        """Goes on after ``step`` from what earlier incarnations wrote.

        ``last_row``: the last one, also one whose steps are done again now; ``kept_row``: the last
        one up to ``step``. Where rows are some steps apart, ``step`` may lie between these two, and
        the time between them is divided evenly.
        """
        if not last_row or "goodput/wall_s" not in last_row:
            return
        for name in LOSSES:
            self._lost[name] = _seconds(last_row, f"goodput/lost_{name}_s")
        self._useful = _seconds(last_row, "goodput/useful_s")
        if last_row["step"] > step:
            kept_step, kept_useful = (
                (kept_row["step"], _seconds(kept_row, "goodput/useful_s")) if kept_row else (0, 0.0)
            )
            share = (last_row["step"] - step) / (last_row["step"] - kept_step)
            again = share * max(0.0, self._useful - kept_useful)
            self._useful -= again
            self._lost["repeated"] += again
        pause = max(0.0, time.time() - _seconds(last_row, "goodput/unix_s"))
        self._lost["restart"] += pause
        self._wall_before = _seconds(last_row, "goodput/wall_s") + pause
        self._begun = time.time()

    def add(self, seconds: dict[str, float], *, first: bool) -> None:
        """One step. The whole first step of a process (compilation, first touch of memory) counts
        as lost."""
        if first:
            self._lost["first_step"] += seconds["step_s"]
        else:
            data = min(seconds.get("data_s", 0.0), seconds["step_s"])
            self._lost["data"] += data
            self._useful += seconds["step_s"] - data
        self._lost["checkpoint"] += seconds.get("checkpoint_s", 0.0)
        self._lost["validation"] += seconds.get("validation_s", 0.0)

    def row(self) -> dict[str, float]:
        """Totals: ``goodput/fraction`` = useful over wall time, and the seconds lost to each
        cause."""
        now = time.time()
        wall = self._wall_before + now - self._begun
        return {
            "goodput/fraction": self._useful / wall if wall > 0 else 0.0,
            "goodput/useful_s": self._useful,
            "goodput/wall_s": wall,
            "goodput/unix_s": now,
            **{f"goodput/lost_{name}_s": seconds for name, seconds in self._lost.items()},
        }


def _seconds(row: dict[str, Any], key: str) -> float:
    """0 for what no row of ours holds: the file may have been changed."""
    value: Any = row.get(key)
    return float(value) if type(value) in (int, float) and 0 <= value < 1e12 else 0.0

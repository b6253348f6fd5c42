"""Which part of the wall time trained the model, and what took the rest: `Goodput`.

The totals count from when the run first began, restarts included: a run that goes on takes the
totals of its last row. Where workers replaced others, the time between that row and their first new
step is lost to the restart. Where somebody started the run again, it is not: nobody waited for it.
Steps that are repeated were of no use before: their time moves from useful to ``repeated``.
"""

from __future__ import annotations

import time
from typing import Any

from parallel2d.training.metrics.keys import (
    GOODPUT,
    LOSSES,
    STEP,
    UNIX_S,
    USEFUL_S,
    WALL_S,
    lost_key,
)


class Goodput:
    """Totals on rank 0, in seconds. Useful is the time of steps without the wait for data."""

    def __init__(self) -> None:
        self._lost = dict.fromkeys(LOSSES, 0.0)
        self._useful = 0.0
        # When a process that had run through without pauses would have begun
        self._begun = time.time()

    def resume(
        self,
        step: int,
        last_row: dict[str, Any] | None,
        kept_row: dict[str, Any] | None,
        *,
        restarted: bool = True,
        not_before: float = 0.0,
    ) -> None:
        """Goes on after ``step`` from what earlier incarnations wrote.

        ``last_row``: the last one, also one whose steps are done again now; ``kept_row``: the last
        one up to ``step``. ``restarted``: workers replaced others, instead of a new start;
        ``not_before``: when the start that they belong to began, as of `time.time`.
        """
        if not last_row or WALL_S not in last_row:
            return
        for cause in LOSSES:
            self._lost[cause] = _seconds(last_row, lost_key(cause))
        self._useful = _seconds(last_row, USEFUL_S)
        if last_row[STEP] > step:
            kept = kept_row or {STEP: 0}
            # Rows may be some steps apart: the time between two is divided evenly over them.
            share = (last_row[STEP] - step) / (last_row[STEP] - kept[STEP])
            again = share * max(0.0, self._useful - _seconds(kept, USEFUL_S))
            self._useful -= again
            self._lost["repeated"] += again
        pause = 0.0
        if restarted:
            pause = max(0.0, time.time() - max(not_before, _seconds(last_row, UNIX_S)))
        self._lost["restart"] += pause
        self._begun = time.time() - _seconds(last_row, WALL_S) - pause

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
        """Totals, by key; ``goodput/fraction`` is useful over wall time."""
        now = time.time()
        wall = now - self._begun
        return {
            GOODPUT: self._useful / wall if wall > 0 else 0.0,
            USEFUL_S: self._useful,
            WALL_S: wall,
            UNIX_S: now,
            **{lost_key(cause): seconds for cause, seconds in self._lost.items()},
        }


def _seconds(row: dict[str, Any], key: str) -> float:
    """0 for a value that no run writes: the file may have been changed."""
    value: Any = row.get(key)
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        return 0.0
    return float(value)

"""How often to save where nodes fail, and what share of the time is left for training."""

from __future__ import annotations

import math
from typing import NamedTuple


class SavingPlan(NamedTuple):
    """``interval_s``: seconds of training between two checkpoints. ``goodput``: the share of the
    time in which a job makes progress that is kept."""

    interval_s: float
    goodput: float


def best_interval(save_s: float, restart_s: float, mtbf_s: float) -> SavingPlan:
    """The interval that loses least (Young 1974, Daly 2006, first order): sqrt(2 · save · mtbf).

    ``save_s``: seconds that training waits for one checkpoint; ``restart_s``: from a failure until
    training goes on; ``mtbf_s``: of the whole job, that of a node divided by their number. Of each
    interval ``save_s`` is lost, and of each ``mtbf_s`` the restart and, on average, half an
    interval. Exact to first order: for an interval and a restart that are short against ``mtbf_s``.
    Raises ValueError for numbers that are no times.
    """
    if not save_s > 0 or not mtbf_s > 0 or restart_s < 0:
        raise ValueError(
            f"save_s={save_s} and mtbf_s={mtbf_s} must be above 0 and restart_s={restart_s} at "
            "least 0"
        )
    interval = math.sqrt(2 * save_s * mtbf_s)
    saving = interval / (interval + save_s)
    lost = (interval / 2 + restart_s) / mtbf_s
    return SavingPlan(interval, max(0.0, saving * (1 - lost)))

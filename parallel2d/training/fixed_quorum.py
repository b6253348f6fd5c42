"""`FixedQuorum`: the quorum of a `Trainer` in a job in which no replica may fail. The class has the
same methods as `membership.StepQuorum`, the quorum of a job with replicas that may fail.

`start_step` returns this rank's share of the global batch. `should_commit`, called after the status
all-reduce, returns True if the trainer may update, and False if it must repeat the step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from parallel2d.training.assignment import Assignment
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.progress import StepOutcome


class FixedQuorum:
    """The quorum of a job in which no replica may fail. The quorum is the same in every step."""

    needs_all = is_ready = False
    lost_s = total_lost_s = 0.0

    def __init__(self, plan: BatchPlan, data_ranks: int) -> None:
        self._assignment = Assignment(plan, data_ranks)

    @property
    def plan(self) -> BatchPlan:
        return self._assignment.plan

    def start(self, stop_requested: Callable[[], bool], warm_up: Callable[[], None]) -> None:
        pass

    def start_step(self) -> Assignment:
        return self._assignment

    def should_commit(self, status: Tensor) -> bool:
        return True

    def finish_step(self, outcome: StepOutcome) -> bool:
        return outcome.preempted

    def repeats_evaluation(self) -> bool:
        return False

    def lead(self) -> None:
        pass

    def lose_state(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

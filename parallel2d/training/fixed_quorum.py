"""The questions of a `Trainer` to its quorum, and their answers in a job in which no replica may
fail: `FixedQuorum`. `membership.StepQuorum` answers them if replicas may fail.

A step asks `start_step` for the part of this rank in the global batch, and after the status
all-reduce `should_commit` for the permission to update. The answer False repeats the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parallel2d.base.replicas.events import Member
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.progress import StepOutcome


@dataclass(frozen=True)
class Assignment:
    """The part of this rank in the global batch of a step."""

    plan: BatchPlan
    """Its part of each global batch; the part of another replica if this replica computes
    nothing."""
    data_ranks: int
    """Number of data ranks whose gradients are averaged."""
    computes: bool = True
    """False while this replica receives the state; its gradients are zeros."""
    received: Mapping[str, Any] | None = None
    """The values of `Trainer.shared_state` that this replica has received, to be loaded."""
    rolled_back: Mapping[str, Any] | None = None
    """The state of a checkpoint, to be loaded. Its tensors are loaded already."""
    note: str = ""
    """A line for the log, after loading."""


def assign(
    plan: BatchPlan,
    members: Collection[Member],
    own: Member,
    shards: int,
    shard: int,
) -> BatchPlan:
    """Return the part of one rank in each global batch that ``members`` divide.

    Args:
        plan: a part of the same global batches.
        own: the replica of the rank.
        shards: number of data ranks of a replica.
        shard: position of the rank among them.
    """
    return BatchPlan(
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        data_rank=sorted(members).index(own) * shards + shard,
        data_ranks=len(members) * shards,
        allow_padding=True,
    )


class FixedQuorum:
    """The quorum of a job in which no replica may fail: the same in every step."""

    needs_all = is_ready = False
    lost_s = 0.0

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

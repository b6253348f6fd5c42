"""The quorum of each step of a `Trainer` whose replicas may not fail: `FixedQuorum`. It has the
methods of `membership.StepQuorum`, the quorum of a job whose replicas may fail.

`start_step` returns the part of this rank in the global batch. `should_commit`, called after the
status all-reduce, returns True if the trainer may update, and False if it must repeat the step.
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
    """The values of `Trainer.shared_state` that this replica has received and must load."""
    rolled_back: Mapping[str, Any] | None = None
    """The state of a checkpoint that the trainer must load. Its tensors are loaded already."""
    note: str = ""
    """A line for the log, written after the state was loaded."""


def assign(
    plan: BatchPlan,
    members: Collection[Member],
    own: Member,
    shards: int,
    shard: int,
) -> BatchPlan:
    """Return the part of one rank in each global batch that ``members`` divide.

    Args:
        plan: any plan of the same global batches, for the batch sizes.
        own: the replica of the rank.
        shards: number of data ranks of a replica.
        shard: position of the rank on the shard axis.
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

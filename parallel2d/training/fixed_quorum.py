"""`FixedQuorum`: the quorum of a `Trainer` in a job in which no replica may fail. It has the same
methods as `membership.StepQuorum`, the quorum of a job with replicas that may fail.

`start_step` returns this rank's share of the global batch. `should_commit`, called after the status
all-reduce, returns True if the trainer may update, and False if it must repeat the step.
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
    """The assignment of this rank in a step: its share of the global batch, and the state to
    load."""

    plan: BatchPlan
    """This rank's share of each global batch. If this replica computes nothing, it is the share of
    another replica."""
    data_ranks: int
    """Number of data ranks whose gradients are averaged."""
    computes: bool = True
    """False while this replica receives the state; its gradients are zeros."""
    received: Mapping[str, Any] | None = None
    """The `Trainer.shared_state` of the donor, which this replica has received and must load."""
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
    """Return one rank's share of each global batch, which is divided among the replicas
    ``members``.

    Args:
        plan: a plan with the same global batch size and micro-batch size.
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
    """The quorum of a job in which no replica may fail. It is the same in every step."""

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

"""Assignment of samples to live replicas: `assign` divides the global batch, `Assignment` is the
result for one rank and step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from parallel2d.base.replicas.events import Member
from parallel2d.training.data.feed import BatchPlan


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

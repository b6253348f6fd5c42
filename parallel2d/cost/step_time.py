"""Seconds of one training step, from those of each group of parameters: `step_seconds`.

[Note: what overlaps what] Forward gathers a group while the one before it computes. Backward
gathers the next group while one computes, and reduces gradients of the last one on the same link.
The replicas' reductions follow, each when the last group of its bucket has been reduced over the
shard axis, on their own link if the two axes do not use the same. Gradients that are sent in
another form are written by the processor that computes, before they are sent, and read when
backward has ended. The step goes on when all of that has ended: what did not fit behind compute is
exposed. On CPU forward and backward wait for each gather, unless
they prefetch, and backward waits for each reduction over the shard axis: torch calls them without
``async_op``, and there is no stream that they could run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class GroupSeconds(NamedTuple):
    """Seconds of one group of parameters in one micro-batch."""

    forward: float  # compute
    backward: float  # compute, with what is computed again
    gather: float  # one all-gather over the shard axis
    scatter: float  # the reduction of gradients over the shard axis
    reduce: float  # the reduction over the replicas of the bucket that this group completes
    frees: bool  # parameters are freed after forward, and gathered once more for backward
    encode: float = 0.0  # writing that bucket as it is sent
    decode: float = 0.0  # reading what was received of it


@dataclass(frozen=True)
class StepSchedule:
    """How a step runs. ``accumulation``: micro-batches; ``during_accumulation``: as of
    `SyncConfig`. ``shares_link``: the shard and the replicate axis use the same link.
    ``overlaps_gathers``: a group is gathered while the one before it computes.
    ``waits_for_scatters``: backward goes on when a group's gradients are reduced over the shard
    axis. ``tensor``: seconds that a micro-batch sends over the tensor axis; nothing hides them."""

    accumulation: int
    during_accumulation: str
    shares_link: bool
    overlaps_gathers: bool
    tensor: float = 0.0
    waits_for_scatters: bool = False


@dataclass(frozen=True)
class StepSeconds:
    """Parts of ``total``. ``shard`` and ``replicate``: exposed, that is, not hidden by compute."""

    compute: float
    tensor: float
    shard: float
    replicate: float
    update: float
    total: float

    @property
    def exposed_share(self) -> float:
        """The share of the step in which the device waits for a link."""
        return (self.tensor + self.shard + self.replicate) / self.total


def step_seconds(
    groups: Sequence[GroupSeconds],
    schedule: StepSchedule,
    *,
    update: float,
    between_steps: float = 0.0,
) -> StepSeconds:
    """``groups``: in the order in which forward runs them. ``update``: seconds of the optimizer.
    ``between_steps``: seconds per step that replicas exchange beside gradients, and that nothing
    hides; see [Note: what overlaps what]."""
    moving = _all_micro_batches(groups, schedule)
    without = [_not_reduced(group) for group in groups]
    alone = _all_micro_batches(without, schedule)
    compute = schedule.accumulation * sum(group.forward + group.backward for group in groups)
    tensor = schedule.accumulation * schedule.tensor
    return StepSeconds(
        compute=compute,
        tensor=tensor,
        shard=alone - compute,
        replicate=moving - alone + between_steps,
        update=update,
        total=moving + tensor + between_steps + update,
    )


def exchange_seconds(exchange: float, step: float, every: int, fragments: int, delay: int) -> float:
    """Seconds per step that ``sync=diloco`` adds.

    ``exchange``: seconds of sending all fragments; ``step``: of a step without. Each of
    ``fragments`` is sent once in ``every`` steps, and ``delay`` steps go on meanwhile.
    """
    exposed = max(0.0, exchange / fragments - delay * step)
    return fragments * exposed / every


def _all_micro_batches(groups: Sequence[GroupSeconds], schedule: StepSchedule) -> float:
    last = _micro_batch(groups, schedule, is_last=True)
    if schedule.accumulation == 1:
        return last
    # All but the last are alike.
    others = _micro_batch(groups, schedule, is_last=False)
    return (schedule.accumulation - 1) * others + last


def _micro_batch(groups: Sequence[GroupSeconds], schedule: StepSchedule, *, is_last: bool) -> float:
    scatters = is_last or schedule.during_accumulation != "none"
    reduces = is_last or schedule.during_accumulation == "full"
    moved = list(groups)
    if not scatters:
        moved = [group._replace(scatter=0.0) for group in moved]
    if not reduces:
        moved = [_not_reduced(group) for group in moved]
    forward = _forward(moved, schedule.overlaps_gathers)
    return forward + _backward(moved, schedule)


def _not_reduced(group: GroupSeconds) -> GroupSeconds:
    """``group`` without what crosses the replicate axis."""
    return group._replace(reduce=0.0, encode=0.0, decode=0.0)


def _forward(groups: Sequence[GroupSeconds], overlaps: bool) -> float:
    link = computed = started = 0.0
    for group in groups:
        # With overlap a gather begins when the group before begins to compute.
        begin = max(link, started) if overlaps else computed
        link = begin + group.gather
        started = max(computed, link)
        computed = started + group.forward
    return computed


def _backward(groups: Sequence[GroupSeconds], schedule: StepSchedule) -> float:
    order = list(reversed(groups))
    computed = shard_link = replica_link = 0.0
    ready = 0.0
    if order and order[0].frees:
        shard_link = ready = order[0].gather
    for number, group in enumerate(order):
        started = max(computed, ready)
        following = order[number + 1] if number + 1 < len(order) else None
        if following is not None and following.frees:
            # Prefetched while this group computes.
            shard_link = max(shard_link, started) + following.gather
            ready = shard_link
            if not schedule.overlaps_gathers:
                started = ready
        computed = started + group.backward
        shard_link = max(shard_link, computed) + group.scatter
        if schedule.waits_for_scatters:
            computed = shard_link
        computed += group.encode
        if schedule.shares_link:
            shard_link = max(shard_link, computed) + group.reduce
        elif group.reduce > 0:
            replica_link = max(replica_link, shard_link, computed) + group.reduce
    ended = max(computed, shard_link, replica_link)
    return ended + sum(group.decode for group in groups)

"""The peak of a step as arithmetic: `predict_peak`.

To the activations of a model that is not sharded (`cost.activation_profile`) it adds
what sharding allocates at each moment.

[Note: what sharding holds] A gathered group has its whole parameters in memory, but for a shard
axis of one rank without casts, whose sharded parameters are the gathered ones. What the last
all-gather returned stays until the next one; in backward the next groups are gathered ahead, as
many as ``prefetch.backward`` says. Whole gradients of a group are copied to be reduced; that copy
stays until the next group's. The root's parameters are freed after forward too, and gathered again
before the first gradient. Sums of gradients appear group by group in the first micro-batch, and
stay. Where replicas exchange gradients in another form, or each updates a part of them, two buckets
are in memory as they are sent and as they are received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from parallel2d.parallel.cost.activation_profile import MemoryEvent
from parallel2d.parallel.cost.state_memory import state_bytes
from parallel2d.parallel.cost.traffic import group_traffic
from parallel2d.parallel.parallelize.layout import Layout, ParameterShape
from parallel2d.parallel.parallelize.precision import DTYPES


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes of one rank at the peak of a step. ``by_kind``: their sum is ``peak``."""

    peak: int
    by_kind: Mapping[str, int]


class _Group(NamedTuple):
    """Bytes of a group: whole parameters, whole gradients as made and as reduced, own sums."""

    gathered: int
    made: int
    reduced: int
    sums: int

    @classmethod
    def of(cls, group: Sequence[ParameterShape], shard: int) -> _Group:
        traffic = group_traffic(group, shard, 1)
        trained = [parameter for parameter in group if parameter.is_trained]
        made = sums = 0
        for parameter, part in zip(trained, traffic.reduced_shapes, strict=True):
            sums += part.numel() * parameter.sum_itemsize
            made += part.numel() * shard * parameter.gathered
        return cls(traffic.gathered_bytes * shard, made, traffic.reduced_bytes * shard, sums)


@dataclass
class _Held:
    """What sharding holds at a moment."""

    gathered: int = 0  # whole parameters
    returned: int = 0  # by the last all-gathers
    sent: int = 0  # to be reduced
    sums: int = 0  # of gradients
    whole: int = 0  # gradients that wait for the last micro-batch
    bucket: int = 0  # between replicas


def predict_peak(events: Sequence[MemoryEvent], layout: Layout) -> PredictedMemory:
    """``events``: from `profile_activations`, of the config, the size of the tensor axis and the
    micro-batch of ``layout``. See [Note: what sharding holds]."""
    states = state_bytes(layout)
    accumulation = layout.workload.accumulation
    step = _Step(events, layout)
    step.run(adds_sums=True, is_last=accumulation == 1)
    # All micro-batches after the first are alike, but for the exchange of replicas in the last.
    if accumulation > 1:
        step.run(adds_sums=False, is_last=True)
    held = step.at_peak
    by_kind = {
        "parameters": states.parameters,
        "buffers": states.buffers,
        "gathered parameters": held.gathered + held.returned,
        "gradients": held.sums,
        "gradients on their way": held.sent + held.bucket,
        "activations and whole gradients": step.activations + held.whole,
        "optimizer state": states.optimizer,
        "unrounded rows": states.masters,
        "outer parameters and averages": states.outer,
        # What is kept, and what takes its place at the update
        "what was not sent yet": 2 * states.residuals,
    }
    shown = {name: size for name, size in by_kind.items() if size}
    return PredictedMemory(sum(shown.values()), shown)


class _Step:
    """Follows the events of micro-batches, and keeps the memory at the peak."""

    def __init__(self, events: Sequence[MemoryEvent], layout: Layout) -> None:
        shape, config = layout.shape.sharding, layout.config
        self._events = events
        self._is_sharded = shape.shard > 1
        self._frees = config.strategy.placement.reshard_after_forward and self._is_sharded
        self._ahead = config.prefetch.backward
        self._reduces_each = config.sync.during_accumulation != "none"
        self._groups = [_Group.of(group.parameters, shape.shard) for group in layout.groups]
        # See `fsdp_internals.one_rank`.
        if not self._is_sharded and not config.cpu_offload:
            for number, members in enumerate(layout.groups):
                if all(each.gathered == each.stored for each in members.parameters):
                    self._groups[number] = self._groups[number]._replace(gathered=0)
        self._root = len(self._groups) - 1
        reduce = DTYPES[config.precision.reduce]
        # Of two buckets between replicas, as they are received and, where that is another form, as
        # they are sent; sums that are reduced in place need none.
        sums = [group.sums for group in self._groups]
        self._bucket = layout.method.buffer_bytes(sums, reduce.itemsize)
        self._held = _Held()
        self._gathered_order: list[int] = []
        self._whole: set[int] = set()
        self.at_peak = _Held()
        self.activations = 0
        self._most = -1

    def run(self, *, adds_sums: bool, is_last: bool) -> None:
        """A micro-batch. ``adds_sums``: none came before it."""
        held = self._held
        held.gathered = held.returned = 0
        self._gathered_order = []
        # Without a reduction in each micro-batch the last one makes the sums.
        self._adds_sums = adds_sums or not self._reduces_each
        self._reduces = is_last or self._reduces_each
        self._is_last = is_last
        for event in self._events:
            self._see(event.most)
            group = self._groups[event.group]
            match event.kind:
                case "gather":
                    held.gathered += group.gathered
                    self._gathered_order.append(event.group)
                    if self._is_sharded and group.gathered:
                        held.returned = group.gathered
                case "free" if self._frees:
                    held.gathered -= group.gathered
                case "gather_again":
                    self._gather_again(event.group, group, event.now)
                case "reduce":
                    self._reduce(event.group, group, event.now)

    def _see(self, activations: int) -> None:
        total = activations + sum(astuple(self._held))
        if total > self._most:
            self._most = total
            self.activations = activations
            self.at_peak = replace(self._held)

    def _gather_again(self, number: int, group: _Group, activations: int) -> None:
        if not self._frees:
            self._held.returned = 0
            return
        # Once by recomputation, once by the gradient of its output.
        if number in self._whole:
            return
        self._whole.add(number)
        self._held.gathered += group.gathered
        # Nothing gathers the root ahead. What an all-gather returned stays until it is copied.
        if number == self._root:
            self._held.returned = group.gathered
        self._see(activations)
        # The groups that ran before this one come next; before the root, which begins first, all.
        before = self._gathered_order
        if number != self._root:
            before = before[: before.index(number)]
        self._held.returned = 0
        for each in before[::-1][: self._ahead]:
            if each != self._root and each not in self._whole:
                self._held.returned += self._groups[each].gathered

    def _reduce(self, number: int, group: _Group, activations: int) -> None:
        """The whole gradients of the group are among ``activations`` until now."""
        self._whole.discard(number)
        self._held.gathered -= group.gathered
        if not self._reduces:
            self._held.whole += group.made
            return
        # The copy of the group before is gone, and the new one is there beside the gradients.
        self._held.sent = group.reduced
        if self._adds_sums:
            self._held.sums += group.sums
        if self._is_last:
            self._held.bucket = self._bucket
        self._see(activations)

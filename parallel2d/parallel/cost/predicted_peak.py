"""The peak memory of a step as arithmetic: `predict_peak`.

It adds the allocations of sharding to the activations of an unsharded model
(`cost.activation_profile`) at each point of a step.

[Note: memory of sharding] An unsharded group has its parameters in memory, except with a shard
axis of one rank without casts, where unsharded parameters are aliases of the sharded parameters.
The output of the last all-gather stays until the next all-gather. In backward the next groups are
prefetched, as many as ``prefetch.backward`` says. Large groups outside of the blocks stay unsharded
between forward and backward. Unsharded gradients of a group are copied for the
reduction, and the copy stays until the next group's copy. The root's parameters are also freed
after forward, and gathered again before the first gradient. Sums of gradients appear group by group
in the first micro-batch, and stay. If replicas exchange gradients in another format, or each
updates a part, sent and received values of two buckets are in memory.
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
    """Bytes of one rank at the peak of a step; ``peak`` is the sum of ``by_kind``."""

    peak: int
    by_kind: Mapping[str, int]


class _Group(NamedTuple):
    """Bytes of a group: unsharded parameters, gradients of autograd and for the reduction, sums."""

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
    """Memory of sharding at a point of a step."""

    gathered: int = 0  # unsharded parameters
    returned: int = 0  # outputs of the last all-gathers
    sent: int = 0  # copies for the reduction
    sums: int = 0  # sums of gradients
    whole: int = 0  # unsharded gradients that wait for the last micro-batch
    bucket: int = 0  # buckets between replicas


def predict_peak(events: Sequence[MemoryEvent], layout: Layout) -> PredictedMemory:
    """Return the predicted peak memory of a step; see [Note: memory of sharding].

    ``events``: from `profile_activations`, for the configuration, tensor axis and micro-batch size
    of ``layout``.
    """
    states = state_bytes(layout)
    accumulation = layout.workload.accumulation
    step = _Step(events, layout)
    step.run(adds_sums=True, is_last=accumulation == 1)
    # All micro-batches after the first are equal, except for the exchange of replicas in the last.
    if accumulation > 1:
        step.run(adds_sums=False, is_last=True)
    held = step.at_peak
    by_kind = {
        "parameters": states.parameters,
        "buffers": states.buffers,
        "unsharded parameters": held.gathered + held.returned,
        "gradients": held.sums,
        "gradients in communication": held.sent + held.bucket,
        "activations and unsharded gradients": step.activations + held.whole,
        "optimizer state": states.optimizer,
        "unrounded rows": states.masters,
        "outer parameters and EMA weights": states.outer,
        # The current error feedback, and its replacement at the update
        "error feedback": 2 * states.residuals,
    }
    shown = {}
    for name, size in by_kind.items():
        if size:
            shown[name] = size
    return PredictedMemory(sum(shown.values()), shown)


class _Step:
    """Processes the events of micro-batches, and keeps the memory at the peak."""

    def __init__(self, events: Sequence[MemoryEvent], layout: Layout) -> None:
        shape, config = layout.shape.sharding, layout.config
        self._events = events
        self._is_sharded = shape.shard > 1
        frees = config.strategy.placement.reshard_after_forward and self._is_sharded
        self._frees = [frees and not group.stays_unsharded for group in layout.groups]
        self._ahead = config.prefetch.backward
        self._reduces_each = config.sync.during_accumulation != "none"
        self._groups = [
            _Group.of(group.parameters, 1 if group.is_replicated else shape.shard)
            for group in layout.groups
        ]
        # See `fsdp_internals.one_rank`.
        if not self._is_sharded and not config.cpu_offload:
            for number, members in enumerate(layout.groups):
                if all(each.gathered == each.stored for each in members.parameters):
                    self._groups[number] = self._groups[number]._replace(gathered=0)
        self._root = len(self._groups) - 1
        reduce = DTYPES[config.precision.reduce]
        # Two buckets between replicas, as received and, in another format, as sent; sums that are
        # reduced in place need no buckets.
        sums = [group.sums for group in self._groups]
        self._bucket = layout.method.buffer_bytes(sums, reduce.itemsize)
        self._held = _Held()
        self._gathered_order: list[int] = []
        self._whole: set[int] = set()
        self.at_peak = _Held()
        self.activations = 0
        self._most = -1

    def run(self, *, adds_sums: bool, is_last: bool) -> None:
        """Process a micro-batch. ``adds_sums``: True for the first micro-batch."""
        held = self._held
        held.gathered = held.returned = 0
        self._gathered_order = []
        # Without a reduction per micro-batch, the last micro-batch creates the sums.
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
                case "free" if self._frees[event.group]:
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
        if not self._frees[number]:
            self._held.returned = 0
            return
        # The group is gathered by the recomputation, and again by the gradient of the output.
        if number in self._whole:
            return
        self._whole.add(number)
        self._held.gathered += group.gathered
        # The root is not prefetched. The output of an all-gather stays until it is copied.
        if number == self._root:
            self._held.returned = group.gathered
        self._see(activations)
        # Backward continues with the groups that ran before this group in forward; all groups
        # follow the root.
        before = self._gathered_order
        if number != self._root:
            before = before[: before.index(number)]
        self._held.returned = 0
        for each in before[::-1][: self._ahead]:
            if each != self._root and each not in self._whole and self._frees[each]:
                self._held.returned += self._groups[each].gathered

    def _reduce(self, number: int, group: _Group, activations: int) -> None:
        """Reduce a group. Until this call, its unsharded gradients count in ``activations``."""
        self._whole.discard(number)
        self._held.gathered -= group.gathered
        if not self._reduces:
            self._held.whole += group.made
            return
        # The copy of the previous group is freed, and the new copy exists next to the gradients.
        self._held.sent = group.reduced
        if self._adds_sums:
            self._held.sums += group.sums
        if self._is_last:
            self._held.bucket = self._bucket
        self._see(activations)

"""Prediction of the peak memory of a step: `predict_peak`.

`predict_peak` adds the allocations of FSDP to the activations of a model without FSDP
(`cost.activation_profile`) at each point of a step.

[Note: memory of sharding] FSDP allocates this memory, in addition to activations:

- Unsharded parameters, from the all-gather of a group until its reshard. On a shard axis of one
  rank without casts, the unsharded parameters are aliases of the sharded parameters and need no
  memory.
- The output of the last all-gather, until the next all-gather.
- In backward, the parameters of the ``prefetch.backward`` next groups. The root's parameters and
  large groups outside of the blocks stay unsharded from forward until their gradients are reduced.
- A copy of the unsharded gradients of a group for the reduction, until the next group's copy.
- Accumulated gradients: allocated group by group in the first micro-batch.
- Sent and received values of two buckets, if replicas communicate in another format or if each
  replica updates a part of the parameters.
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
    """Bytes of a group."""

    gathered: int  # unsharded parameters
    made: int  # unsharded gradients from autograd
    reduced: int  # unsharded gradients in the reduction dtype
    sums: int  # accumulated sharded gradients

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
    """Bytes of FSDP's allocations at a point of a step; see [Note: memory of sharding]."""

    gathered: int = 0  # unsharded parameters
    returned: int = 0  # outputs of the last all-gathers
    sent: int = 0  # copies of gradients for the reduction
    sums: int = 0  # accumulated sharded gradients
    whole: int = 0  # unsharded gradients that wait for the last micro-batch
    bucket: int = 0  # buckets between replicas


def predict_peak(events: Sequence[MemoryEvent], layout: Layout) -> PredictedMemory:
    """Return the predicted peak memory of a step; see [Note: memory of sharding].

    ``events`` are from `profile_activations`, for the same configuration, tensor axis and
    micro-batch size.
    """
    states = state_bytes(layout)
    accumulation = layout.workload.accumulation
    step = _Step(events, layout)
    step.run(adds_sums=True, is_last=accumulation == 1)
    # One more micro-batch is enough: those after the first are equal, and the last also has the
    # buckets between replicas.
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
    """Processes the events of micro-batches, and records the memory at the peak."""

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
        # Buffers of the buckets between replicas; none if gradients are reduced in place
        sums = [group.sums for group in self._groups]
        self._bucket = layout.method.buffer_bytes(sums, reduce.itemsize)
        self._held = _Held()
        self._gathered_order: list[int] = []
        self._whole: set[int] = set()
        self.at_peak = _Held()
        self.activations = 0
        self._most = -1

    def run(self, *, adds_sums: bool, is_last: bool) -> None:
        """Process a micro-batch. ``adds_sums`` is True for the first micro-batch."""
        held = self._held
        held.gathered = held.returned = 0
        self._gathered_order = []
        # With ``during_accumulation=none``, the last micro-batch allocates the sharded gradients.
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
        if not any(self._frees):
            self._held.returned = 0
            return
        # There may be two events: for the recomputation, and for the gradient of the output.
        if number in self._whole:
            return
        self._whole.add(number)
        if self._frees[number]:
            self._held.gathered += group.gathered
        self._see(activations)
        # Backward continues with the groups that ran before this group in forward. After the root,
        # these are all groups.
        before = self._gathered_order
        if number != self._root:
            before = before[: before.index(number)]
        self._held.returned = 0
        for each in before[::-1][: self._ahead]:
            if self._frees[each] and each not in self._whole:
                self._held.returned += self._groups[each].gathered

    def _reduce(self, number: int, group: _Group, activations: int) -> None:
        """Reduce a group. ``activations`` still includes its unsharded gradients."""
        self._whole.discard(number)
        self._held.gathered -= group.gathered
        if not self._reduces:
            self._held.whole += group.made
            return
        # The new copy replaces the copy of the previous group.
        self._held.sent = group.reduced
        if self._adds_sums:
            self._held.sums += group.sums
        if self._is_last:
            self._held.bucket = self._bucket
        self._see(activations)

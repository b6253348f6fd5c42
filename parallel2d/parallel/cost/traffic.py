"""Bytes that each axis moves per step, known before the first one: `predicted_bytes` of a `Layout`.
`AxisTraffic` has those of one group of parameters; those of the tensor axis are counted
(`cost.tensor_twin.count_tensor_axis`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from parallel2d.parallel.cost.collectives import sent_bytes
from parallel2d.parallel.cost.update_traffic import predict_updates
from parallel2d.parallel.parallelize.layout import Layout, ParameterShape, first_part
from parallel2d.parallel.sync.blocks import BITS, BlockCode, blocks_of

_ITEM_BYTES = {"fp32": 4, "bf16": 2}


class GroupTraffic(NamedTuple):
    """What a group of parameters moves, on the first rank of the shard axis."""

    gathered_bytes: int  # of this rank's padded parts, in the dtype in which they are gathered
    reduced_bytes: int  # of their gradients, in the dtype in which they are reduced
    reduced_itemsize: int  # bytes of one element of these; 4 for a group without gradients
    reduced_shapes: tuple[torch.Size, ...]  # of this rank's part of each of these gradients
    stored_itemsize: int  # bytes of one element of the sharded parameters

    @property
    def reduced_numel(self) -> int:
        """Elements of all gradients."""
        return sum(shape.numel() for shape in self.reduced_shapes)

    @property
    def sum_itemsize(self) -> int:
        """Bytes of one element in the dtype in which gradients are added: fp32 at least."""
        return max(4, self.stored_itemsize)


def group_traffic(group: Sequence[ParameterShape], shard: int) -> GroupTraffic:
    """What a group moves where ``shard`` ranks share it."""
    # No padding: the first part is as large as any.
    parts = [torch.Size(first_part(parameter.shape, shard)) for parameter in group]
    gathered = reduced = 0
    items: list[int] = []
    trained: list[torch.Size] = []
    stored = 4
    for parameter, part in zip(group, parts, strict=True):
        gathered += part.numel() * parameter.gathered
        if parameter.is_trained:
            reduced += part.numel() * parameter.reduced
            items.append(parameter.reduced)
            trained.append(part)
            stored = parameter.stored
    return GroupTraffic(gathered, reduced, min(items, default=4), tuple(trained), stored)


class AxisTraffic:
    """How the groups of a layout cross the axes. Bytes are those that one rank sends in one
    collective, mean over the ranks of its group."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        shard = layout.shape.shard
        # What each group moves, and the number of equal groups
        self.groups: list[tuple[GroupTraffic, int]] = []
        for parameters, count in layout.equal_groups:
            self.groups.append((group_traffic(parameters, shard), count))
        self._sync = layout.config.sync

    def gathered(self, group: GroupTraffic) -> float:
        """By one all-gather of the parameters over the shard axis."""
        return self._over_shard("all_gather", group.gathered_bytes)

    def scattered(self, group: GroupTraffic) -> tuple[str, float]:
        """By one reduction of the gradients over the shard axis, and its collective. Torch's own
        engine adds narrow gradients in a reduce-scatter, ours exchanges them."""
        is_exchanged = self._sync.engine == "parallel2d" and group.reduced_itemsize < 4
        collective = "all_to_all" if is_exchanged else "reduce_scatter"
        return collective, self._over_shard(collective, group.reduced_bytes)

    def reduced(self, group: GroupTraffic) -> tuple[str, float]:
        """By one reduction of the gradients between replicas, and its collective."""
        wire = self._sync.wire
        if self._sync.engine == "torch":
            return "all_reduce", self._between("all_reduce", group.reduced_bytes)
        item = _ITEM_BYTES.get(wire, group.reduced_itemsize)
        if self.layout.splits_updates:
            return "all_to_all", self._between("all_to_all", group.reduced_numel * item)
        if wire in BITS:
            return "all_reduce", self._between("all_reduce", _coded(group.reduced_shapes, wire))
        # No dtype wider than that of the gradients is sent.
        item = min(item, group.sum_itemsize)
        return "all_reduce", self._between("all_reduce", group.reduced_numel * item)

    def updated(self, group: GroupTraffic) -> float:
        """By the all-gather of updated parameters between replicas that split the updates."""
        item = _ITEM_BYTES["bf16"] if self._sync.wire == "bf16" else group.stored_itemsize
        return self._between("all_gather", group.reduced_numel * item)

    def outer(self, group: GroupTraffic) -> float:
        """By one exchange of ``sync=diloco``."""
        if self._sync.wire in BITS:
            return self._between("all_reduce", _coded(group.reduced_shapes, self._sync.wire))
        item = _ITEM_BYTES["bf16"] if self._sync.wire == "bf16" else group.sum_itemsize
        return self._between("all_reduce", group.reduced_numel * item)

    def per_step(self, group: GroupTraffic) -> tuple[float, float]:
        """Over the replicate and over the shard axis in a step.

        Per group (Rajbhandari et al. 2020, ZeRO; Zhao et al. 2023, FSDP): an all-gather per
        micro-batch for forward, another one for backward where parameters are freed in between; a
        reduction of the gradients per micro-batch, or once with ``during_accumulation=none``; over
        the replicas what the sync method sends, once or per micro-batch with ``full``. Parameters
        count as they travel: padded to the shard axis, in the dtype they are gathered in.
        """
        accumulation, sync = self.layout.workload.accumulation, self._sync
        gathers = 2 if self.layout.config.strategy.reshard_after_forward else 1
        scatters = 1 if sync.during_accumulation == "none" else accumulation
        _, scattered = self.scattered(group)
        shard = accumulation * gathers * self.gathered(group) + scatters * scattered
        if sync.name == "diloco" and sync.engine == "parallel2d":
            return self.outer(group) / sync.every, shard
        _, sent = self.reduced(group)
        if self.layout.splits_updates:
            return sent + self.updated(group), shard
        return sent * (accumulation if sync.during_accumulation == "full" else 1), shard

    def _over_shard(self, collective: str, part: float) -> float:
        ranks = self.layout.shape.shard
        return sent_bytes(collective, part * ranks, ranks, self.layout.workload.device_type)

    def _between(self, collective: str, whole: float) -> float:
        ranks = self.layout.shape.replicate
        return sent_bytes(collective, whole, ranks, self.layout.workload.device_type)


def _coded(shapes: Sequence[torch.Size], wire: str) -> int:
    """Bytes of tensors of these shapes, each of which begins a block of its own."""
    row = BlockCode(BITS[wire]).row_bytes
    return sum(blocks_of(shape.numel()) * row for shape in shapes)


def predicted_bytes(layout: Layout, over_tensor: float | None = None) -> dict[str, float]:
    """Bytes that a rank sends per step, as ``{"comm/AXIS/bytes": bytes}``, what the optimizer sends
    included. ``over_tensor``: those of forward and backward over the tensor axis; None: not known,
    and then that axis is left out if it has ranks."""
    traffic = AxisTraffic(layout)
    predicted = {"comm/replicate/bytes": 0.0, "comm/shard/bytes": 0.0}
    if layout.shape.tensor == 1 or over_tensor is not None:
        predicted["comm/tensor/bytes"] = over_tensor or 0.0
    for group, count in traffic.groups:
        replicate, shard = traffic.per_step(group)
        predicted["comm/replicate/bytes"] += count * replicate
        predicted["comm/shard/bytes"] += count * shard
    for axis, sent in predict_updates(layout).items():
        if f"comm/{axis}/bytes" in predicted:
            predicted[f"comm/{axis}/bytes"] += sent
    return predicted


def exact_bytes(layout: Layout) -> float:
    """Bytes that a rank would send per step over the ``replicate`` axis if gradients were reduced
    there in fp32, once per step."""
    numel = sum(count * group.reduced_numel for group, count in AxisTraffic(layout).groups)
    return sent_bytes("all_reduce", 4 * numel, layout.shape.replicate, layout.workload.device_type)

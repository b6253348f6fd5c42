"""Prediction of the bytes that a rank sends over each axis per step: `predicted_bytes`.

`AxisTraffic` computes the bytes of one FSDP group. The bytes over the context and tensor axes are
counted in a run on a meta copy (`cost.meta_copy.count_tensor_axis`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from parallel2d.parallel.cost.collectives import sent_bytes
from parallel2d.parallel.cost.update_traffic import predict_updates
from parallel2d.parallel.parallelize.layout import Layout, ParameterShape, first_part
from parallel2d.parallel.sync.methods.method import GroupTraffic


def group_traffic(group: Sequence[ParameterShape], shard: int, replicas: int) -> GroupTraffic:
    """Return the payload sizes of a group that is sharded over ``shard`` ranks per replica."""
    # The shard of the first rank is the largest, and the others are padded to its size.
    parts = []
    for parameter in group:
        parts.append(torch.Size(first_part(parameter.shape, shard)))
    gathered = reduced = 0
    items: list[int] = []
    trained: list[torch.Size] = []
    hidden: list[torch.Size] = []
    stored = 4
    for parameter, part in zip(group, parts, strict=True):
        gathered += part.numel() * parameter.gathered
        if parameter.is_trained:
            reduced += part.numel() * parameter.reduced
            items.append(parameter.reduced)
            trained.append(part)
            if parameter.is_hidden:
                hidden.append(part)
            stored = parameter.stored
    item = min(items, default=4)
    stays_unsharded = any(parameter.stays_unsharded for parameter in group)
    return GroupTraffic(
        gathered, reduced, item, tuple(trained), tuple(hidden), stored, replicas, stays_unsharded
    )


class AxisTraffic:
    """Bytes of the collectives of the FSDP groups of a layout.

    All results are the bytes that one rank sends, averaged over the ranks of the collective.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        shape = layout.shape.sharding
        # (payload sizes of a group, number of equal groups)
        self.groups: list[tuple[GroupTraffic, int]] = []
        for group, count in layout.equal_groups:
            self.groups.append((group_traffic(group, shape.shard, shape.replicate), count))

    def gathered(self, group: GroupTraffic) -> float:
        """Return the bytes of one all-gather of the parameters over the shard axis."""
        return self._sent("shard", "all_gather", group.gathered_bytes)

    def scattered(self, group: GroupTraffic) -> tuple[str, float]:
        """Return the collective that reduces gradients over the shard axis, and its bytes.

        Gradients of fewer than 32 bits use an all-to-all; see `OrderedReduceScatter`.
        """
        collective = "all_to_all" if group.reduced_itemsize < 4 else "reduce_scatter"
        return collective, self._sent("shard", collective, group.reduced_bytes)

    def reduced(self, group: GroupTraffic) -> tuple[str, float]:
        """Return the collective of one reduction of gradients between replicas, and its bytes."""
        collective, whole = self.layout.method.gradients(group)
        return collective, self._sent("replicate", collective, whole)

    def updated(self, group: GroupTraffic) -> float:
        """Return the bytes of one exchange of parameters between replicas."""
        return self._sent("replicate", *self.layout.method.parameters(group))

    def per_step(self, group: GroupTraffic) -> tuple[float, float]:
        """Return the bytes of a step over the replicate axis and over the shard axis.

        A group has these collectives (Rajbhandari et al. 2020, ZeRO; Zhao et al. 2023, FSDP):

        - over the shard axis, an all-gather per micro-batch for forward, and another for backward
          if the group is resharded after forward; parameters are padded, in their all-gather dtype;
        - over the shard axis, a reduction of gradients per micro-batch, or one per step with
          ``during_accumulation=none``;
        - over the replicate axis, the communication of the sync method.
        """
        layout = self.layout
        accumulation, method = layout.workload.accumulation, layout.method
        frees = layout.config.strategy.placement.reshard_after_forward
        gathers = 2 if frees and not group.stays_unsharded else 1
        scatters = 1 if layout.config.sync.during_accumulation == "none" else accumulation
        _, scattered = self.scattered(group)
        shard = accumulation * gathers * self.gathered(group) + scatters * scattered
        _, sent = self.reduced(group)
        replicate = method.reductions(accumulation) * sent
        return replicate + self.updated(group) / method.update_period, shard

    def _sent(self, axis: str, collective: str, size: float) -> float:
        ranks = getattr(self.layout.shape.sharding, axis)
        # The sizes of a group are the sizes of local shards.
        whole = size * ranks if axis == "shard" else size
        return sent_bytes(collective, whole, ranks, self.layout.workload.device_type)


def predicted_bytes(
    layout: Layout, inside: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, float]:
    """Return the bytes that a rank sends per step, as ``{"comm/AXIS/bytes": bytes}``.

    The optimizer's communication is included. ``inside`` is from `TensorTraffic.of_step`; without
    it, tensor and context axes with several ranks are omitted.
    """
    inside = inside or {}
    traffic = AxisTraffic(layout)
    predicted = {"comm/replicate/bytes": 0.0, "comm/shard/bytes": 0.0}
    if layout.shape.tensor == 1 or inside:
        predicted["comm/tensor/bytes"] = inside.get("tensor", (0.0, 0.0))[0]
    if layout.shape.context > 1 and inside:
        predicted["comm/context/bytes"] = inside["context"][0]
    for group, count in traffic.groups:
        replicate, shard = traffic.per_step(group)
        predicted["comm/replicate/bytes"] += count * replicate
        predicted["comm/shard/bytes"] += count * shard
    for members in layout.replicated:
        # These groups are replicated over the shard axis, and their gradients are all-reduced over
        # the shard axis.
        group = group_traffic(members, 1, layout.shape.replicate)
        replicate, _ = traffic.per_step(group)
        predicted["comm/replicate/bytes"] += replicate
        size = sum(math.prod(each.shape) * each.sum_itemsize for each in members if each.is_trained)
        times = 1
        if layout.config.sync.during_accumulation == "full":
            times = layout.workload.accumulation
        ranks = layout.shape.sharding.shard
        sent = sent_bytes("all_reduce", size, ranks, layout.workload.device_type)
        predicted["comm/shard/bytes"] += times * sent
    for axis, sent in predict_updates(layout).items():
        if f"comm/{axis}/bytes" in predicted:
            predicted[f"comm/{axis}/bytes"] += sent
    return predicted


def exact_bytes(layout: Layout) -> float:
    """Return the bytes of one fp32 all-reduce of all gradients over the replicate axis."""
    numel = sum(count * group.reduced_numel for group, count in AxisTraffic(layout).groups)
    return sent_bytes("all_reduce", 4 * numel, layout.shape.replicate, layout.workload.device_type)

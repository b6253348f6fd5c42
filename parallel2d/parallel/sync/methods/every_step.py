"""``sync=every_step``: all replicas get the mean of the gradients of every global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.parallel.fsdp_internals import FSDPGroup, GroupTraffic
from parallel2d.parallel.sync.engine.reductions import AllReduce, RoundedReduction
from parallel2d.parallel.sync.methods.method import Message, Started, SyncMethod, UpdateFollower
from parallel2d.parallel.sync.wires import WIRES
from parallel2d.parallel.sync.wires.blocks import RoundingKeys
from parallel2d.parallel.sync.wires.exchange import expected_mean
from parallel2d.parallel.weights.geometry import Region


class EveryStep(SyncMethod):
    """The gradients of every global batch are reduced on all replicas."""

    crosses = True
    _what = "gradients"
    # Whether all replicas get the mean, or its owner alone
    _sent_back = True

    @property
    def description(self) -> str:
        wire = self.named_wire
        return f"every step, {self._what} in {wire.name if wire else 'precision.reduce'}"

    def reductions(self, accumulation: int) -> int:
        return accumulation if self.config.during_accumulation == "full" else 1

    def gradients(self, group: GroupTraffic) -> Message:
        return Message("all_reduce", self.gradient_bytes(group))

    def gradient_bytes(self, group: GroupTraffic) -> int:
        """Bytes of the gradients of ``group`` as they are sent."""
        wire = self.named_wire
        if wire is not None and wire.dtype is None:
            return wire.bytes_of(group.reduced_shapes)
        item = group.reduced_itemsize if wire is None else wire.item_bytes
        # No dtype wider than that of the gradients is sent.
        return group.reduced_numel * min(item, group.sum_itemsize)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        wire = self.named_wire
        item = item_bytes if wire is None else wire.item_bytes
        # What is not rounded is reduced in place.
        if item >= 4:
            return 0
        # As many values as are in two buckets, once as they are sent and once as they are received
        return min(sum(sums), 2 * self._largest_bucket(sums)) * item // 2

    def _largest_bucket(self, sums: Sequence[int]) -> int:
        return max([*sums, int(self.config.bucket_mib * 2**20)])

    def start(
        self,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        groups: Sequence[FSDPGroup],
        keys: RoundingKeys,
        gradient_dtype: torch.dtype | None,
    ) -> Started:
        exact, rounded = AllReduce(group), RoundedReduction(group, keys)
        return Started(UpdateFollower(), lambda wire: rounded if wire.rounds else exact)

    def expected_gradient(
        self, values: Sequence[Tensor], cut: Sequence[Region], keys: RoundingKeys, name: str
    ) -> Tensor:
        wire = self.named_wire
        # One without dimensions is averaged with what ranks agree on, unrounded.
        if wire is None or not values[0].ndim:
            wire = WIRES["fp64"]
        return expected_mean(values, wire, cut, keys, name, sent_back=self._sent_back)


class EveryStepByTorch(EveryStep):
    """The second axis of `fully_shard` reduces the gradients (``sync.engine=torch``)."""

    def gradients(self, group: GroupTraffic) -> Message:
        return Message("all_reduce", group.reduced_bytes)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        return 0

"""``sync=every_step``: all replicas get the mean of the gradients of every global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parallel2d.base.config import SyncConfig
from parallel2d.parallel.sync.engine.buckets import Bucket, Wait
from parallel2d.parallel.sync.methods.method import (
    GroupTraffic,
    Message,
    ReplicatedModel,
    Started,
    SyncMethod,
    UpdateFollower,
)
from parallel2d.parallel.sync.wires import WIRES
from parallel2d.parallel.sync.wires.blocks import Piece, RoundingKeys
from parallel2d.parallel.sync.wires.exchange import Exchange, expected_mean
from parallel2d.parallel.weights.geometry import Region


class EveryStep(SyncMethod):
    """The gradients of every global batch are reduced on all replicas."""

    crosses = True
    _what = "gradients"
    # Whether all replicas get the mean, or its owner alone
    _sent_back = True

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        wire = self.named_wire
        form = "precision.reduce" if wire is None else wire.name
        self.description = f"every step, {self._what} in {form}"
        self.gradients_are_exact = wire is None or not wire.rounds

    def reductions(self, accumulation: int) -> int:
        return accumulation if self.config.during_accumulation == "full" else 1

    def gradients(self, group: GroupTraffic) -> Message:
        return Message("all_reduce", self.gradient_bytes(group))

    def gradient_bytes(self, group: GroupTraffic) -> int:
        """Bytes of the gradients of ``group`` as they are sent."""
        wire = self.named_wire
        if wire is not None and wire.dtype is None:
            return wire.bytes_of(group.reduced_shapes)
        item = self.item_bytes(auto=group.reduced_itemsize)
        # No dtype wider than that of the gradients is sent.
        return group.reduced_numel * min(item, group.sum_itemsize)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        item = self.item_bytes(auto=item_bytes)
        # What is not rounded is reduced in place.
        if item >= 4:
            return 0
        # As many values as are in two buckets, once as they are sent and once as they are received
        return min(sum(sums), 2 * max([*sums, self.bucket_bytes])) * item // 2

    def start(self, model: ReplicatedModel) -> Started:
        exact, rounded = AllReduce(model.group), RoundedReduction(model.group, model.keys)
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


@dataclass
class AllReduce:
    """An all-reduce in place, in the dtype of the gradients or in a narrower one of 32 bits."""

    group: dist.ProcessGroup
    most_in_flight: int | None = None

    def start(self, bucket: Bucket) -> Wait:
        flat = sent = bucket.buffer()
        # Nothing is sent in a dtype that is wider than the gradients.
        if bucket.wire.item_bytes < flat.dtype.itemsize:
            sent = flat.to(bucket.wire.dtype)
        work = dist.all_reduce(sent, dist.ReduceOp.AVG, group=self.group, async_op=True)

        def wait() -> None:
            work.wait()
            if sent is not flat:
                flat.copy_(sent)

        return wait


@dataclass
class RoundedReduction:
    """Sends what the wire rounds, and adds in fp32; see [Note: rounded exchange]."""

    group: dist.ProcessGroup
    keys: RoundingKeys
    most_in_flight: int | None = 2  # each holds two buffers in what is sent

    def start(self, bucket: Bucket) -> Wait:
        if bucket.wire.dtype is not None:
            # A cast needs to know nothing about parameters.
            whole = [bucket.buffer()]
            return Exchange(self.group, bucket.wire.coder(whole, ()), whole, whole).finish
        gradients = bucket.parts()
        pieces = [Piece(self.keys.of(each.name), each.start) for each in bucket.trained]
        coder = bucket.wire.coder(gradients, pieces)
        return Exchange(self.group, coder, gradients, gradients).finish

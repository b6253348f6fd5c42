"""``sync=every_step``: all replicas get the mean of the gradients of every global batch."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from parallel2d.base import metering
from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPParameter
from parallel2d.parallel.sync.engine.buckets import Bucket, Reduction, Wait
from parallel2d.parallel.sync.methods.method import (
    ExpectedState,
    GroupTraffic,
    Message,
    ReplicatedModel,
    Started,
    SyncMethod,
    UpdateFollower,
)
from parallel2d.parallel.sync.methods.residuals import PartName, Residuals, as_stored
from parallel2d.parallel.sync.wires import RESIDUAL_DECAY, WIRES, Wire
from parallel2d.parallel.sync.wires.blocks import Piece, RoundingKeys, blocks_of
from parallel2d.parallel.sync.wires.exchange import Coded, Exchange, expected_mean
from parallel2d.parallel.weights.geometry import Region

_WARM = WIRES["bf16"]  # format of the first steps, if ``sync.wire`` is too coarse


class EveryStep(SyncMethod):
    """The gradients of every global batch are reduced on all replicas."""

    crosses = True
    # True if all replicas get the mean; False if only its owner does
    _sent_back = True

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        wire = self.named_wire
        form = "precision.reduce" if wire is None else wire.name
        self.description = f"every step, gradients in {form}"
        self.gradients_are_exact = wire is None or not wire.rounds
        if wire is not None and wire.finer:
            self.keeps_residuals = True
            self.warmup = config.warmup
            self.description += (
                f", {wire.finer} but for hidden matrices, {_WARM.name} in the first "
                f"{self.warmup:g} steps"
            )

    def reductions(self, accumulation: int) -> int:
        return accumulation if self.config.during_accumulation == "full" else 1

    def gradients(self, group: GroupTraffic) -> Message:
        return Message("all_reduce", self.gradient_bytes(group))

    def gradient_bytes(self, group: GroupTraffic) -> int:
        """Return bytes of the gradients of ``group`` in communication."""
        wire = self.named_wire
        if wire is not None and wire.dtype is None:
            fine, hidden = wire.of_gradient(hidden=False), group.hidden_shapes
            others = fine.bytes_of(group.reduced_shapes) - fine.bytes_of(hidden)
            return wire.bytes_of(hidden) + others
        item = self.item_bytes(auto=group.reduced_itemsize)
        # Gradients are never sent in a wider dtype than their own.
        return group.reduced_numel * min(item, group.sum_itemsize)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        item = self.item_bytes(auto=item_bytes)
        # Unrounded gradients are reduced in place.
        if item >= 4:
            return 0
        # Sent and received values; see `RoundedReduction.most_in_flight`.
        return min(sum(sums) * item // 2, 2 * max([*sums, self.bucket_bytes]))

    def start(self, model: ReplicatedModel) -> Started:
        self.check_warmup()
        residuals = Residuals(model, self.with_residuals(model))
        exact = AllReduce(model.group)

        def reduction_for(wire: Wire) -> Reduction:
            if not wire.rounds:
                return exact
            sent = self.sent(wire, model.keys.step)
            return RoundedReduction(model.group, sent, model.keys, model.hidden, residuals)

        return Started(residuals if self.keeps_residuals else UpdateFollower(), reduction_for)

    def check_warmup(self) -> None:
        """Raise `ConfigError` for a warmup share in a loop without a known number of steps."""
        if 0 < self.warmup < 1:
            raise ConfigError(
                f"sync.warmup={self.warmup} is a share of train.steps, which a custom loop "
                "does not have: use a number of steps, such as SyncConfig(wire='int4', warmup=100)"
            )

    def with_residuals(self, model: ReplicatedModel) -> Container[str]:
        """Return FQNs of the parameters with error feedback."""
        return model.hidden if self.keeps_residuals else ()

    def sent(self, wire: Wire, step: int) -> Wire:
        """Return the communication format instead of ``wire`` in this ``step``, from 1."""
        return _WARM if step <= self.warmup else wire

    def expected_gradient(
        self, values: Sequence[Tensor], cut: Sequence[Region], name: str, state: ExpectedState
    ) -> Tensor:
        wire = self.named_wire
        # A parameter without dimensions is averaged unrounded, in the all-reduce of the agreement.
        if wire is None or not values[0].ndim:
            wire = WIRES["fp64"]
        else:
            wire = self.sent(wire, state.keys.step).of_gradient(hidden=name in state.hidden)
        if not wire.keeps_rest:
            return expected_mean(values, wire, cut, state.keys, name, sent_back=self._sent_back)
        for replica, value in enumerate(values):
            if (replica, name) in state.residuals:
                value += RESIDUAL_DECAY * state.residuals[replica, name]
        mean = expected_mean(values, wire, cut, state.keys, name, sent_back=self._sent_back)
        for replica, rest in enumerate(values):
            state.residuals[replica, name] = as_stored(rest, cut)
        return mean


@dataclass
class AllReduce:
    """An all-reduce in place, in the gradients' dtype or a narrower one of 32 bits."""

    group: dist.ProcessGroup
    most_in_flight: int | None = None

    def start(self, bucket: Bucket) -> list[Wait]:
        flat = sent = bucket.buffer()
        # Gradients are never sent in a wider dtype than their own.
        dtype = bucket.wire.dtype
        if dtype is not None and dtype.itemsize < flat.dtype.itemsize:
            sent = flat.to(dtype)
        work = dist.all_reduce(sent, dist.ReduceOp.AVG, group=self.group, async_op=True)

        def wait() -> None:
            metering.wait(work, self.group)
            if sent is not flat:
                flat.copy_(sent)

        return [wait]


class GradientPart(NamedTuple):
    """A part of a gradient with separate quantization blocks."""

    name: PartName
    start: int  # position of its first value in the flattened unsharded parameter
    values: Tensor


@dataclass
class RoundedReduction:
    """Exchange of rounded values with sums in fp32; see [Note: rounded exchange]."""

    group: dist.ProcessGroup
    wire: Wire
    keys: RoundingKeys
    hidden: Container[str]  # FQNs of the hidden matrices
    residuals: Residuals  # error feedback of the hidden matrices

    @property
    def most_in_flight(self) -> int:
        """Two, or as many as use the memory of two in 16 bits.

        Each reduction holds its sent and received values.
        """
        return max(2, 32 // self.wire.bits)

    def start(self, bucket: Bucket) -> list[Wait]:
        if self.wire.dtype is not None:
            # The buffer as one tensor, without a copy.
            whole = [bucket.buffer()]
            coder = self.wire.coder(whole, ())
            coded = [Coded(coder, coder.rows(whole), whole)]
        else:
            again = any(each.adds_to_means for each in bucket.groups)
            coded = []
            for wire, members in self.by_wire(bucket).items():
                parts = [GradientPart((each.name, 0), each.start, part) for each, part in members]
                results = [gradient for _, gradient in members]
                coded.append(self.coded(wire, parts, results, again=again))
        # The all-to-all starts here; the first step waits for it and starts the all-gather of the
        # means. `BucketQueue` runs first steps in the order of the buckets, so the second
        # collectives of several buckets have one order on all replicas too.
        exchange = Exchange(self.group, coded)
        return [exchange.send_means, exchange.finish]

    def by_wire(self, bucket: Bucket) -> dict[Wire, list[tuple[FSDPParameter, Tensor]]]:
        """Return the parameters of ``bucket`` with their gradients, by communication format."""
        found: dict[Wire, list[tuple[FSDPParameter, Tensor]]] = defaultdict(list)
        for parameter, gradient in zip(bucket.trained, bucket.parts(), strict=True):
            own = self.wire.of_gradient(hidden=parameter.name in self.hidden)
            found[own].append((parameter, gradient))
        return found

    def coded(
        self,
        wire: Wire,
        parts: Sequence[GradientPart],
        results: Sequence[Tensor],
        *,
        again: bool,
    ) -> Coded:
        """Prepare the ``parts`` of a bucket with one communication format.

        Args:
            wire: the format.
            parts: the gradients.
            results: tensors that get the mean.
            again: see `Residuals.add_to`.
        """
        values = [part.values for part in parts]
        pieces: list[Piece] = []
        # A cast uses no random numbers, so no pieces.
        if wire.dtype is None:
            keys = {name: self.keys.of(name) for name in {part.name[0] for part in parts}}
            pieces = [Piece(keys[part.name[0]], part.start) for part in parts]
        coder = wire.coder(values, pieces)
        rows = coder.rows(values)
        keep = None
        if wire.keeps_rest:
            counts = {part.name: blocks_of(part.values.numel()) for part in parts}
            self.residuals.add_to(rows, counts, again=again)
            keep = functools.partial(self.residuals.keep, counts=counts)
        return Coded(coder, rows, results, keep)

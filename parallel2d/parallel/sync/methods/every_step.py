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
from parallel2d.parallel.sync.formats import ERROR_FEEDBACK_DECAY, FORMATS, CommunicationFormat
from parallel2d.parallel.sync.formats.quantize import Piece, RoundingKeys, blocks_of
from parallel2d.parallel.sync.formats.quantized_mean import (
    QuantizedMean,
    QuantizedPart,
    expected_mean,
)
from parallel2d.parallel.sync.methods.error_feedback import ErrorFeedback, PartName, as_stored
from parallel2d.parallel.sync.methods.method import (
    ExpectedState,
    GroupTraffic,
    Message,
    ReplicatedModel,
    Started,
    SyncMethod,
    UpdateFollower,
)
from parallel2d.parallel.weights.geometry import Region

_WARM = FORMATS["bf16"]  # format of the first ``sync.warmup`` steps with ``sync.wire=int4``


class EveryStep(SyncMethod):
    """All-reduces the gradients of every global batch over the replicas."""

    crosses = True
    # True if all replicas get the mean gradients; False if each owner gets only the mean of its
    # rows
    _sent_back = True

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        comm_format = self.named_format
        form = "precision.reduce" if comm_format is None else comm_format.name
        self.description = f"every step, gradients in {form}"
        self.gradients_are_exact = comm_format is None or not comm_format.rounds
        if comm_format is not None and comm_format.finer:
            self.has_error_feedback = True
            self.warmup = config.warmup
            self.description += (
                f", {comm_format.finer} but for hidden matrices, {_WARM.name} in the first "
                f"{self.warmup:g} steps"
            )

    def reductions(self, accumulation: int) -> int:
        return accumulation if self.config.during_accumulation == "full" else 1

    def gradients(self, group: GroupTraffic) -> Message:
        return Message("all_reduce", self.gradient_bytes(group))

    def gradient_bytes(self, group: GroupTraffic) -> int:
        """Return the bytes of the gradients of ``group`` in the communication format."""
        comm_format = self.named_format
        if comm_format is not None and comm_format.dtype is None:
            fine, hidden = comm_format.of_gradient(hidden=False), group.hidden_shapes
            others = fine.bytes_of(group.reduced_shapes) - fine.bytes_of(hidden)
            return comm_format.bytes_of(hidden) + others
        item = self.item_bytes(auto=group.reduced_itemsize)
        # Gradients are never sent in a wider dtype than their own.
        return group.reduced_numel * min(item, group.sum_itemsize)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        item = self.item_bytes(auto=item_bytes)
        # Gradients in 32 bits or more are reduced in place.
        if item >= 4:
            return 0
        # Buffers of sent and received values, for as many buckets as are in flight; see
        # `RoundedReduction.most_in_flight`.
        return min(sum(sums) * item // 2, 2 * max([*sums, self.bucket_bytes]))

    def start(self, model: ReplicatedModel) -> Started:
        self.check_warmup()
        residuals = ErrorFeedback(model, self.names_with_error_feedback(model))
        exact = AllReduce(model.group)

        def reduction_for(comm_format: CommunicationFormat) -> Reduction:
            if not comm_format.rounds:
                return exact
            sent = self.sent(comm_format, model.keys.step)
            return RoundedReduction(model.group, sent, model.keys, model.hidden, residuals)

        return Started(residuals if self.has_error_feedback else UpdateFollower(), reduction_for)

    def check_warmup(self) -> None:
        """Raise `ConfigError` if ``sync.warmup`` is still a fraction of the number of steps.

        The trainer has replaced the fraction by a number of steps; a custom loop has not.
        """
        if 0 < self.warmup < 1:
            raise ConfigError(
                f"sync.warmup={self.warmup} is a share of train.steps, which a custom loop "
                "does not have: use a number of steps, such as SyncConfig(wire='int4', warmup=100)"
            )

    def names_with_error_feedback(self, model: ReplicatedModel) -> Container[str]:
        """Return the FQNs of the parameters with error feedback."""
        return model.hidden if self.has_error_feedback else ()

    def sent(self, comm_format: CommunicationFormat, step: int) -> CommunicationFormat:
        """Return the format in ``step`` (from 1): bf16 during warmup, then ``comm_format``."""
        return _WARM if step <= self.warmup else comm_format

    def expected_gradient(
        self, values: Sequence[Tensor], cut: Sequence[Region], name: str, state: ExpectedState
    ) -> Tensor:
        comm_format = self.named_format
        # A parameter without dims is averaged in fp64, in the status all-reduce.
        if comm_format is None or not values[0].ndim:
            comm_format = FORMATS["fp64"]
        else:
            comm_format = self.sent(comm_format, state.keys.step).of_gradient(
                hidden=name in state.hidden
            )
        if not comm_format.has_error_feedback:
            return expected_mean(
                values, comm_format, cut, state.keys, name, sent_back=self._sent_back
            )
        for replica, value in enumerate(values):
            if (replica, name) in state.residuals:
                value += ERROR_FEEDBACK_DECAY * state.residuals[replica, name]
        mean = expected_mean(values, comm_format, cut, state.keys, name, sent_back=self._sent_back)
        for replica, rest in enumerate(values):
            state.residuals[replica, name] = as_stored(rest, cut)
        return mean


@dataclass
class AllReduce:
    """An all-reduce in place, in the dtype of the gradients or in a narrower format dtype."""

    group: dist.ProcessGroup
    most_in_flight: int | None = None

    def start(self, bucket: Bucket) -> list[Wait]:
        flat = sent = bucket.buffer()
        # Gradients are never sent in a wider dtype than their own.
        dtype = bucket.comm_format.dtype
        if dtype is not None and dtype.itemsize < flat.dtype.itemsize:
            sent = flat.to(dtype)
        work = dist.all_reduce(sent, dist.ReduceOp.AVG, group=self.group, async_op=True)

        def wait() -> None:
            metering.wait(work, self.group)
            if sent is not flat:
                flat.copy_(sent)

        return [wait]


class GradientPart(NamedTuple):
    """A part of a gradient that starts a new quantization block."""

    name: PartName
    start: int  # position of the first value in the flattened unsharded parameter
    values: Tensor


@dataclass
class RoundedReduction:
    """Reduction by a `QuantizedMean`; see [Note: rounded exchange]."""

    group: dist.ProcessGroup
    comm_format: CommunicationFormat
    keys: RoundingKeys
    hidden: Container[str]  # FQNs of the hidden matrices
    residuals: ErrorFeedback  # error feedback of the hidden matrices

    @property
    def most_in_flight(self) -> int:
        """Two in 16 bits, and more with fewer bits, because each needs buffers for its values."""
        return max(2, 32 // self.comm_format.bits)

    def start(self, bucket: Bucket) -> list[Wait]:
        if self.comm_format.dtype is not None:
            # A cast needs no separate blocks, so use the buffer as one tensor, without a copy.
            whole = [bucket.buffer()]
            quantizer = self.comm_format.quantizer(whole, ())
            quantized = [QuantizedPart(quantizer, quantizer.rows(whole), whole)]
        else:
            again = any(each.adds_to_means for each in bucket.groups)
            quantized = []
            for comm_format, members in self.by_format(bucket).items():
                parts, results = [], []
                for each, gradient in members:
                    parts.append(GradientPart((each.name, 0), each.start, gradient))
                    results.append(gradient)
                quantized.append(self.quantized(comm_format, parts, results, again=again))
        # The constructor starts the all-to-all. `send_means` waits for it and starts the all-gather
        # of the means. `BucketQueue` calls `send_means` in the order of the buckets, so these
        # all-gathers have the same order on all replicas.
        exchange = QuantizedMean(self.group, quantized)
        return [exchange.send_means, exchange.finish]

    def by_format(
        self, bucket: Bucket
    ) -> dict[CommunicationFormat, list[tuple[FSDPParameter, Tensor]]]:
        """Return the parameters of ``bucket`` with their gradients, by communication format."""
        found: dict[CommunicationFormat, list[tuple[FSDPParameter, Tensor]]] = defaultdict(list)
        for parameter, gradient in zip(bucket.trained, bucket.parts(), strict=True):
            own = self.comm_format.of_gradient(hidden=parameter.name in self.hidden)
            found[own].append((parameter, gradient))
        return found

    def quantized(
        self,
        comm_format: CommunicationFormat,
        parts: Sequence[GradientPart],
        results: Sequence[Tensor],
        *,
        again: bool,
    ) -> QuantizedPart:
        """Prepare the ``parts`` of a bucket with one communication format.

        Args:
            comm_format: the communication format of ``parts``.
            parts: the gradients.
            results: the tensors that receive the mean.
            again: see `ErrorFeedback.add_to`.
        """
        values = [part.values for part in parts]
        pieces: list[Piece] = []
        # A cast uses no random numbers and therefore no pieces.
        if comm_format.dtype is None:
            keys = {}
            for part in parts:
                name = part.name[0]
                if name not in keys:
                    keys[name] = self.keys.of(name)
                pieces.append(Piece(keys[name], part.start))
        quantizer = comm_format.quantizer(values, pieces)
        rows = quantizer.rows(values)
        keep = None
        if comm_format.has_error_feedback:
            counts = {part.name: blocks_of(part.values.numel()) for part in parts}
            self.residuals.add_to(rows, counts, again=again)
            keep = functools.partial(self.residuals.keep, counts=counts)
        return QuantizedPart(quantizer, rows, results, keep)

"""``strategy=hybrid_full``: each replica updates a part of the parameters.

[Note: split updates] The rows of each local shard are divided equally over the replicas: each
replica *owns* some rows, and the replica's optimizer updates only the owned rows
(`OwnedParameters.make`). Gradients are reduced only to the owner of their rows (`ScatterToOwners`).
After the optimizer's step the updated rows are all-gathered over the replicas
(`OwnedParameters.after_update`). Both exchanges together send as many bytes as an all-reduce of the
gradients, and the optimizer state per rank is divided by the number of replicas.

By default the owned rows are views of the sharded parameters. If ``sync.wire`` rounds gradients,
the updated parameters are sent in bf16. Then the owned rows are separate tensors with unrounded
values, and all replicas compute with the rounded values. If a script writes to parameters, the
writes are found by a comparison with the rows of the last exchange, and copied to the owned rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.base import metering
from parallel2d.base.config import SyncConfig
from parallel2d.base.device import keep_until_done
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPParameter
from parallel2d.parallel.sync.engine.buckets import Bucket, Reduction, Wait
from parallel2d.parallel.sync.formats import FORMATS, CommunicationFormat, format_of
from parallel2d.parallel.sync.formats.quantized_mean import QuantizedPart
from parallel2d.parallel.sync.methods.every_step import EveryStep, RoundedReduction
from parallel2d.parallel.sync.methods.method import (
    ExpectedState,
    GroupTraffic,
    Message,
    ReplicatedModel,
    Started,
)
from parallel2d.parallel.sync.methods.owned_parameters import (
    OwnedParameters,
    owned_shapes,
    rows_of_owner,
)
from parallel2d.parallel.weights.geometry import Region


class SplitUpdates(EveryStep):
    """Each replica updates a part of each parameter; see [Note: split updates]."""

    splits_updates = True
    _sent_back = False

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        # Communication format of updated parameters; None: the storage dtype
        self._parameter_format = None if self.gradients_are_exact else FORMATS["bf16"]
        self.keeps_masters = self._parameter_format is not None
        form = "in bf16" if self.keeps_masters else "as stored"
        self.description += f", updated parameters {form}"

    def reductions(self, accumulation: int) -> int:
        return 1

    def gradients(self, group: GroupTraffic) -> Message:
        # The rows of each owner start a new quantization block.
        cut = group._replace(
            reduced_shapes=owned_shapes(group.reduced_shapes, group.replicas),
            hidden_shapes=owned_shapes(group.hidden_shapes, group.replicas),
        )
        return Message("all_to_all", self.gradient_bytes(cut))

    def parameters(self, group: GroupTraffic) -> Message:
        comm_format = self._parameter_format
        item = group.stored_itemsize if comm_format is None else comm_format.item_bytes
        return Message("all_gather", group.reduced_numel * item)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        # Unrounded gradients are received in a separate buffer.
        unrounded = min(sum(sums), max([*sums, self.bucket_bytes]))
        return super().buffer_bytes(sums, item_bytes) or unrounded

    def start(self, model: ReplicatedModel) -> Started:
        self.check_warmup()
        named = self.names_with_error_feedback(model)
        owners = OwnedParameters(model, self._parameter_format, self.bucket_bytes, named)

        def reduction_for(comm_format: CommunicationFormat) -> Reduction:
            sent = self.sent(comm_format, model.keys.step)
            return ScatterToOwners(model.group, sent, model.keys, model.hidden, owners)

        return Started(owners, reduction_for)

    def expected_gradient(
        self, values: Sequence[Tensor], cut: Sequence[Region], name: str, state: ExpectedState
    ) -> Tensor:
        owned: list[Region] = []
        for region in cut if values[0].ndim else ():
            for replica in range(len(values)):
                begin, rows = rows_of_owner(region.lengths[0], replica, len(values))
                first = region.offsets[0] + begin
                if rows:
                    owned.append(Region((first, *region.offsets[1:]), (rows, *region.lengths[1:])))
        return super().expected_gradient(values, owned or cut, name, state)

    def expected_copy(self, updated: Tensor) -> Tensor:
        comm_format = self._parameter_format
        # Parameters without dims are replicated and not all-gathered.
        if comm_format is None or not updated.ndim:
            return updated
        return updated.to(comm_format.dtype).to(updated.dtype)


class _Form(NamedTuple):
    """The gradients of ``parameters`` in one communication format."""

    parameters: Sequence[FSDPParameter]
    quantized: QuantizedPart
    lengths: Sequence[int]  # length of the message to each owner
    shapes: Sequence[torch.Size]  # shape of the owned rows of each parameter


@dataclass
class ScatterToOwners(RoundedReduction):
    """Reduction of the gradients of a bucket to the owners of their rows.

    The gradients of rows that this replica does not own are freed. As in [Note: rounded exchange],
    each replica sends its contributions in the bucket's format, and the owner adds the
    contributions in fp32 or wider, in the order of the replicas. The contributions are sent by an
    all-to-all even without rounding, because gloo's reduce-scatter costs twice as much.
    """

    residuals: OwnedParameters

    def start(self, bucket: Bucket) -> list[Wait]:
        """Start to average the gradients of the owned rows over the replicas."""
        owners = self.residuals
        begun = list(itertools.starmap(self._form, self.by_format(bucket).items()))
        # The messages are copies of the buffer, which is freed on the host here. Its memory must
        # stay valid until the copies on the stream of the buckets have ended.
        keep_until_done(bucket.buffer())
        bucket.release()
        for parameter in bucket.trained:
            parameter.set_gradient(None)
        forms = [form for form, _ in begun]
        lengths = [form.lengths[owners.replica] for form in forms]
        sizes = list(map(sum, zip(*(form.lengths for form in forms), strict=True)))
        sent = begun[0][1]
        if len(forms) > 1:
            by_owner = zip(*(message.split(form.lengths) for form, message in begun), strict=True)
            sent = torch.cat(list(itertools.chain.from_iterable(by_owner)))
        received = sent.new_empty(owners.replicas, sum(lengths))
        parts = [sum(lengths)] * owners.replicas
        work = dist.all_to_all_single(
            received.view(-1), sent, parts, sizes, group=self.group, async_op=True
        )

        assert work is not None  # always set with async_op=True

        received_at = received.untyped_storage().data_ptr()

        def wait() -> None:
            metering.wait(work, self.group)
            for form, contributions in zip(forms, received.split(lengths, dim=1), strict=True):
                mean = form.quantized.mean_of(contributions)
                # Gradients are views of `mean`. If `mean` is a view of the receive buffer, copy it,
                # so that the gradients do not keep the whole buffer alive.
                is_received = mean.untyped_storage().data_ptr() == received_at
                dtypes = []
                for parameter in form.parameters:
                    dtypes.append(parameter.final_dtype.to_real())
                # Cast all rows together to the widest dtype. Rows of another dtype are cast again.
                widest = functools.reduce(torch.promote_types, dtypes)
                mean = mean.to(widest, copy=is_received)
                rows = form.quantized.quantizer.values(mean, form.shapes)
                for parameter, own, dtype in zip(form.parameters, rows, dtypes, strict=True):
                    owners.take_gradient(parameter, own.to(dtype))

        return [wait]

    def _form(
        self, comm_format: CommunicationFormat, members: Sequence[tuple[FSDPParameter, Tensor]]
    ) -> tuple[_Form, Tensor]:
        """Quantize the ``members`` of a bucket with one format. Return them with their message."""
        owners = self.residuals
        # Gradients are never sent in a wider dtype than their own.
        if comm_format.item_bytes > members[0][1].itemsize:
            comm_format = format_of(members[0][1].dtype)
        parameters, _ = zip(*members, strict=True)
        by_owner = list(zip(*(owners.parts(*each) for each in members), strict=True))
        again = any(owners.owned(parameter).grad is not None for parameter in parameters)
        quantized = self.quantized(
            comm_format, list(itertools.chain.from_iterable(by_owner)), (), again=again
        )
        (message,) = quantized.contribution(owners.replica, 1)
        quantized.keep_errors()
        shapes, lengths = [], []
        for parts in by_owner:
            shapes.append([part.values.shape for part in parts])
            lengths.append(comm_format.bytes_of(shapes[-1]) // message.itemsize)
        return _Form(parameters, quantized, lengths, shapes[owners.replica]), message

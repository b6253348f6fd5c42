"""``strategy=hybrid_full``: each replica updates a part of the parameters.

[Note: split updates] Each replica owns an equal number of rows of this rank's shard of every
parameter. Its gradient rows are reduced to it (`ScatterToOwners`), the optimizer has its rows alone
(`OwnedParameters.make`), and after the optimizer's step the updated rows are gathered on all
replicas (`OwnedParameters.after_update`). That sends as many bytes as an all-reduce of the
gradients, and the optimizer state is divided by the number of replicas.

Owned rows are views of the sharded parameters. Where updates are sent in a narrower dtype they are
tensors of their own, which keep what rounding loses; all replicas compute with rounded values. What
a script writes to parameters is taken over: their rows are compared with those that were sent last.
Parameters are sent in 16 bits where gradients have fewer, whose codes begin anew with each owner.
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
from parallel2d.parallel.sync.wires import WIRES, Wire, wire_of
from parallel2d.parallel.sync.wires.exchange import Coded
from parallel2d.parallel.weights.geometry import Region


class SplitUpdates(EveryStep):
    """Gradients are reduced to the replica that updates them, updated parameters are gathered."""

    splits_updates = True
    _sent_back = False

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        # In which updated parameters are sent; None: as they are stored.
        self._parameter_wire = None if self.gradients_are_exact else WIRES["bf16"]
        self.keeps_masters = self._parameter_wire is not None
        form = "in bf16" if self.keeps_masters else "as stored"
        self.description += f", updated parameters {form}"

    def reductions(self, accumulation: int) -> int:
        return 1

    def gradients(self, group: GroupTraffic) -> Message:
        # Each owner's rows begin a block.
        cut = group._replace(
            reduced_shapes=owned_shapes(group.reduced_shapes, group.replicas),
            hidden_shapes=owned_shapes(group.hidden_shapes, group.replicas),
        )
        return Message("all_to_all", self.gradient_bytes(cut))

    def parameters(self, group: GroupTraffic) -> Message:
        wire = self._parameter_wire
        item = group.stored_itemsize if wire is None else wire.item_bytes
        return Message("all_gather", group.reduced_numel * item)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        # Unrounded ones are received apart from what is sent.
        unrounded = min(sum(sums), max([*sums, self.bucket_bytes]))
        return super().buffer_bytes(sums, item_bytes) or unrounded

    def start(self, model: ReplicatedModel) -> Started:
        self.check_warmup()
        named = self.with_residuals(model)
        owners = OwnedParameters(model, self._parameter_wire, self.bucket_bytes, named)

        def reduction_for(wire: Wire) -> Reduction:
            sent = self.sent(wire, model.keys.step)
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
        wire = self._parameter_wire
        # One without dimensions is not gathered.
        if wire is None or not updated.ndim:
            return updated
        return updated.to(wire.dtype).to(updated.dtype)


class _Form(NamedTuple):
    """The gradients of ``parameters`` that are sent in one format."""

    parameters: Sequence[FSDPParameter]
    coded: Coded
    lengths: Sequence[int]  # of the message to each owner
    shapes: Sequence[torch.Size]  # of the rows that this replica owns


@dataclass
class ScatterToOwners(RoundedReduction):
    """Reduces the gradients of a bucket to the replicas that own them, and frees the others.

    As in [Note: rounded exchange], each replica sends its contributions in the bucket's wire, and
    the owner adds them in fp32 at least, in the order of the replicas. Gloo has no reduce-scatter
    that costs less than an all-reduce; an all-to-all costs half.
    """

    residuals: OwnedParameters

    def start(self, bucket: Bucket) -> list[Wait]:
        """Begins to average the owned rows of the bucket over the replicas."""
        owners = self.residuals
        begun = [self._form(*each) for each in self.by_wire(bucket).items()]
        # All of it has been copied.
        keep_until_done(bucket.buffer())
        bucket.release()
        for parameter in bucket.trained:
            parameter.set_gradient(None)
        forms = [form for form, _ in begun]
        lengths = [form.lengths[owners.replica] for form in forms]
        sizes = [sum(of_owner) for of_owner in zip(*(form.lengths for form in forms), strict=True)]
        sent = begun[0][1]
        if len(forms) > 1:
            by_owner = zip(*(message.split(form.lengths) for form, message in begun), strict=True)
            sent = torch.cat(list(itertools.chain.from_iterable(by_owner)))
        received = sent.new_empty(owners.replicas, sum(lengths))
        parts = [sum(lengths)] * owners.replicas
        work = dist.all_to_all_single(
            received.view(-1), sent, parts, sizes, group=self.group, async_op=True
        )

        assert work is not None  # of an asynchronous collective

        received_at = received.untyped_storage().data_ptr()

        def wait() -> None:
            metering.wait(work, self.group)
            for form, contributions in zip(forms, received.split(lengths, dim=1), strict=True):
                mean = form.coded.mean_of(contributions)
                # The gradients are views of it, and what has arrived is not to stay with them.
                is_received = mean.untyped_storage().data_ptr() == received_at
                dtypes = [parameter.final_dtype.to_real() for parameter in form.parameters]
                # One cast of all, and a second one where parameters have different dtypes.
                widest = functools.reduce(torch.promote_types, dtypes)
                mean = mean.to(widest, copy=is_received)
                rows = form.coded.coder.values(mean, form.shapes)
                for parameter, own, dtype in zip(form.parameters, rows, dtypes, strict=True):
                    owners.take_gradient(parameter, own.to(dtype))

        return [wait]

    def _form(
        self, wire: Wire, members: Sequence[tuple[FSDPParameter, Tensor]]
    ) -> tuple[_Form, Tensor]:
        """What `start` begins with of the ``members`` of a bucket, and their message, flat."""
        owners = self.residuals
        # Nothing is sent in a dtype that is wider than the gradients.
        if wire.item_bytes > members[0][1].itemsize:
            wire = wire_of(members[0][1].dtype)
        parameters = [parameter for parameter, _ in members]
        by_owner = list(zip(*(owners.parts(*each) for each in members), strict=True))
        again = any(owners.owned(parameter).grad is not None for parameter in parameters)
        coded = self.coded(wire, list(itertools.chain.from_iterable(by_owner)), (), again=again)
        (message,) = coded.contribution(owners.replica, 1)
        coded.keep_rest()
        shapes = [[part.values.shape for part in parts] for parts in by_owner]
        lengths = [wire.bytes_of(each) // message.itemsize for each in shapes]
        return _Form(parameters, coded, lengths, shapes[owners.replica]), message

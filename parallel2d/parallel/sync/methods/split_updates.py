"""``strategy=hybrid_full``: each replica updates a part of the parameters.

[Note: split updates] Each replica owns an equal number of rows of this rank's shard of every
parameter. Its gradient rows are reduced to it (`ScatterToOwners`), the optimizer has its rows alone
(`OwnedParameters.make`), and after the optimizer's step the updated rows are gathered on all
replicas (`OwnedParameters.after_update`). That sends as many bytes as an all-reduce of the
gradients, and the optimizer state is divided by the number of replicas.

Owned rows are views of the sharded parameters. Where updates are sent in a narrower dtype they are
tensors of their own, which keep what rounding loses; all replicas compute with rounded values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError, first_five
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPParameter
from parallel2d.parallel.mesh import axis_names, mesh_shape, ranks_of
from parallel2d.parallel.model_structure import update_as
from parallel2d.parallel.sync.engine.buckets import Bucket, Wait, fill_buckets
from parallel2d.parallel.sync.engine.group_state import clear_gradients, keep_until_done
from parallel2d.parallel.sync.methods.every_step import EveryStep
from parallel2d.parallel.sync.methods.method import (
    GroupTraffic,
    Message,
    ReplicatedModel,
    Started,
    UpdateFollower,
    needs_closure,
)
from parallel2d.parallel.sync.wires import Wire
from parallel2d.parallel.weights.geometry import as_real, local_part, pieces_of
from parallel2d.parallel.weights.named_tensors import register_masters


class SplitUpdates(EveryStep):
    """Gradients are reduced to the replica that updates them, updated parameters are gathered."""

    splits_updates = True
    _what = "gradients and updated parameters"
    _sent_back = False

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        # In which updated parameters are sent; None: as they are stored.
        self._parameter_wire = None if self.gradients_are_exact else self.named_wire
        self.keeps_masters = self._parameter_wire is not None

    def reductions(self, accumulation: int) -> int:
        return 1

    def gradients(self, group: GroupTraffic) -> Message:
        return Message("all_to_all", self.gradient_bytes(group))

    def parameters(self, group: GroupTraffic) -> Message:
        wire = self._parameter_wire
        item = group.stored_itemsize if wire is None else wire.item_bytes
        return Message("all_gather", group.reduced_numel * item)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        # Unrounded ones are received apart from what is sent.
        unrounded = min(sum(sums), max([*sums, self.bucket_bytes]))
        return super().buffer_bytes(sums, item_bytes) or unrounded

    def start(self, model: ReplicatedModel) -> Started:
        owners = OwnedParameters(model, self._parameter_wire, self.bucket_bytes)
        scatter = ScatterToOwners(model.group, owners)
        return Started(owners, lambda _: scatter)

    def expected_copy(self, updated: Tensor) -> Tensor:
        wire = self._parameter_wire
        # One without dimensions is not gathered.
        if wire is None or not updated.ndim:
            return updated
        return updated.to(wire.dtype).to(updated.dtype)


class OwnedParameters(UpdateFollower):
    """The parts of one model's parameters that this replica updates.

    ``wire``: in which updated parameters are sent; None: as they are stored. ``bucket_bytes``:
    parameters are gathered in pieces of about this size. Collective over the world.
    """

    follows = True
    replicas_differ = False  # as `weights.named_tensors.MasterValues`

    def __init__(self, model: ReplicatedModel, wire: Wire | None, bucket_bytes: int) -> None:
        self._model = model
        self._wire = None if wire is None else wire.dtype
        self._bucket_bytes = bucket_bytes
        self.replicas = mesh_shape(model.mesh).replicate
        self._replica = dist.get_group_rank(model.group, dist.get_rank())
        # The axes from the inside out: the order in which a parameter is split when replicas split
        # what the others leave. Placements on the usual order would need torch's strided shards,
        # which put rows elsewhere where sizes do not divide.
        names = ("tensor", "shard", "replicate")
        inside_out = ranks_of(model.mesh)[:, :, 0].permute(2, 1, 0).contiguous()
        self._mesh = DeviceMesh(model.mesh.device_type, inside_out, mesh_dim_names=names)
        # By axes: making a mesh of some of them takes a millisecond.
        self._meshes = {self._mesh.mesh_dim_names: self._mesh}
        self._owned: dict[int, nn.Parameter] = {}
        # By name, those whose parts are tensors of their own
        self._masters: dict[str, FSDPParameter] = {}

    @torch.no_grad()
    def make(self, model: nn.Module) -> None:
        for parameter in self._parameters():
            whole = parameter.sharded
            rows = self.rows(local_part(whole.detach()), self._replica)
            if self._wire is not None and whole.requires_grad:
                rows = rows.clone()
                self._masters[parameter.name] = parameter
            owned = nn.Parameter(self._as_dtensor(rows, whole), whole.requires_grad)
            # Any dtype: that of gradients may differ from the parameter's.
            owned.grad_dtype = None
            self._owned[id(parameter)] = owned
            update_as(whole, owned)
        register_masters(model, self)

    def _parameters(self) -> list[FSDPParameter]:
        found: list[FSDPParameter] = []
        for group in reversed(self._model.groups):
            found.extend(group.parameters)
        return found

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self._optimizer:
            return
        if needs_closure(type(optimizer)):
            raise ConfigError(
                f"strategy=hybrid_full: {type(optimizer).__name__}.step computes losses between "
                "updates, which replicas do not hear of before it ends; use strategy=hybrid"
            )
        whole = {id(parameter.sharded) for parameter in self._parameters()}
        for settings in optimizer.param_groups:
            if any(id(each) in whole for each in settings["params"]):
                raise ConfigError(
                    f"{type(optimizer).__name__} was built on model.parameters(): with "
                    "strategy=hybrid_full each replica updates its own part of them; build it with "
                    "parallel2d.build_optimizer, or on parallel2d.updated_parameters(model)"
                )
        super().attach(optimizer)
        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def clear(set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            # Sums not reduced over replicas are in sharded parameters, which the optimizer lacks.
            clear_gradients(self._model.groups, set_to_none)

        optimizer.zero_grad = clear  # type: ignore[method-assign]

    def owned(self, parameter: FSDPParameter) -> nn.Parameter:
        """This replica's part."""
        return self._owned[id(parameter)]

    def masters(self) -> dict[str, Tensor]:
        """By name, the parts that are tensors of their own; none where they are views."""
        return {name: self.owned(parameter) for name, parameter in self._masters.items()}

    def masters_were_loaded(self) -> None:
        """Sends the parts to all replicas. Collective."""
        self._gather(list(self._masters.values()))

    @torch.no_grad()
    def parameters_were_changed(self) -> None:
        """Takes over what differs from the rounded parts."""
        for parameter in self._masters.values():
            rows = self.rows(local_part(parameter.sharded), self._replica)
            owned = local_part(self.owned(parameter))
            is_rounded = owned.to(self._wire).to(rows.dtype) == rows
            owned.copy_(torch.where(is_rounded, owned, rows))

    parameters_were_loaded = parameters_were_changed

    def _as_dtensor(self, rows: Tensor, whole: Tensor) -> DTensor:
        """``rows`` of this replica as a part of ``whole``."""
        assert isinstance(whole, DTensor)
        names = axis_names(whole.device_mesh)
        by_axis: dict[str, Placement] = dict(zip(names, whole.placements, strict=True))
        # Rows are split over the shard axis first, and this rank's part of them over the replicas.
        by_axis["shard"] = by_axis["replicate"] = Shard(0)
        used = tuple(axis for axis in axis_names(self._mesh) if axis in by_axis)
        if used not in self._meshes:
            self._meshes[used] = self._mesh[used]
        return DTensor.from_local(
            rows,
            self._meshes[used],
            [by_axis[axis] for axis in used],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def rows(self, local: Tensor, replica: int) -> Tensor:
        """The rows of a local tensor that ``replica`` owns, a view."""
        rows = local.shape[0]
        size = -(-rows // self.replicas)  # rounded up; the last ones have fewer, or none
        begin = min(replica * size, rows)
        return local.narrow(0, begin, min(size, rows - begin))

    def take_gradient(self, parameter: FSDPParameter, rows: Tensor) -> None:
        """Adds the reduced ``rows`` to the gradient of the owned part of ``parameter``."""
        if parameter.sharded.is_complex():
            rows = torch.view_as_complex(rows)
        parameter.set_gradient(None)
        owned = self.owned(parameter)
        if owned.grad is not None:
            local_part(owned.grad).add_(rows)
        else:
            rows = rows.to(self._model.gradient_dtype or rows.dtype)
            owned.grad = self._as_dtensor(rows, parameter.sharded)

    def clear_gradients(self, set_to_none: bool) -> None:
        for owned in self._owned.values():
            if set_to_none:
                owned.grad = None
            elif owned.grad is not None:
                local_part(owned.grad).zero_()

    @torch.no_grad()
    def after_update(self) -> None:
        """Sends this replica's updated rows to the others and takes theirs. Collective. Raises
        `ConfigError` for a parameter that was unfrozen and whose rows would be rounded for good."""
        trained = [each for each in self._parameters() if each.sharded.requires_grad]
        if self._wire is not None:
            new = [each.name for each in trained if each.name not in self._masters]
            if new:
                raise ConfigError(
                    f"strategy=hybrid_full sync.wire=bf16: {first_five(new, ', ')}: unfrozen after "
                    "parallelize, which keeps unrounded rows of trained parameters alone; do it "
                    "before"
                )
        self._gather(trained)
        # The optimizer counts its updates of the parts alone.
        torch.autograd.graph.increment_version([each.sharded for each in trained])

    @torch.no_grad()
    def _gather(self, parameters: Sequence[FSDPParameter]) -> None:
        """Sends this replica's rows of ``parameters`` and takes those of the others. Collective."""
        locals_ = [local_part(parameter.sharded) for parameter in parameters]
        sizes = [local.nbytes for local in locals_]
        dtypes = [local.dtype for local in locals_]
        pending: list[Wait] = []
        for batch in fill_buckets(sizes, dtypes, self._bucket_bytes):
            pending.append(self._start_gather([parameters[index] for index in batch]))
            # Two at a time: each holds a copy of its parameters.
            if len(pending) == 2:
                pending.pop(0)()
        for wait in pending:
            wait()

    def _start_gather(self, parameters: Sequence[FSDPParameter]) -> Wait:
        own = [local_part(self.owned(parameter)) for parameter in parameters]
        locals_ = [local_part(parameter.sharded) for parameter in parameters]
        # The first replica never owns fewer rows than another.
        largest = sum(as_real(self.rows(local, 0)).numel() for local in locals_)
        sent = torch.cat([as_real(rows).reshape(-1) for rows in own])
        if self._wire is not None:
            sent = sent.to(self._wire)
        sent = torch.nn.functional.pad(sent, (0, largest - sent.numel()))
        received = sent.new_empty(self.replicas * sent.numel())
        work = dist.all_gather_single(received, sent, group=self._model.group, async_op=True)

        def wait() -> None:
            work.wait()
            for replica, piece in enumerate(received.chunk(self.replicas)):
                # Views of the owned rows hold their values already.
                if replica == self._replica and self._wire is None:
                    continue
                targets = [as_real(self.rows(local, replica)) for local in locals_]
                values = pieces_of(piece, [target.shape for target in targets])
                for target, value in zip(targets, values, strict=True):
                    target.copy_(value)

        return wait


@dataclass
class ScatterToOwners:
    """Reduces the gradients of a bucket to the replicas that own them, and frees the others.

    As in [Note: rounded exchange], each replica sends its contributions in the bucket's wire, and
    the owner adds them in fp32 at least, in the order of the replicas. Gloo has no reduce-scatter
    that costs less than an all-reduce; an all-to-all costs half.
    """

    group: dist.ProcessGroup
    owners: OwnedParameters
    most_in_flight: int | None = 2

    def start(self, bucket: Bucket) -> list[Wait]:
        """Begins to average the owned rows of the bucket over the replicas."""
        replicas = self.owners.replicas
        own_replica = dist.get_group_rank(self.group, dist.get_rank())
        gradients = bucket.parts()
        shapes = [self.owners.rows(each, own_replica).shape for each in gradients]
        flat: list[Tensor] = []
        sizes: list[int] = []
        for replica in range(replicas):
            rows = [self.owners.rows(each, replica) for each in gradients]
            flat.extend(piece.reshape(-1) for piece in rows)
            sizes.append(sum(piece.numel() for piece in rows))
        own = sizes[own_replica]
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        sent = torch.cat(flat)
        if bucket.wire.item_bytes < sent.dtype.itemsize:
            sent = sent.to(bucket.wire.dtype)
        # All of it has been copied.
        keep_until_done(gradients[0])
        device = sent.device
        gradients.clear()
        flat.clear()
        bucket.release()
        for parameter in bucket.trained:
            parameter.set_gradient(None)
        received = sent.new_empty(replicas * own)
        parts = [own] * replicas
        work = dist.all_to_all_single(received, sent, parts, sizes, group=self.group, async_op=True)

        def wait() -> None:
            work.wait()
            mean = torch.zeros(own, dtype=wide, device=device)
            for contribution in received.chunk(replicas):
                mean += contribution
            mean /= replicas
            for parameter, rows in zip(bucket.trained, pieces_of(mean, shapes), strict=True):
                self.owners.take_gradient(parameter, rows)

        return [wait]

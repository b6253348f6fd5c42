"""The rows of parameters that a replica updates with ``strategy=hybrid_full``: `OwnedParameters`.

See [Note: split updates] in `split_updates`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from parallel2d.base import metering
from parallel2d.base.errors import ConfigError, first_five
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPParameter
from parallel2d.parallel.mesh import axis_names, mesh_shape, ranks_of
from parallel2d.parallel.model_structure import update_as
from parallel2d.parallel.sync.engine.buckets import Wait, fill_buckets
from parallel2d.parallel.sync.formats import CommunicationFormat
from parallel2d.parallel.sync.methods.error_feedback import ErrorFeedback
from parallel2d.parallel.sync.methods.every_step import GradientPart
from parallel2d.parallel.sync.methods.method import ReplicatedModel, needs_closure
from parallel2d.parallel.weights.geometry import as_real, local_part, pieces_of
from parallel2d.parallel.weights.named_tensors import equal, register_masters, stepped_by


def rows_of_owner(rows: int, replica: int, replicas: int) -> tuple[int, int]:
    """Return the first row and the number of rows that ``replica`` owns of a tensor's ``rows``.

    Each replica owns ceil(rows / replicas) rows; the last replicas own fewer rows or none.
    """
    size = -(-rows // replicas)
    begin = min(replica * size, rows)
    return begin, min(size, rows - begin)


def owned_shapes(shapes: Sequence[Sequence[int]], replicas: int) -> tuple[torch.Size, ...]:
    """Return the shapes of the owned rows, for each tensor of ``shapes`` and each replica."""
    found: list[torch.Size] = []
    for first, *others in shapes:
        for replica in range(replicas):
            found.append(torch.Size([rows_of_owner(first, replica, replicas)[1], *others]))
    return tuple(found)


def _refuse_unsent(parameters: Iterable[FSDPParameter]) -> None:
    unsent = []
    for each in parameters:
        if each.sharded.requires_grad and each.sharded.grad is not None:
            unsent.append(each.name)
    if unsent:
        raise ConfigError(
            f"strategy=hybrid_full: {first_five(unsent, ', ')}: a gradient of a backward outside "
            "of the model's forwards, as of a penalty, does not reach the updating replica: add it "
            "to the loss of a forward, or to .grad of updated_parameters(model)"
        )


class OwnedParameters(ErrorFeedback):
    """The rows of one model's parameters that this replica updates, with their error feedback.

    Collective over the world.

    Args:
        model: the model on several replicas.
        comm_format: communication format of updated parameters; None: the storage dtype.
        bucket_bytes: maximum size of parameters that are all-gathered together.
        names: see `ErrorFeedback`.
    """

    replicas_differ = False  # see `weights.named_tensors.MasterValues`

    def __init__(
        self,
        model: ReplicatedModel,
        comm_format: CommunicationFormat | None,
        bucket_bytes: int,
        names: Container[str],
    ) -> None:
        super().__init__(model, names)
        # The number in the mesh, and not of live replicas: a failed replica still owns its rows.
        self.replicas = mesh_shape(model.mesh).replicate
        self._model = model
        self._sent_dtype = None if comm_format is None else comm_format.dtype
        self._bucket_bytes = bucket_bytes
        # A mesh with the order of axes reversed: parameters are sharded over the shard axis first,
        # and the local shards are then split over the replicas. With the usual order of axes torch
        # would need `_StridedShard`, which places rows differently if sizes are not divisible.
        axes = ("tensor", "shard", "replicate")
        inside_out = ranks_of(model.mesh)[:, :, 0].permute(2, 1, 0).contiguous()
        self._mesh = DeviceMesh(model.mesh.device_type, inside_out, mesh_dim_names=axes)
        # Submeshes by their axes. A cache, because building a submesh takes a millisecond.
        self._meshes = {self._mesh.mesh_dim_names: self._mesh}
        self._owned: dict[int, nn.Parameter] = {}
        # Parameters with owned rows that are separate tensors (unrounded values), by name
        self._masters: dict[str, FSDPParameter] = {}
        # A copy of the owned rows in the parameters, to find writes of a script; see `_take_over`
        self._seen: dict[str, Tensor] = {}

    @torch.no_grad()
    def make(self, model: nn.Module) -> None:
        for parameter in self._all():
            whole = parameter.sharded
            rows = self.rows(local_part(whole.detach()), self.replica)
            if self._sent_dtype is not None and whole.requires_grad:
                rows = rows.clone()
                self._masters[parameter.name] = parameter
                self._seen[parameter.name] = rows.clone()
            owned = nn.Parameter(self._as_dtensor(rows, whole), whole.requires_grad)
            # None allows gradients of another dtype than the parameter's dtype.
            owned.grad_dtype = None
            self._owned[id(parameter)] = owned
            update_as(whole, owned)
        register_masters(model, self)

    def _all(self) -> list[FSDPParameter]:
        found: list[FSDPParameter] = []
        for group in reversed(self._model.groups):
            found.extend(group.parameters)
        return found

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        if needs_closure(type(optimizer)):
            raise ConfigError(
                f"strategy=hybrid_full: {type(optimizer).__name__}.step computes losses between "
                "updates, which replicas do not hear of before it ends; use strategy=hybrid"
            )
        self.before_update(optimizer)
        super().attach(optimizer)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = self._all()
        stepped = set(map(id, stepped_by(optimizer)))
        if any(id(each.sharded) in stepped for each in parameters):
            raise ConfigError(
                f"{type(optimizer).__name__} has model.parameters(): with strategy=hybrid_full "
                "each replica updates its own part of them; build it with "
                "parallel2d.build_optimizer, or on parallel2d.updated_parameters(model)"
            )
        updated = []
        for each in parameters:
            if id(self.owned(each)) in stepped:
                updated.append(each)
        _refuse_unsent(updated)
        self._take_over([each for each in updated if each.name in self._masters], exactly=False)

    def drop_sums(self, set_to_none: bool) -> None:
        super().drop_sums(set_to_none)
        # Gradients that are not reduced over the replicas yet are on the sharded parameters, and
        # the optimizer has only the owned rows.
        for group in self._model.groups:
            group.clear_gradients(set_to_none=True)

    def owned(self, parameter: FSDPParameter) -> nn.Parameter:
        """Return the rows of ``parameter`` that this replica updates."""
        return self._owned[id(parameter)]

    def masters(self) -> dict[str, Tensor]:
        """Return the owned rows that are separate tensors, by name."""
        self._take_over(self._masters.values(), exactly=False)
        return {name: self.owned(parameter) for name, parameter in self._masters.items()}

    def masters_were_loaded(self) -> None:
        """Send the loaded rows to all replicas. Collective."""
        self._gather(list(self._masters.values()))

    def parameters_were_changed(self) -> None:
        self._take_over(self._masters.values(), exactly=True)

    parameters_were_loaded = parameters_were_changed

    @torch.no_grad()
    def _take_over(self, parameters: Iterable[FSDPParameter], *, exactly: bool) -> None:
        """Copy a script's writes to ``parameters`` to the owned rows.

        If ``exactly`` is False, a value that changed by at most 1/16, for example by weight decay,
        is changed by the same difference, so that its digits beyond the rounded value are kept.
        """
        for parameter in parameters:
            rows = as_real(self.rows(local_part(parameter.sharded), self.replica))
            seen = as_real(self._seen[parameter.name])
            # Compare only on CPU, because on other devices the host would wait. Fake tensors have
            # no values.
            if rows.is_cpu and type(rows) is Tensor and torch.equal(rows, seen):
                continue
            owned = as_real(local_part(self.owned(parameter)))
            change = rows - seen
            near = change.abs() <= seen.abs() / 16
            written = rows if exactly else torch.where(near, owned + change, rows)
            owned.copy_(torch.where(rows == seen, owned, written))
            seen.copy_(rows)

    def as_parameters(self) -> AbstractContextManager[None]:
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, parameter in self._masters.items():
            rows = self.rows(local_part(parameter.sharded.detach()), self.replica)
            own = local_part(self.owned(parameter).detach())
            pairs += [(own, rows), (self._seen[name], rows)]
        return equal(pairs)

    def _as_dtensor(self, rows: Tensor, whole: Tensor) -> DTensor:
        """Return ``rows``, the local tensor of this replica, as a `DTensor` of the shape of
        ``whole``."""
        assert isinstance(whole, DTensor)
        names = axis_names(whole.device_mesh)
        by_axis: dict[str, Placement] = dict(zip(names, whole.placements, strict=True))
        # Rows are sharded over the shard axis first, unless the parameter is replicated over this
        # axis. The local shard is then split over the replicas.
        by_axis["replicate"] = Shard(0)
        if not by_axis["shard"].is_replicate():
            by_axis["shard"] = Shard(0)
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
        """Return the rows of a local tensor that ``replica`` owns, as a view."""
        return local.narrow(0, *rows_of_owner(local.shape[0], replica, self.replicas))

    def cut(self, local: Tensor) -> Sequence[Tensor]:
        rows, replicas = local.shape[0], self.replicas
        return local.split([rows_of_owner(rows, each, replicas)[1] for each in range(replicas)])

    def parts(self, parameter: FSDPParameter, gradient: Tensor) -> list[GradientPart]:
        """Return the parts of this rank's ``gradient``, one part per owner."""
        found: list[GradientPart] = []
        start, row = parameter.start, math.prod(parameter.sharded.shape[1:])
        for replica, owned in enumerate(self.cut(gradient)):
            found.append(GradientPart((parameter.name, replica), start, owned))
            start += owned.shape[0] * row
        return found

    def take_gradient(self, parameter: FSDPParameter, rows: Tensor) -> None:
        """Add the reduced ``rows`` to the gradient of the owned rows of ``parameter``."""
        if parameter.sharded.is_complex():
            rows = torch.view_as_complex(rows)
        parameter.set_gradient(None)
        owned = self.owned(parameter)
        if owned.grad is not None:
            local_part(owned.grad).add_(rows)
        else:
            owned.grad = self._as_dtensor(rows, parameter.sharded)

    def clear_gradients(self, set_to_none: bool) -> None:
        super().clear_gradients(set_to_none)
        for owned in self._owned.values():
            if set_to_none:
                owned.grad = None
            elif owned.grad is not None:
                local_part(owned.grad).zero_()

    @torch.no_grad()
    def after_update(self) -> None:
        """All-gather the updated rows over the replicas. Collective.

        Raises `ConfigError` for a parameter that was unfrozen after `parallelize`, if the owned
        rows must be separate tensors.
        """
        super().after_update()
        trained = []
        for each in self._all():
            if each.sharded.requires_grad:
                trained.append(each)
        if self._sent_dtype is not None:
            new = []
            for each in trained:
                if each.name not in self._masters:
                    new.append(each.name)
            if new:
                raise ConfigError(
                    f"strategy=hybrid_full sends rounded parameters with this sync.wire: "
                    f"{first_five(new, ', ')}: unfrozen after parallelize, which keeps unrounded "
                    "rows only of trained parameters; unfreeze before"
                )
        self._gather(trained)
        # The optimizer has incremented only the versions of the owned rows.
        torch.autograd.graph.increment_version([each.sharded for each in trained])

    @torch.no_grad()
    def _gather(self, parameters: Sequence[FSDPParameter]) -> None:
        """All-gather the rows of ``parameters`` over the replicas. Collective."""
        locals_ = []
        for parameter in parameters:
            locals_.append(local_part(parameter.sharded))
        sizes, dtypes = [], []
        for local in locals_:
            sizes.append(local.nbytes)
            dtypes.append(local.dtype)
        pending: list[Wait] = []
        # Sizes and dtypes are equal on all replicas, so every replica makes the same batches and
        # starts their all-gathers in the same order.
        for batch in fill_buckets(sizes, dtypes, self._bucket_bytes):
            pending.append(self._start_gather([parameters[index] for index in batch]))
            # At most two batches are in flight, because each holds a copy of its parameters.
            if len(pending) == 2:
                pending.pop(0)()
        for wait in pending:
            wait()

    def _start_gather(self, parameters: Sequence[FSDPParameter]) -> Wait:
        own = [local_part(self.owned(parameter)) for parameter in parameters]
        locals_ = []
        for parameter in parameters:
            locals_.append(local_part(parameter.sharded))
        # The first replica owns the most rows.
        largest = sum(as_real(self.rows(local, 0)).numel() for local in locals_)
        sent = torch.cat([as_real(rows).reshape(-1) for rows in own])
        if self._sent_dtype is not None:
            sent = sent.to(self._sent_dtype)
        sent = torch.nn.functional.pad(sent, (0, largest - sent.numel()))
        received = sent.new_empty(self.replicas * sent.numel())
        work = dist.all_gather_single(received, sent, group=self._model.group, async_op=True)

        assert work is not None  # always set with async_op=True

        def wait() -> None:
            metering.wait(work, self._model.group)
            targets: list[Tensor] = []
            values: list[Tensor] = []
            for replica, piece in enumerate(received.chunk(self.replicas)):
                # If the owned rows are views of the parameter, they already have their values.
                if replica == self.replica and self._sent_dtype is None:
                    continue
                rows = [as_real(self.rows(local, replica)) for local in locals_]
                targets += rows
                values += pieces_of(piece, [each.shape for each in rows])
            torch._foreach_copy_(targets, values)
            if self._sent_dtype is not None:
                seen = [self._seen[parameter.name] for parameter in parameters]
                torch._foreach_copy_(seen, [self.rows(local, self.replica) for local in locals_])

        return wait

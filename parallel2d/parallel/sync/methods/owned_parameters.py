"""`OwnedParameters`: what each replica updates with ``strategy=hybrid_full``. See [Note: split
updates] in `split_updates`."""

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
from parallel2d.parallel.sync.methods.every_step import GradientPart
from parallel2d.parallel.sync.methods.method import ReplicatedModel, needs_closure
from parallel2d.parallel.sync.methods.residuals import Residuals
from parallel2d.parallel.sync.wires import Wire
from parallel2d.parallel.weights.geometry import as_real, local_part, pieces_of
from parallel2d.parallel.weights.named_tensors import equal, register_masters, stepped_by


def rows_of_owner(rows: int, replica: int, replicas: int) -> tuple[int, int]:
    """Of ``rows``, where those that ``replica`` owns begin, and how many they are: as many as every
    other replica's, rounded up. The last ones have fewer, or none."""
    size = -(-rows // replicas)
    begin = min(replica * size, rows)
    return begin, min(size, rows - begin)


def owned_shapes(shapes: Sequence[Sequence[int]], replicas: int) -> tuple[torch.Size, ...]:
    """Of the rows that each of ``replicas`` owns of tensors of these ``shapes``."""
    found: list[torch.Size] = []
    for first, *others in shapes:
        for replica in range(replicas):
            found.append(torch.Size([rows_of_owner(first, replica, replicas)[1], *others]))
    return tuple(found)


def _refuse_unsent(parameters: Iterable[FSDPParameter]) -> None:
    trained = [each for each in parameters if each.sharded.requires_grad]
    unsent = [each.name for each in trained if each.sharded.grad is not None]
    if unsent:
        raise ConfigError(
            f"strategy=hybrid_full: {first_five(unsent, ', ')}: a gradient of a backward outside "
            "of the model's forwards, as of a penalty, does not reach who updates: add it to the "
            "loss of a forward, or to .grad of updated_parameters(model)"
        )


class OwnedParameters(Residuals):
    """The parts of one model's parameters that this replica updates, and what it did not send.

    ``wire``: in which updated parameters are sent; None: as they are stored. ``bucket_bytes``:
    parameters are gathered in pieces of about this size. ``names``: as of `Residuals`. Collective
    over the world.
    """

    replicas_differ = False  # as `weights.named_tensors.MasterValues`

    def __init__(
        self,
        model: ReplicatedModel,
        wire: Wire | None,
        bucket_bytes: int,
        names: Container[str],
    ) -> None:
        super().__init__(model, names)
        # All of them: those that are lost own their rows on.
        self.replicas = mesh_shape(model.mesh).replicate
        self._model = model
        self._wire = None if wire is None else wire.dtype
        self._bucket_bytes = bucket_bytes
        # The axes from the inside out: the order in which a parameter is split when replicas split
        # what the others leave. Placements on the usual order would need torch's strided shards,
        # which put rows elsewhere where sizes do not divide.
        axes = ("tensor", "shard", "replicate")
        inside_out = ranks_of(model.mesh)[:, :, 0].permute(2, 1, 0).contiguous()
        self._mesh = DeviceMesh(model.mesh.device_type, inside_out, mesh_dim_names=axes)
        # By axes: making a mesh of some of them takes a millisecond.
        self._meshes = {self._mesh.mesh_dim_names: self._mesh}
        self._owned: dict[int, nn.Parameter] = {}
        # By name, those whose parts are tensors of their own
        self._masters: dict[str, FSDPParameter] = {}
        # Their rows in the parameters, as they were last sent or taken over
        self._seen: dict[str, Tensor] = {}

    @torch.no_grad()
    def make(self, model: nn.Module) -> None:
        for parameter in self._all():
            whole = parameter.sharded
            rows = self.rows(local_part(whole.detach()), self.replica)
            if self._wire is not None and whole.requires_grad:
                rows = rows.clone()
                self._masters[parameter.name] = parameter
                self._seen[parameter.name] = rows.clone()
            owned = nn.Parameter(self._as_dtensor(rows, whole), whole.requires_grad)
            # Any dtype: that of gradients may differ from the parameter's.
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
        stepped = {id(each) for each in stepped_by(optimizer)}
        if any(id(each.sharded) in stepped for each in parameters):
            raise ConfigError(
                f"{type(optimizer).__name__} has model.parameters(): with strategy=hybrid_full "
                "each replica updates its own part of them; build it with "
                "parallel2d.build_optimizer, or on parallel2d.updated_parameters(model)"
            )
        updated = [each for each in parameters if id(self.owned(each)) in stepped]
        _refuse_unsent(updated)
        self._take_over([each for each in updated if each.name in self._masters], exactly=False)

    def drop_sums(self, set_to_none: bool) -> None:
        super().drop_sums(set_to_none)
        # Sums not reduced over replicas are in sharded parameters, which the optimizer lacks.
        for group in self._model.groups:
            group.clear_gradients(set_to_none=True)

    def owned(self, parameter: FSDPParameter) -> nn.Parameter:
        """This replica's part."""
        return self._owned[id(parameter)]

    def masters(self) -> dict[str, Tensor]:
        """By name, the parts that are tensors of their own; none where they are views."""
        self._take_over(self._masters.values(), exactly=False)
        return {name: self.owned(parameter) for name, parameter in self._masters.items()}

    def masters_were_loaded(self) -> None:
        """Sends the parts to all replicas. Collective."""
        self._gather(list(self._masters.values()))

    def parameters_were_changed(self) -> None:
        self._take_over(self._masters.values(), exactly=True)

    parameters_were_loaded = parameters_were_changed

    @torch.no_grad()
    def _take_over(self, parameters: Iterable[FSDPParameter], *, exactly: bool) -> None:
        """Takes over what was written to ``parameters``. Not ``exactly``: values that are changed
        by at most a sixteenth, as by a decay in each step, keep what rounding takes."""
        for parameter in parameters:
            rows = as_real(self.rows(local_part(parameter.sharded), self.replica))
            seen = as_real(self._seen[parameter.name])
            # Elsewhere this would wait for the device; fake tensors have no values.
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
        return local.narrow(0, *rows_of_owner(local.shape[0], replica, self.replicas))

    def cut(self, local: Tensor) -> Sequence[Tensor]:
        rows, replicas = local.shape[0], self.replicas
        return local.split([rows_of_owner(rows, each, replicas)[1] for each in range(replicas)])

    def parts(self, parameter: FSDPParameter, gradient: Tensor) -> list[GradientPart]:
        """Of this rank's ``gradient``, what each replica owns."""
        found: list[GradientPart] = []
        start, row = parameter.start, math.prod(parameter.sharded.shape[1:])
        for replica, owned in enumerate(self.cut(gradient)):
            found.append(GradientPart((parameter.name, replica), start, owned))
            start += owned.shape[0] * row
        return found

    def take_gradient(self, parameter: FSDPParameter, rows: Tensor) -> None:
        """Adds the reduced ``rows`` to the gradient of the owned part of ``parameter``, or makes
        them the gradient."""
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
        """Sends this replica's updated rows to the others and takes theirs. Collective. Raises
        `ConfigError` for a parameter that was unfrozen and whose rows would be rounded for good."""
        super().after_update()
        trained = [each for each in self._all() if each.sharded.requires_grad]
        if self._wire is not None:
            new = [each.name for each in trained if each.name not in self._masters]
            if new:
                raise ConfigError(
                    f"strategy=hybrid_full sends rounded parameters with this sync.wire: "
                    f"{first_five(new, ', ')}: unfrozen after parallelize, which keeps unrounded "
                    "rows of trained parameters alone; do it before"
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

        assert work is not None  # of an asynchronous collective

        def wait() -> None:
            metering.wait(work, self._model.group)
            targets: list[Tensor] = []
            values: list[Tensor] = []
            for replica, piece in enumerate(received.chunk(self.replicas)):
                # Views of the owned rows hold their values already.
                if replica == self.replica and self._wire is None:
                    continue
                rows = [as_real(self.rows(local, replica)) for local in locals_]
                targets += rows
                values += pieces_of(piece, [each.shape for each in rows])
            torch._foreach_copy_(targets, values)
            if self._wire is not None:
                seen = [self._seen[parameter.name] for parameter in parameters]
                torch._foreach_copy_(seen, [self.rows(local, self.replica) for local in locals_])

        return wait

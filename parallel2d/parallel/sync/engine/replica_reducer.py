"""Sums the sharded gradients of a model over the replicate axis, by parameter, once per global
batch. `ReplicaReducer` is the engine.

[Note: owning the replicate axis] `fully_shard` reduces over the shard axis alone. Each group's
sharded gradients are then averaged over the replicas here: a parameter that a replica did not use
counts as zero, and so does a whole group that its last micro-batch skipped. That is right for any
routing of data through the model, which torch's own second axis is not: its partial sums do not
record which parameters they hold.

The reductions start during the last backward pass (`buckets.py`) and are all awaited at its
end, so that ``loss.backward()`` returns with the mean over all data ranks in every ``.grad``.
Averaging is idempotent: after a second backward pass the sum is averaged again, and is the sum of
both means. Which parameters have a gradient is agreed on last; see [Note: unused parameters].

[Note: order of streams] Autograd computes unsharded gradients on the current stream. `fully_shard`
lets its reduce-scatter stream wait for that one, and our stream of accumulation
(`FSDPGroup.accumulate_on`) wait for the reduce-scatter. On our stream torch casts, views and adds
the result to ``.grad``. When a group's ``post_backward`` has returned on the host, all kernels that
write its sharded gradients are issued, either there or, with one rank on the shard axis, on the
current stream. So a bucket is ordered after its gradients, whichever groups they are of, once its
own stream has waited for these two streams. The optimizer's stream waits for the stream of the
buckets and for that of accumulation in `finish`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Container, Iterable, Sequence
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.base.device import current_stream, new_stream
from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas import current
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.fsdp_internals.tensors import GATHERED_AS
from parallel2d.parallel.mesh import axis_names, inherit_timeout, mesh_shape, without_replicas
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.sync.engine.agreement import (
    IssueOrder,
    ScalarGradient,
    UsedParameterAgreement,
)
from parallel2d.parallel.sync.engine.buckets import BucketQueue, GroupGradients
from parallel2d.parallel.sync.methods.method import ReplicatedModel, SyncMethod, UpdateFollower
from parallel2d.parallel.sync.wires.blocks import RoundingKeys


class BatchState(enum.Enum):
    """How far the gradients of a global batch are."""

    # Gradients were added that are not reduced over the replicas.
    PENDING = enum.auto()
    # They are means over all data ranks, but unused parameters may have gradients of zeros.
    REDUCED = enum.auto()
    # Ranks have agreed on the used parameters: what the optimizer is to see. Also without any.
    AGREED = enum.auto()


class ReplicaReducer:
    """The engine of one model, made by `parallel2d.parallelize`. Collective over the world.

    It is called by the groups of parameters (`FSDPGroup`), in the order of a backward pass, and by
    nothing that it calls: it owns a `GroupGradients` for each group, the `BucketQueue` that reduces
    them, and the `UsedParameterAgreement`, none of which knows it.

    Args:
        groups: in the order in which backward ends them.
        method: of synchronization over the replicate axis.
        scalars: parameters that are replicated on every rank.
        order: None where nothing is gathered or reduced over the shard axis.
        seed: for random rounding.
        hidden: FQNs of the hidden matrices.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        groups: Sequence[FSDPGroup],
        method: SyncMethod,
        *,
        scalars: Sequence[ScalarGradient] = (),
        order: IssueOrder | None = None,
        seed: int = 0,
        hidden: Container[str] = (),
    ) -> None:
        self.groups = groups
        self.method = method
        self._device_type = mesh.device_type
        self._scalars = scalars
        self._order = order
        self._state = BatchState.AGREED
        # `finish` counts the steps; a trainer that resumes sets the number of the next one.
        self.keys = RoundingKeys(seed)
        # What follows the optimizer's updates of the parameters
        self.updates = UpdateFollower()
        self.gradients = [GroupGradients(group, method.wire(group.wire)) for group in groups]
        # See [Note: order of streams].
        self._accumulating = new_stream(mesh.device_type)
        # None where no gradients cross the replicate axis.
        self.buckets: BucketQueue | None = None
        if method.crosses:
            group = own_replicate_group(mesh)
            replicated = ReplicatedModel(mesh, group, groups, self.keys, hidden)
            self.updates, reduction_for = method.start(replicated)
            if reduction_for is not None:
                self.buckets = BucketQueue(
                    group,
                    mesh.device_type,
                    self._accumulating,
                    self.gradients,
                    method.bucket_bytes,
                    reduction_for,
                )
        # The ranks that share the work of an update: equal replicas do it each, since what one
        # would send another crosses the slow network.
        self.update_mesh = mesh if method.splits_updates else without_replicas(mesh)
        averaged = mesh if method.replicas_equal else without_replicas(mesh)
        parameters = sum(len(group.parameters) for group in groups)
        self.agreement = UsedParameterAgreement(averaged, parameters, order)
        self._agrees_itself = True
        # Why this rank cannot continue after this global batch; empty when it can.
        self.fault = ""
        # The same of the global batch that ends, which the agreement tells the other ranks
        self._told_fault = ""
        for each in self.gradients:
            each.group.accumulate_on(self._accumulating)
            each.group.around_backward(
                functools.partial(self._before_reduction, each),
                functools.partial(self._after_reduction, each),
            )
            each.group.on_forward(each.count_forward)

    @property
    def pending(self) -> bool:
        """True if gradients were added that are not reduced over the replicas."""
        return self._state is BatchState.PENDING

    def count_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any ``optimizer``. The next agreement compares the counts of
        all ranks, because one that left out an update or a backward pass is out of step."""
        first = {id(group["params"][0]) for group in optimizer.param_groups if group["params"]}
        # Backward ends the groups in the reversed order.
        parameters = chain.from_iterable(group.parameters for group in reversed(self.groups))
        is_ours = any(id(updated_as(each.sharded)) in first for each in parameters)
        # Replicas of a job that tolerates their loss may join late or repeat a step.
        if is_ours and current() is None:
            self.agreement.updates += 1

    @property
    def has_run(self) -> bool:
        """True if there was a forward."""
        return any(parameter.has_run for group in self.groups for parameter in group.parameters)

    @property
    def awaits_backward(self) -> bool:
        """True if there was a forward whose backward pass is to come."""
        return any(each.forwards for each in self.gradients)

    # A backward pass

    def _before_reduction(self, gradients: GroupGradients) -> None:
        """Autograd has the group's gradients of this pass, and the shard axis will reduce them."""
        gradients.begin_reduction(self._crosses(gradients.group))
        self._state = BatchState.PENDING

    def _after_reduction(self, gradients: GroupGradients) -> None:
        """The group's sharded gradients have been accumulated."""
        crosses = self._crosses(gradients.group)
        gradients.end_reduction(crosses)
        if crosses and self.buckets is not None:
            self.buckets.start_final()

    def _crosses(self, group: FSDPGroup) -> bool:
        """True if the gradients of this pass are reduced over the replicas."""
        return self.buckets is not None and group.crosses_replicas

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        # Where the next forward is another method than the model's own; see
        # `GatheredParameters.begin`.
        torch.clear_autocast_cache()
        for each in self.gradients:
            each.end_backward()
        if any(group.crosses_replicas for group in self.groups):
            self.finish()

    # The end of a global batch

    def finish(self) -> None:
        """Reduces what is left, waits for all, and agrees on used parameters.

        Collective over the data ranks. Raises `ConfigError` on every rank when ranks of a shard
        group did not run the same groups, and when a gradient hook could not be called.
        """
        self.updates.check_attached()
        self._told_fault = self.fault or self._hook_never_called()
        self.fault = ""
        # Ranks that differ must stop here: the collectives below would never be answered.
        if self._order is not None:
            try:
                self._order.end_backward()
            except ConfigError as error:
                raise self.abandon(error) from None
        for each in self.gradients:
            each.reduce_rest()
        if self.buckets is not None:
            self.buckets.finish()
        self._join_streams()
        for each in self.gradients:
            each.complete()
        if self.buckets is not None:
            self.buckets.forget_buckets()
        self._state = BatchState.REDUCED
        self.keys.step += 1
        if self._agrees_itself:
            self._agree()

    def finish_without_backward(self) -> None:
        """As `finish`, of a global batch of which this replica has computed nothing: it gets the
        mean as the others do. Its gradients are zeros, or the mean of an earlier call."""
        # Until the agreement `reset` drops the gradients, which may be those of this rank only.
        self._state = BatchState.REDUCED
        for each in self.gradients:
            each.note_used()
            # They are called after the agreement, as after a backward pass.
            for parameter in each.group.trained:
                parameter.take_hooks()
                parameter.give_hooks_back()
        self.finish()

    def _join_streams(self) -> None:
        """Lets the current stream wait for the reduced gradients."""
        current = current_stream(self._device_type)
        current.wait_stream(self._accumulating)
        if self.buckets is not None:
            current.wait_stream(self.buckets.stream)

    def _hook_never_called(self) -> str:
        """The message for a hook of `register_hook`, which would never be called; or nothing."""
        for group in self.groups:
            for parameter in group.trained:
                if parameter.sharded._backward_hooks:
                    return (
                        f"register_hook was called on a parameter of {group.called} of shape "
                        f"{tuple(parameter.sharded.shape)}: autograd computes gradients of "
                        "gathered parameters and would never call it; use "
                        "register_post_accumulate_grad_hook"
                    )
        return ""

    # The agreement on used parameters

    @property
    def may_defer_agreement(self) -> bool:
        """True if the agreement can wait: no scalars are summed before, and all replicas agree."""
        return not self._scalars and self.method.replicas_equal

    def defer_agreement(self) -> None:
        """Leaves the agreement to the caller, who adds up `agreement_vector` over all ranks after
        each backward pass that ends a global batch, and passes the sum to `agree_on`. A caller
        whose tensors have no storage, and so no values to agree on, may omit it."""
        self._agrees_itself = False

    def agreement_vector(self) -> Tensor:
        """What this rank adds to the sum; see `UsedParameterAgreement.vector`."""
        used: list[bool] = []
        for each in self.gradients:
            used += each.used
        return self.agreement.vector(used, self._told_fault)

    def agree_on(self, summed: Tensor) -> None:
        """Removes the gradients of parameters that no rank used, and calls the hooks of the others.

        Hooks of `register_post_accumulate_grad_hook` may clip a gradient or make an update of its
        parameter, so they must see what the optimizer sees. torch would call them when a group's
        reduce-scatter has ended: before the reduction over replicas, in the dtype of sums, and for
        parameters that no rank used. `_before_reduction` takes them away meanwhile, and here, after
        all reductions and the agreement, they are called once for each parameter with a gradient,
        in the order of the groups on every rank.

        Raises `ConfigError` as `UsedParameterAgreement.used_in` does.
        """
        try:
            found = iter(self.agreement.used_in(summed, self._told_fault))
        except ConfigError:
            self.reset()
            raise
        for each in self.gradients:
            each.apply_used(list(islice(found, len(each.used))))
        self._state = BatchState.AGREED

    def _agree(self) -> None:
        """The agreement of a custom training loop. Collective over the data ranks."""
        vector = self.agreement_vector()
        summed, totals = self.agreement.sum_with(vector, self._scalars)
        self.agree_on(summed)
        self.agreement.set_means(totals, self._scalars)

    def abandon(self, error: ConfigError) -> BaseException:
        """Takes part in what the other ranks still do in this global batch, with zeros, so that
        none of them waits forever; returns the error that all ranks then raise."""
        # The trainer's agreement tells the others.
        if not self._agrees_itself:
            return error
        if self.buckets is not None:
            self.buckets.finish(with_zeros=True)
        self._told_fault = str(error)
        try:
            self._agree()
        except ConfigError as agreed:
            return agreed
        return error

    # Gradients that are dropped

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""
        self._clear(set_to_none)
        self.reset()

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind: sums that are not reduced over all
        data ranks."""
        # Reductions that were started write into gradients until they end.
        if self.buckets is not None:
            self.buckets.cancel()
        self._join_streams()
        # Before the agreement some gradients may be those of this rank alone.
        if self._state is not BatchState.AGREED:
            self._clear(set_to_none=True)
        self._state = BatchState.AGREED
        for each in self.gradients:
            each.reset()
        for scalar in self._scalars:
            scalar.discard()
            scalar.rest()

    def _clear(self, set_to_none: bool) -> None:
        for group in self.groups:
            group.clear_gradients(set_to_none)
        self.updates.clear_gradients(set_to_none)


GROUP_NAME = "gradients over replicas"


def own_replicate_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A process group over the replicas for one engine alone. Collective over the world.

    Collectives of an engine run asynchronously during a backward pass. In the mesh's own group,
    others that are started meanwhile could come between them, in another order on each rank.
    Returns the mesh's group where the mesh is not the whole world, because all ranks of the world
    would have to make the new one.
    """
    if mesh.size() != dist.get_world_size():
        return mesh.get_group("replicate")
    axis = axis_names(mesh).index("replicate")
    # One row for each group: the ranks that differ in the replicate axis alone.
    rows = mesh.mesh.movedim(axis, -1).reshape(-1, mesh_shape(mesh).replicate)
    own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), group_desc=GROUP_NAME)
    assert isinstance(own, dist.ProcessGroup)  # every rank is in one row
    inherit_timeout(own, mesh.device_type)
    return own


# An attribute of the model and no table beside it: the engine refers to the model's parameters, so
# that the garbage collector frees both together.
_ENGINE = "_parallel2d_engine"


def register_engine(model: nn.Module, engine: ReplicaReducer) -> None:
    """Makes ``engine`` that of ``model``."""
    vars(model)[_ENGINE] = engine


# An attribute of the parameters that an optimizer gets
_UPDATE_MESH = "_parallel2d_update_mesh"


def note_update_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lets `update_mesh_of` find the ``mesh`` of the parameters of ``model``."""
    for parameter in model.parameters():
        setattr(updated_as(parameter), _UPDATE_MESH, mesh)


def is_ours(parameters: Iterable[Tensor]) -> bool:
    """True if one of ``parameters`` is of a parallelized model, also a gathered one."""
    marks = (_UPDATE_MESH, GATHERED_AS)
    return any(hasattr(parameter, mark) for parameter in parameters for mark in marks)


def update_mesh_of(parameters: Iterable[Tensor]) -> DeviceMesh | None:
    """The ranks that make the same updates of ``parameters``; None where they are not those of a
    parallelized model. Raises `ConfigError` for those of several meshes, or of another library."""
    meshes: list[DeviceMesh | None] = []
    for parameter in parameters:
        meshes.append(getattr(parameter, _UPDATE_MESH, None))
        is_unknown = meshes[-1] is None and isinstance(parameter, DTensor)
        if is_unknown or meshes[-1] != meshes[0]:
            raise ConfigError(
                "an optimizer that needs whole matrices, such as muon, takes parameters of models "
                "from parallel2d.parallelize, and not those on several meshes: build one for each"
            )
    return meshes[0] if meshes else None


def engines_in(model: nn.Module) -> list[ReplicaReducer]:
    """The engines of ``model`` and of modules below it."""
    return [vars(module)[_ENGINE] for module in model.modules() if _ENGINE in vars(module)]


def engine_in(module: nn.Module) -> ReplicaReducer | None:
    """The engine of ``module``; None unless `parallel2d.parallelize` has made it."""
    return vars(module).get(_ENGINE)


def engine_of(model: nn.Module) -> ReplicaReducer:
    """The engine of a model from `parallel2d.parallelize`. Raises `ConfigError` for another."""
    found = engine_in(model)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} did not come from parallel2d.parallelize; give the model that "
            "it returned, not a module of it"
        )
    return found

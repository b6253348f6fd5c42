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

import functools
from collections.abc import Container, Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.base.device import new_stream
from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas import current
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.mesh import axis_names, inherit_timeout, mesh_shape, without_replicas
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.sync.engine.buckets import BucketQueue
from parallel2d.parallel.sync.engine.global_batch import (
    GlobalBatch,
    IssueOrder,
    ScalarGradient,
    UsedParameterAgreement,
)
from parallel2d.parallel.sync.engine.group_state import GroupState, cast_gradient, make_uniform
from parallel2d.parallel.sync.methods.method import ReplicatedModel, SyncMethod, UpdateFollower
from parallel2d.parallel.sync.wires.blocks import RoundingKeys


class ReplicaReducer:
    """The engine of one model; made by `parallel2d.parallelize`.

    ``groups``: in the order in which backward ends them. ``method``: what crosses the replicate
    axis. ``final_dtype``: of gradients once they are reduced, if not that in which they are added.
    ``scalars``: parameters that are whole on every rank. ``order``: None where nothing is gathered
    or reduced over the shard axis. ``seed``: of what is rounded at random on the way to other
    replicas. ``hidden``: FQNs of the hidden matrices. Collective over the world.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        groups: Sequence[FSDPGroup],
        method: SyncMethod,
        *,
        final_dtype: torch.dtype | None,
        scalars: Sequence[ScalarGradient] = (),
        order: IssueOrder | None = None,
        seed: int = 0,
        hidden: Container[str] = (),
    ) -> None:
        self.groups = groups
        self.method = method
        self._final_dtype = final_dtype
        self._order = order
        # `finish` counts the steps; a trainer that resumes sets the number of the next one.
        self.keys = RoundingKeys(seed)
        # What follows the optimizer's updates of the parameters
        self.updates = UpdateFollower()
        states = [GroupState(group, method.wire(group.wire)) for group in groups]
        # None where no gradients cross the replicate axis.
        buckets: BucketQueue | None = None
        # See [Note: order of streams].
        reduced = new_stream(mesh.device_type)
        for each in groups:
            each.accumulate_on(reduced)
        if method.crosses:
            group = own_replicate_group(mesh)
            replicated = ReplicatedModel(mesh, group, groups, self.keys, final_dtype, hidden)
            self.updates, reduction_for = method.start(replicated)
            if reduction_for is not None:
                buckets = BucketQueue(
                    group,
                    mesh.device_type,
                    reduced,
                    states,
                    method.bucket_bytes,
                    reduction_for,
                )
        clear_updated = self.updates.clear_gradients
        self.batch = GlobalBatch(mesh.device_type, reduced, states, scalars, buckets, clear_updated)
        # The ranks that share the work of an update: equal replicas do it each, since what one
        # would send another crosses the slow network.
        self.update_mesh = mesh if method.splits_updates else without_replicas(mesh)
        averaged = mesh if method.replicas_equal else without_replicas(mesh)
        self.agreement = UsedParameterAgreement(averaged, self.batch, order)
        # Why this rank cannot go on after this global batch; empty when it can.
        self.fault = ""
        for state in states:
            before = functools.partial(self._before_reduction, state)
            after = functools.partial(self._after_reduction, state)
            state.group.around_backward(before, after)
            state.group.on_forward(state.count_forward)

    @property
    def may_defer_agreement(self) -> bool:
        """Whether the agreement can wait: no scalars are summed before, and all replicas agree."""
        return not self.batch.scalars and self.method.replicas_equal

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

    def _before_reduction(self, state: GroupState) -> None:
        """Autograd has the group's gradients of this pass, and the shard axis will reduce them."""
        group = state.group
        any_gradient = state.start_reduction()
        self.batch.pending = True
        self.batch.agreed = False
        state.note_used()
        if not group.reduces_gradients:
            return
        trained = group.trained
        if self._final_dtype is not None:
            # Gradients of earlier backward passes have the final dtype; they are added to.
            for parameter in trained:
                cast_gradient(parameter, parameter.gradient_dtype)
        # Sums that stay on this replica are no means any more.
        if not group.crosses_replicas:
            state.averaged = False
        elif self.batch.buckets is not None:
            state.set_aside_means()
        # All ranks of a shard group run the same groups, so one that did not run here ran nowhere.
        group.fill_unused(any_gradient or state.forwards > 0)
        make_uniform(trained)
        # They are called after the agreement, when gradients are complete.
        for parameter in trained:
            parameter.take_hooks()

    def _after_reduction(self, state: GroupState) -> None:
        """The group's sharded gradients have been accumulated."""
        for parameter in state.group.trained:
            parameter.give_hooks_back()
        if self.batch.buckets is not None and state.group.crosses_replicas:
            # A group that ran twice is reduced twice. It is final at the end of the backward pass.
            state.final = state.forwards == 1 and not state.repeats
            self.batch.buckets.start_final()

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        crosses_replicas = any(group.crosses_replicas for group in self.groups)
        for state in self.batch.states:
            state.end_backward()
        if crosses_replicas:
            self.finish()

    def finish(self) -> None:
        """Reduces what is left, waits for all, and agrees on used parameters.

        Collective over the data ranks. Raises `ConfigError` on every rank when ranks of a shard
        group did not run the same groups, and when a gradient hook could not be called.
        """
        self.updates.check_attached()
        self.agreement.fault = self.fault or self._hook_never_called()
        self.fault = ""
        # Ranks that differ must stop here: the collectives below would never be answered.
        if self._order is not None:
            try:
                self._order.end_backward()
            except ConfigError as error:
                raise self.agreement.abandon(error) from None
        for state in self.batch.states:
            # Nothing is left after a backward pass that was set up as the last one.
            if state.has_whole_gradients:
                # This calls `_before_reduction` and `_after_reduction`, as a backward pass does.
                state.group.reduce_late()
                state.started = False
        if self.batch.buckets is not None:
            self.batch.buckets.finish()
        self.batch.join_streams()
        for state in self.batch.states:
            state.complete(self._final_dtype)
        # Only now: until here the gradients may be views of the buckets' memory.
        if self.batch.buckets is not None:
            self.batch.buckets.forget_buckets()
        self.batch.pending = False
        self.keys.step += 1
        if not self.agreement.deferred:
            self.agreement.agree()

    def finish_without_backward(self) -> None:
        """As `finish`, of a global batch of which this replica has computed nothing: it gets the
        mean as the others do. Its gradients are zeros, or the mean of an earlier call."""
        self.batch.agreed = False
        for state in self.batch.states:
            state.note_used()
            # They are called after the agreement, as after a backward pass.
            for parameter in state.group.trained:
                parameter.take_hooks()
                parameter.give_hooks_back()
        self.finish()

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


def engine_of(model: nn.Module) -> ReplicaReducer:
    """The engine of a model from `parallel2d.parallelize`. Raises `ConfigError` for another."""
    found: ReplicaReducer | None = vars(model).get(_ENGINE)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} did not come from parallel2d.parallelize; give the model that "
            "it returned, not a module of it"
        )
    return found

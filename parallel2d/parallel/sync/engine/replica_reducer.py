"""The engine that reduces sharded gradients over the replicate axis: `ReplicaReducer`.

[Note: owning the replicate axis] `fully_shard` reduces only over the shard axis. Once per global
batch the engine averages the sharded gradients of each group over the replicas. A parameter that a
replica did not use counts as a zero gradient, also if the last micro-batch of the replica skips the
whole group. Therefore the means are correct if replicas route data differently through the model.
FSDP2's second mesh axis (HSDP) is not correct in this case, because HSDP's partial sums over
micro-batches do not record the parameters of each sum.

The reductions start during the last backward pass (`buckets.py`). At the end of the pass the engine
waits for all reductions, so that after ``loss.backward()`` every ``.grad`` is the mean over all
data ranks. If ``.grad`` already contains the mean of an earlier backward pass, ``.grad`` becomes
the sum of both means. The earlier mean is equal on all replicas, so a second average does not
change this mean. Formats with rounding exclude the earlier mean from the second average. Finally
the ranks agree on the parameters that have a gradient; see [Note: unused parameters].

[Note: order of streams] Autograd computes unsharded gradients on the current stream. FSDP's
reduce-scatter stream waits for the current stream, and the engine's accumulation stream
(`FSDPGroup.accumulate_on`) waits for the reduce-scatter stream. On the accumulation stream FSDP
casts the result, creates its views and adds them to ``.grad``. When ``post_backward`` of a group
has returned on the host, all kernels that write the group's sharded gradients have been issued: on
the accumulation stream, or on the current stream if the shard axis has one rank. Before each
bucket, the stream of the buckets waits for the accumulation stream and for the current stream.
Therefore a bucket runs after the kernels that write its gradients. In `finish` the current stream,
on which the optimizer runs, waits for the stream of the buckets and for the accumulation stream.
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
from parallel2d.base.replicas import axis_options, current
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.fsdp_internals.tensors import GATHERED_AS
from parallel2d.parallel.mesh import axis_names, inherit_timeout, mesh_shape, without_replicas
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.sync.engine.buckets import BucketQueue, GroupGradients
from parallel2d.parallel.sync.engine.used_parameters import (
    IssueOrder,
    ScalarGradient,
    UsedParameters,
)
from parallel2d.parallel.sync.formats.quantize import RoundingKeys
from parallel2d.parallel.sync.methods.method import ReplicatedModel, SyncMethod, UpdateFollower
from parallel2d.parallel.weights.named_tensors import register_meeting


class BatchState(enum.Enum):
    """Progress of the gradients of a global batch."""

    # Some gradients are not reduced over the replicas yet.
    PENDING = enum.auto()
    # Gradients are means over all data ranks, but unused parameters may have zero gradients.
    REDUCED = enum.auto()
    # Ranks have agreed on the used parameters, so the optimizer may read gradients. AGREED is also
    # the initial state.
    AGREED = enum.auto()


class ReplicaReducer:
    """The engine of one model, built by `parallel2d.parallelize`. Collective over the world.

    During a backward pass the FSDP groups (`FSDPGroup`) call the engine by hooks. The engine owns
    one `GroupGradients` per group, the `BucketQueue` that reduces them, and the `UsedParameters`.
    These three do not call the engine.

    Args:
        mesh: the mesh of the parameters, from `sharding_mesh`.
        groups: the FSDP groups, in the order of their backward passes.
        method: synchronization method of the replicate axis.
        scalars: the parameters without dims or elements; see `parallelize.scalars`.
        order: checks the order of collectives over the shard axis; None: no check.
        seed: seed of stochastic rounding.
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
        self._has_replicas = mesh_shape(mesh).replicate > 1
        self._state = BatchState.AGREED
        # Keys of stochastic rounding. `finish` increments their step; a resumed trainer sets it.
        self.keys = RoundingKeys(seed)
        # Called before and after the updates of optimizers, for methods such as DiLoCo
        self.updates = UpdateFollower()
        self.gradients = [
            GroupGradients(group, method.format_for(group.communication_dtype)) for group in groups
        ]
        # See [Note: order of streams].
        self._accumulating = new_stream(mesh.device_type)
        # None if no gradients are reduced over the replicate axis
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
        # The ranks that divide the work of an update, such as Muon's. Replicas repeat the work
        # unless the method splits updates, because an exchange would cross the slow network.
        self.update_mesh = mesh if method.splits_updates else without_replicas(mesh)
        averaged = mesh if method.replicas_equal else without_replicas(mesh)
        parameters = sum(len(group.parameters) for group in groups)
        self.used_parameters = UsedParameters(averaged, parameters, order)
        self._reduces_status = True
        # Message of a fault that this rank has found in this global batch; empty: no fault
        self.fault = ""
        # The fault that the status all-reduce of this global batch sends to the other ranks
        self._sent_fault = ""
        for each in self.gradients:
            each.group.accumulate_on(self._accumulating)
            each.group.around_backward(
                functools.partial(self._before_reduction, each),
                functools.partial(self._after_reduction, each),
            )
            each.group.on_forward(each.count_forward)

    @property
    def pending(self) -> bool:
        """True if some gradients are not reduced over the replicas yet."""
        return self._state is BatchState.PENDING

    def count_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of ``optimizer``, before the step.

        The next status all-reduce compares the counts of all ranks, to find a rank that has omitted
        an update or a backward pass.
        """
        first = set()
        for group in optimizer.param_groups:
            if group["params"]:
                first.add(id(group["params"][0]))
        # Search from the end: the first parameters of the model are in the last groups.
        parameters = chain.from_iterable(group.parameters for group in reversed(self.groups))
        is_ours = any(id(updated_as(each.sharded)) in first for each in parameters)
        # With fault tolerance the counts may differ: a replica may join late or repeat a step.
        if is_ours and current() is None:
            self.used_parameters.updates += 1

    @property
    def has_run(self) -> bool:
        """True after the first forward."""
        return any(parameter.has_run for group in self.groups for parameter in group.parameters)

    @property
    def awaits_backward(self) -> bool:
        """True if a forward has run and its backward pass is pending."""
        return any(each.forwards for each in self.gradients)

    # A backward pass

    def _before_reduction(self, gradients: GroupGradients) -> None:
        """Called when autograd has computed the group's gradients, before the reduce-scatter."""
        gradients.begin_reduction(self._crosses(gradients.group))
        self._state = BatchState.PENDING

    def _after_reduction(self, gradients: GroupGradients) -> None:
        """Called when all kernels that write the group's sharded gradients have been issued."""
        crosses = self._crosses(gradients.group)
        gradients.end_reduction(crosses)
        if crosses and self.buckets is not None:
            self.buckets.start_final()

    def _crosses(self, group: FSDPGroup) -> bool:
        """Return True if this pass reduces the gradients over the replicas."""
        return self.buckets is not None and group.crosses_replicas

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        # `UnshardedParameters.begin` clears the cache before a forward, but it does not run if the
        # next forward starts in a method other than ``forward``.
        torch.clear_autocast_cache()
        for each in self.gradients:
            each.end_backward()
        if any(group.crosses_replicas for group in self.groups):
            self.finish()

    # The end of a global batch

    def finish(self) -> None:
        """Reduce the remaining gradients, wait for all reductions, and agree on used parameters.

        Collective over the data ranks. Raises `ConfigError` on every rank if ranks of a shard group
        did not run the same groups, or if a gradient hook could not be called.
        """
        self.updates.check_attached()
        self._sent_fault = self.fault or self._hook_never_called()
        self.fault = ""
        # If ranks of the shard group did not run the same groups, they must stop here: the
        # collectives below would be paired with other collectives, or would wait forever. `abandon`
        # then contributes zeros to the reductions over replicas, because other replicas may have
        # started them.
        if self._order is not None:
            try:
                self._order.end_backward()
            except ConfigError as error:
                raise self.abandon(error) from None
        # From here on all ranks run the same collectives in the same order: first reduce-scatters
        # of gradients from earlier passes, then the remaining buckets. `BucketQueue.finish` orders
        # only the stream of the buckets. `_join_streams` then makes the current stream wait, so
        # that `complete` may cast gradients and the optimizer may read them. The buckets are freed
        # after `complete`, because gradients may be views of their memory.
        for each in self.gradients:
            each.reduce_rest()
        for each in self.gradients:
            each.average_over_shards()
        if self.buckets is not None:
            self.buckets.finish()
        self._join_streams()
        for each in self.gradients:
            each.complete()
        if self.buckets is not None:
            self.buckets.forget_buckets()
        self._state = BatchState.REDUCED
        self.keys.step += 1
        if self._reduces_status:
            self._reduce_status()

    def finish_without_backward(self) -> None:
        """Finish a global batch in which this replica has no micro-batch.

        This replica contributes zeros, or the mean of an earlier call, and receives the mean like
        the other replicas.
        """
        # With this state an error before the status all-reduce makes `reset` clear the gradients,
        # which may not be reduced yet.
        self._state = BatchState.REDUCED
        for each in self.gradients:
            each.note_used()
            # As after a backward pass, the hooks run after the all-reduce of the step status.
            for parameter in each.group.trained:
                parameter.take_hooks()
                parameter.give_hooks_back()
        self.finish()

    def _join_streams(self) -> None:
        """Make the current stream wait for the reduced gradients."""
        current = current_stream(self._device_type)
        current.wait_stream(self._accumulating)
        if self.buckets is not None:
            current.wait_stream(self.buckets.stream)

    def _hook_never_called(self) -> str:
        """Return an error message if a parameter has a hook of `register_hook`; else "".

        Autograd would never call this hook.
        """
        for group in self.groups:
            for parameter in group.trained:
                if parameter.sharded._backward_hooks:
                    return (
                        f"register_hook was called on a parameter of {group.called} of shape "
                        f"{tuple(parameter.sharded.shape)}: autograd computes gradients of "
                        "unsharded parameters and would never call the hook; use "
                        "register_post_accumulate_grad_hook"
                    )
        return ""

    # The status all-reduce: used parameters and faults

    @property
    def may_defer_status(self) -> bool:
        """True if the caller may run the status all-reduce, as part of another all-reduce.

        The model must have no scalars, and the method must keep the replicas equal.
        """
        return not self._scalars and self.method.replicas_equal

    def defer_status(self) -> None:
        """Leave the status all-reduce to the caller.

        After each global batch the caller sums `status_vector` over all ranks and passes the sum to
        `apply_status`. A caller that uses fake tensors may omit both.
        """
        self._reduces_status = False

    def status_vector(self) -> Tensor:
        """Return this rank's vector for the status all-reduce; see `UsedParameters.vector`."""
        used: list[bool] = []
        for each in self.gradients:
            used += each.used
        return self.used_parameters.vector(used, self._sent_fault)

    def apply_status(self, summed: Tensor) -> None:
        """Remove gradients of parameters that no rank used, and call the hooks of all others.

        Hooks of `register_post_accumulate_grad_hook` may clip a gradient or update its parameter,
        so they must get the final gradient. FSDP would call them after the reduce-scatter of a
        group: before the reduction over replicas, in the accumulation dtype, and also for
        parameters that no rank used. Therefore `_before_reduction` removes the hooks from the
        parameters. This method calls them after all reductions, once for each parameter with a
        gradient, in the same order on every rank.

        ``summed`` is the sum of `status_vector` over all ranks. Raises `ConfigError` like
        `UsedParameters.used_in`.
        """
        try:
            found = iter(self.used_parameters.used_in(summed, self._sent_fault))
        except ConfigError:
            self.reset()
            raise
        for each in self.gradients:
            each.apply_used(list(islice(found, len(each.used))))
        self._state = BatchState.AGREED

    def _reduce_status(self) -> None:
        """Run the status all-reduce of a custom training loop. Collective over the data ranks."""
        vector = self.status_vector()
        summed, totals = self.used_parameters.sum_with(vector, self._scalars)
        self.apply_status(summed)
        self.used_parameters.set_means(totals, self._scalars)

    def abandon(self, error: ConfigError) -> BaseException:
        """Contribute zeros to the remaining reductions of this global batch.

        Otherwise other ranks would wait forever. Returns the error that all ranks raise.
        """
        # The trainer's status all-reduce reports the error to the other ranks.
        order = self._order
        if not self._reduces_status or (order is not None and not order.others_agree):
            return error
        try:
            if order is not None and order.differs_at_point:
                self.used_parameters.agree_outside_of_step(str(error))
            else:
                if self.buckets is not None:
                    self.buckets.finish(with_zeros=True)
                self._sent_fault = str(error)
                self._reduce_status()
        except ConfigError as agreed:
            self.reset()
            return agreed
        return error

    def meet(self, point: str) -> None:
        """Wait until all ranks have reached ``point`` of the script, outside of a step.

        Collective over the data ranks. Raises `ConfigError` on every rank if a rank is at another
        point.
        """
        if self._order is None:
            return
        try:
            self._order.meet(point)
        except ConfigError as error:
            raise self.abandon(error) from None
        # A trainer has its own status all-reduce in each step.
        if self._reduces_status and current() is None and self._has_replicas:
            self.used_parameters.agree_outside_of_step("")

    # Gradients that are discarded

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drop all gradients."""
        self._clear(set_to_none)
        self.reset()

    def reset(self) -> None:
        """Discard gradients of an interrupted global batch that are not reduced completely."""
        # Wait for started reductions first, because they write into gradients until they end.
        if self.buckets is not None:
            self.buckets.cancel()
        self._join_streams()
        # Before the status all-reduce some gradients may not be reduced yet.
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
    """Return a process group over the replicas for one engine. Collective over the world.

    An engine runs its collectives asynchronously during a backward pass. In the process group of
    the mesh, other collectives could come between them, in a different order on each rank.
    Therefore the engine gets a new group. If the mesh does not contain all ranks of the world, this
    function returns the group of the mesh, because `new_group` must be called on all ranks.
    """
    if mesh.size() != dist.get_world_size():
        return mesh.get_group("replicate")
    axis = axis_names(mesh).index("replicate")
    # Each row is a group: the ranks that differ only in their position on the replicate axis.
    rows = mesh.mesh.movedim(axis, -1).reshape(-1, mesh_shape(mesh).replicate)
    own, _ = dist.new_subgroups_by_enumeration(
        rows.tolist(), group_desc=GROUP_NAME, pg_options=axis_options()
    )
    assert isinstance(own, dist.ProcessGroup)  # every rank is in one row
    inherit_timeout(own, mesh.device_type)
    return own


# The engine is an attribute of the model. A global table would keep the model alive, because the
# engine refers to the model's parameters.
_ENGINE = "_parallel2d_engine"


def register_engine(model: nn.Module, engine: ReplicaReducer) -> None:
    """Register ``engine`` as the engine of ``model``."""
    vars(model)[_ENGINE] = engine
    register_meeting(model, engine.meet)


# Attribute of the parameters that an optimizer gets
_UPDATE_MESH = "_parallel2d_update_mesh"


def note_update_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Record ``mesh`` on the parameters of ``model`` for `update_mesh_of`."""
    for parameter in model.parameters():
        setattr(updated_as(parameter), _UPDATE_MESH, mesh)


def is_ours(parameters: Iterable[Tensor]) -> bool:
    """Return True if one of ``parameters`` is a sharded or unsharded parameter of a parallelized
    model."""
    marks = (_UPDATE_MESH, GATHERED_AS)
    return any(hasattr(parameter, mark) for parameter in parameters for mark in marks)


def update_mesh_of(parameters: Iterable[Tensor]) -> DeviceMesh | None:
    """Return the mesh of the ranks that divide the work of an update of ``parameters``.

    None for parameters outside of parallelized models. Raises `ConfigError` for parameters on
    several meshes, and for `DTensor`s of another library.
    """
    meshes: list[DeviceMesh | None] = []
    for parameter in parameters:
        meshes.append(getattr(parameter, _UPDATE_MESH, None))
        is_unknown = meshes[-1] is None and isinstance(parameter, DTensor)
        if is_unknown or meshes[-1] != meshes[0]:
            raise ConfigError(
                "an optimizer that needs whole matrices, such as muon, supports parameters of "
                "models from parallel2d.parallelize on one mesh: build one optimizer for each mesh"
            )
    return meshes[0] if meshes else None


def engines_in(model: nn.Module) -> list[ReplicaReducer]:
    """Return the engines of ``model`` and of modules below it."""
    found: list[ReplicaReducer] = []
    for module in model.modules():
        if _ENGINE in vars(module):
            found.append(vars(module)[_ENGINE])
    return found


def engine_in(module: nn.Module) -> ReplicaReducer | None:
    """Return the engine of ``module``; None if ``module`` was not passed to `parallelize`."""
    return vars(module).get(_ENGINE)


def engine_of(model: nn.Module) -> ReplicaReducer:
    """Return the engine of a parallelized model. Raise `ConfigError` for other models."""
    found = engine_in(model)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} did not come from parallel2d.parallelize; pass the model that "
            "it returned, not one of its modules"
        )
    return found

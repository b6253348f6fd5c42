"""What `fully_shard` keeps for a whole model, such as the order of its forwards, and settings for
which it has no public names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

# The tensors of an output on which torch puts its hooks. A public traversal such as `tree_leaves`
# does not enter the same containers.
from torch.distributed.fsdp._common_utils import collect_grad_tensors as collect_grad_tensors

# `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` are public and take these
# classes, which `torch.distributed.fsdp` does not export.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass: a forward that runs now is a
    recomputation of activations. torch has no public name for this."""
    # The number of the task that autograd runs in this thread; it has none outside of backward.
    return torch._C._current_graph_task_id() != -1


def saving_hooks() -> Any:
    """What changes the tensors that autograd saves, such as a checkpoint around what runs; None
    where nothing does. torch has no public name for this."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def state_of(module: nn.Module) -> FSDPState:
    """What `fully_shard` keeps for the group of modules that ``module`` is in."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def states(model: nn.Module) -> list[FSDPState]:
    """What `fully_shard` keeps for each group of modules that it was given, each once. It holds the
    groups of parameters, for which there is no public accessor."""
    found: dict[FSDPState, None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Modules that were given together have one state.
            found[module._get_fsdp_state()] = None
    return list(found)


def groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Torch's groups of parameters, each once, in the order of the modules that own them."""
    found: list[FSDPParamGroup] = []
    for state in states(model):
        # Empty where all parameters of a module are in groups inside it.
        found.extend(state._fsdp_param_groups)
    return found


def streams_of_collectives(model: nn.Module) -> list[torch.Stream]:
    """The streams in which torch gathers parameters and reduces gradients of ``model``; none before
    its first forward. There is no public accessor, and streams have no hooks."""
    found: dict[int, torch.Stream] = {}
    for state in states(model):
        context = state._comm_ctx
        if hasattr(context, "all_gather_stream"):
            for stream in (context.all_gather_stream, context.reduce_scatter_stream):
                found[id(stream)] = stream
    return list(found.values())


class RunningForward:
    """Whether a forward of one module runs now.

    Hooks of the module would miss those that begin in a method other than ``forward``
    (`torch.distributed.fsdp.register_fsdp_forward_method`).
    """

    def __init__(self, module: nn.Module) -> None:
        self._state = state_of(module)
        own = self._state._fsdp_param_groups
        # Of a group of several modules any one may run.
        self.is_alone = all(len(group.modules) == 1 for group in own)
        # Whether parameters are freed between forward and backward
        self.frees = any(group.post_forward_mesh_info for group in own)

    @property
    def now(self) -> bool:
        return self._state._training_state == TrainingState.FORWARD


def has_begun(model: nn.Module) -> bool:
    """Whether ``model``, or a model that it is a part of, has begun its first forward.

    torch makes the first module that is called the root, and has no public name for that.
    """
    # None until then, for all of its modules.
    return state_of(model)._is_root is not None


def was_interrupted(model: nn.Module) -> bool:
    """Whether an exception has ended a backward pass of ``model``: its last callback is still to
    come. torch has no public name for that."""
    return state_of(model)._state_ctx.post_backward_final_callback_queued


def reset_iteration(model: nn.Module) -> None:
    """Prepares ``model`` for its next forward after one that an exception interrupted. Does nothing
    for a part of a larger model.

    `FSDPModule.reset_iter_state` is public, and fails before the first forward. If it did nothing
    then, this function would be unnecessary.
    """
    assert isinstance(model, FSDPModule)
    # None before the first forward, False for a part of a larger model.
    if state_of(model)._is_root:
        model.reset_iter_state()


def set_asynchronous_gathers(model: nn.Module, enabled: bool) -> None:
    """Whether all-gathers that ``model`` issues return before they are done.

    On CPU, which has no streams, an all-gather that is issued early runs beside computation only in
    this way. There is no public name; pytorch pull request 135523 added the private one.
    """
    assert isinstance(model, FSDPModule)
    model._set_unshard_async_op(enabled)


def reduce_over_shard_alone(model: nn.Module, mesh: DeviceMesh) -> None:
    """Takes the replicate axis away from `fully_shard`; parameters stay placed on both axes.

    With it `fully_shard` keeps the partial sums of an accumulation as one flat buffer without the
    names of its parameters (`_partial_reduce_output`), so micro-batches that use different
    parameters are added into each other. A public way to shard on one axis of a mesh and keep the
    placements of both would make this unnecessary.
    """
    info = FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
    for group in groups(model):
        holders: list[Any] = [group, *group.fsdp_params]
        for holder in holders:
            # None where parameters stay gathered between forward and backward.
            if holder.post_forward_mesh_info is not None:
                holder.post_forward_mesh_info = info
            holder.mesh_info = info


def after_backward(model: nn.Module, callback: Callable[[], None]) -> None:
    """Calls ``callback`` at the end of every backward pass, after all groups have been reduced.

    torch queues such a callback itself, in the first hook of a backward; ours follows it.
    ``Variable._execution_engine.queue_callback``, the other way, is private too.
    """

    def followed(original: Callable[[], None]) -> Callable[[], None]:
        def final() -> None:
            original()
            callback()

        return final

    # The module that backward reaches first has its own state's callback queued.
    for state in states(model):
        original = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = followed(original)  # type: ignore[method-assign]


def prefetch_in_forward(module: nn.Module, later: Sequence[nn.Module]) -> None:
    """Has ``module`` gather, in forward, the parameters of the modules ``later`` too, but not while
    activations are recomputed.

    `FSDPModule.set_modules_to_forward_prefetch` would do if torch did not follow such chains in
    recomputation.
    """
    chain = _EmptyInBackward(state_of(other) for other in later)
    # torch goes through the chain when the parameters of `module` have been gathered.
    state_of(module)._states_to_forward_prefetch = chain


class _EmptyInBackward(list[FSDPState]):
    """A forward chain that is empty during backward. Recomputation runs forwards in backward, whose
    successors have been through backward already: gathering them again would be a collective for
    nothing."""

    def __iter__(self) -> Iterator[FSDPState]:
        if in_backward():
            return iter(())
        return super().__iter__()


class ForwardOrder:
    """The order in which the groups of ``model``, which is no part of a larger one, ended their
    forward, as torch records it in order to prefetch in backward.

    torch empties it at the end of the last backward pass of a global batch, but does not remove
    forwards without gradients from it. It has no public accessor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups = groups(model)

    @property
    def _record(self) -> list[FSDPParamGroup]:
        # Looked up each time: `torch.distributed.fsdp.share_comm_ctx` replaces the context.
        return state_of(self._model)._comm_ctx.post_forward_order

    def modules(self) -> list[tuple[nn.Module, ...]]:
        """The modules of each group. One that ran several times occurs as often, as the same
        tuple."""
        return [group.modules for group in self._record]

    def remove_finished(self) -> int:
        """Removes all forwards if torch expects no backward pass for any of them. Returns the
        number of those that are left."""
        record = self._record
        # torch keeps the positions of a group's forwards in the record until backward reaches them.
        if not any(group._post_forward_indices for group in self._groups):
            record.clear()
        return len(record)

    def shorten(self, length: int) -> None:
        """Removes all forwards but the first ``length``, and drops parameters that were gathered
        early and not used: the next forward would take them for current."""
        del self._record[length:]
        for group in self._groups:
            kept = [index for index in group._post_forward_indices if index < length]
            group._post_forward_indices = kept
            # An all-gather that was issued and that no forward has waited for.
            if group._all_gather_result is not None:
                group.wait_for_unshard()
                group._to_sharded()

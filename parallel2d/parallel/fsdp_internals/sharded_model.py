"""What `fully_shard` keeps for a whole model, and settings for which it has no public names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass: a forward that runs now is a
    recomputation of activations. torch has no public name for this."""
    # The number of the task that autograd runs in this thread; it has none outside of backward.
    return torch._C._current_graph_task_id() != -1


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


class RunningForward:
    """Whether a forward of one module runs now.

    Hooks of the module would miss those that begin in a method other than ``forward``
    (`torch.distributed.fsdp.register_fsdp_forward_method`).
    """

    def __init__(self, module: nn.Module) -> None:
        self._state = state_of(module)

    @property
    def now(self) -> bool:
        return self._state._training_state == TrainingState.FORWARD


def has_begun(model: nn.Module) -> bool:
    """Whether ``model``, or a model that it is a part of, has begun its first forward.

    torch makes the first module that is called the root, and has no public name for that.
    """
    # None until then, for all of its modules.
    return state_of(model)._is_root is not None


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
    """Takes the replicate axis away from the engine; parameters keep their placements on both axes.

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

    The engine queues such a callback itself, in the first hook of a backward; ours follows it.
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

"""What `fully_shard` keeps for a whole model, such as the order of its forwards, and settings for
which it has no public names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

# The tensors of an output on which torch puts its hooks. A public traversal such as `tree_leaves`
# does not enter the same containers.
from torch.distributed.fsdp._common_utils import collect_grad_tensors as collect_grad_tensors
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
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


def states(model: nn.Module) -> dict[FSDPState, list[nn.Module]]:
    """Return what `fully_shard` keeps for each group of modules that it was given together, and
    these modules. It holds the groups of parameters, for which there is no public accessor."""
    found: dict[FSDPState, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found.setdefault(module._get_fsdp_state(), []).append(module)
    return found


def groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Torch's groups of parameters, each once, in the order of the modules that own them."""
    found: list[FSDPParamGroup] = []
    for state in states(model):
        # Empty where all parameters of a module are in groups inside it.
        found.extend(state._fsdp_param_groups)
    return found


def module_groups(model: nn.Module) -> list[list[Any]]:
    """Return the modules whose parameters are gathered together, by group."""
    return [modules for state, modules in states(model).items() if state._fsdp_param_groups]


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


def set_asynchronous_gathers(model: nn.Module, enabled: bool) -> None:
    """Whether all-gathers that ``model`` issues return before they are done.

    On CPU, which has no streams, an all-gather that is issued early runs beside computation only in
    this way. There is no public name; pytorch pull request 135523 added the private one.
    """
    assert isinstance(model, FSDPModule)
    model._set_unshard_async_op(enabled)


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

"""State of `fully_shard` for a model, such as a running forward, and settings without a public
name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils.module_tracker import ModuleTracker

_tracker = ModuleTracker()


def in_backward() -> bool:
    """Return True inside a backward pass of this thread.

    A forward that runs inside a backward pass is a recomputation by activation checkpointing.
    """
    is_backward: bool = _tracker.is_bw
    return is_backward


def saving_hooks() -> Any:
    """Return the active saved-tensors hooks, for example of a checkpoint; None without hooks.

    torch has no public name for this.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def state_of(module: nn.Module) -> FSDPState:
    """Return the FSDP state of ``module``, which modules of one FSDP group share."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def states(model: nn.Module) -> dict[FSDPState, list[nn.Module]]:
    """Map each FSDP state of ``model`` to the modules that were given to `fully_shard` together.

    The parameter groups of a state have no public accessor.
    """
    found: dict[FSDPState, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found.setdefault(module._get_fsdp_state(), []).append(module)
    return found


def groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Return FSDP's parameter groups, each once, in the order of the modules that own them."""
    found: list[FSDPParamGroup] = []
    for state in states(model):
        # The list is empty if all parameters of a module belong to groups inside of the module.
        found.extend(state._fsdp_param_groups)
    return found


def module_groups(model: nn.Module) -> list[list[Any]]:
    """Return the modules of each FSDP group with parameters."""
    return [modules for state, modules in states(model).items() if state._fsdp_param_groups]


def streams_of_collectives(model: nn.Module) -> list[torch.Stream]:
    """Return the all-gather and reduce-scatter streams of ``model``; none before its first forward.

    torch has no public accessor, and streams have no hooks.
    """
    found: dict[int, torch.Stream] = {}
    for state in states(model):
        context = state._comm_ctx
        if hasattr(context, "all_gather_stream"):
            for stream in (context.all_gather_stream, context.reduce_scatter_stream):
                found[id(stream)] = stream
    return list(found.values())


def runs_forward(module: nn.Module) -> bool:
    """Return True during a forward of ``module`` or of another module of its FSDP group.

    The result is also True for forwards that start in a method of
    `torch.distributed.fsdp.register_fsdp_forward_method`, for which module hooks do not run.
    """
    return state_of(module)._training_state == TrainingState.FORWARD


def was_interrupted(model: nn.Module) -> bool:
    """Return True if an exception has ended a backward pass of ``model``.

    FSDP's flag for its final callback is still set in this case. torch has no public name for it.
    """
    return state_of(model)._state_ctx.post_backward_final_callback_queued


def set_asynchronous_gathers(model: nn.Module, enabled: bool) -> None:
    """Choose whether the all-gathers of ``model`` return before they finish.

    CPU has no streams, so a prefetched all-gather overlaps with computation only if it returns
    early. torch has no public method for this; pytorch pull request 135523 added the private one.
    """
    assert isinstance(model, FSDPModule)
    model._set_unshard_async_op(enabled)


def after_backward(model: nn.Module, callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of every backward pass, after all groups are reduced.

    FSDP queues a final callback in the first hook of a backward pass. This callback makes the
    current stream wait for FSDP's reductions. ``callback`` runs after it, so that its work on the
    current stream comes after the reductions. The alternative,
    ``Variable._execution_engine.queue_callback``, is also private.
    """

    def followed(original: Callable[[], None]) -> Callable[[], None]:
        def final() -> None:
            original()
            callback()

        return final

    # Wrap the callback of every state, because torch queues only the callback of the state that
    # backward reaches first.
    for state in states(model):
        original = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = followed(original)  # type: ignore[method-assign]

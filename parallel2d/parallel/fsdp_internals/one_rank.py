"""What torch does by copies where the shard axis has one rank, without them: gathered parameters
are the memory of the sharded ones, and whole gradients become those of the sharded parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    TrainingState,
    _disable_functorch_if_active,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from parallel2d.parallel.fsdp_internals.group_watch import is_gathered_as_stored, part_of


def is_alone(group: FSDPParamGroup) -> bool:
    """Whether the shard axis has one rank, and gradients stay where they are."""
    is_offloaded = any(each.offload_to_cpu for each in group.fsdp_params)
    return group._reduce_scatter_process_group.size() == 1 and not is_offloaded


def show_sharded(group: FSDPParamGroup, moved: Callable[[], None]) -> None:
    """Where ``group`` is alone and nothing is cast, has whole parameters show the memory of the
    sharded ones. ``moved``: called when they did not before."""
    if not is_alone(group):
        return
    copy = group.wait_for_unshard

    @_disable_functorch_if_active
    def wait_for_unshard() -> None:
        # As in torch's, nothing was asked for.
        if group._all_gather_result is None:
            return
        # Known since the first forward.
        if not all(map(is_gathered_as_stored, group.fsdp_params)):
            copy()
            return
        shown = [_show(parameter) for parameter in group.fsdp_params]
        if any(shown):
            moved()
        group._to_unsharded()
        group._all_gather_result = None

    group.wait_for_unshard = wait_for_unshard  # type: ignore[method-assign]


def _show(parameter: FSDPParam) -> bool:
    """Makes the whole parameter show the memory of the sharded one; whether it did not before."""
    stored = parameter._sharded_param_data
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is not None and part_of(whole).data_ptr() == stored.data_ptr():
        return False
    # A storage and a version of its own tell it from the sharded one. Fake tensors have no memory.
    alias = stored.data if isinstance(stored, FakeTensor) else torch.from_dlpack(stored.detach())
    if whole is not None:
        part_of(whole).data = alias.view(part_of(whole).shape)
        return True
    parameter.all_gather_outputs = [alias]
    with torch.no_grad():
        parameter.init_unsharded_param()
    # torch frees what is in this list where it lets go of whole parameters.
    parameter.all_gather_outputs = []
    return True


def take_whole_gradients(group: FSDPParamGroup) -> None:
    """Makes the whole gradients those of the sharded parameters, as torch's ``post_backward`` does
    by two copies of them."""
    group._training_state = TrainingState.POST_BACKWARD
    taken: list[tuple[FSDPParam, Tensor]] = []
    for parameter in group.fsdp_params:
        gradient = _whole_gradient(parameter, group.reduce_scatter_unused_params)
        if gradient is not None:
            taken.append((parameter, gradient))
    if group.reshard_after_backward:
        group.reshard()
    for parameter, gradient in taken:
        # In the dtype in which it would be sent, then in that in which gradients are added
        local = gradient.to(group._reduce_dtype or gradient.dtype).to(group._orig_dtype)
        total = parameter.sharded_param.grad
        if total is None:
            parameter.sharded_param.grad = parameter.to_sharded_dtensor(local.contiguous())
        else:
            part_of(total).add_(local)


def _whole_gradient(parameter: FSDPParam, zeros: bool) -> Tensor | None:
    """Takes out the gradient that autograd has left, with sums of earlier passes. ``zeros``: in
    the place of one that is missing."""
    # A group that never ran has no whole parameters.
    if not hasattr(parameter, "_unsharded_param"):
        return None
    parameter.accumulate_unsharded_grad_if_needed()
    if parameter.unsharded_accumulated_grad is not None:
        gradient = parameter.unsharded_accumulated_grad_data
        parameter.unsharded_accumulated_grad = None
    elif parameter.unsharded_param.grad is not None:
        gradient = parameter.unsharded_grad_data
        parameter.unsharded_param.grad = None
    elif zeros and parameter.unsharded_param.requires_grad:
        gradient = parameter.unsharded_zero_grad_data
    else:
        return None
    return gradient

"""Tensors of a sharded model: their local shards, their storages and their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

# Attribute of the parameters of a sharded model, and of the parameters they replaced: the name
SHARDED_AS = "_parallel2d_sharded_as"
# Attribute of unsharded parameters: the name of the parameter
GATHERED_AS = "_parallel2d_gathered_as"

# Attributes of a `DTensor` are read four times as fast inside. torch has no public equivalent.
quick_reads = torch._C.DisableTorchFunctionSubclass


def part_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a `DTensor`, outside of autograd, or any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: Tensor) -> int | None:
    """Return the number of the storage of ``tensor``, also on meta and after it was freed.

    None for tensors without storage, such as sparse tensors.
    """
    try:
        # torch keeps one Python object for a storage while the storage lives.
        return id(part_of(tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def storage_object(parameter: Tensor) -> torch.UntypedStorage:
    """Return the storage object of ``parameter``, for a `DTensor` one without memory.

    It is another object after ``parameter.data = tensor``, where torch has no hook.
    """
    with quick_reads():
        return parameter.untyped_storage()


def is_copied_view(tensor: DTensor) -> bool:
    """Return True for a view that copies other ranks' shards: writes to this view are lost."""
    base = tensor._base
    return isinstance(base, DTensor) and storage_of(tensor) != storage_of(base)


def version_of(tensor: Tensor) -> int:
    """Return autograd's count of in-place changes; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def is_differentiated_forward(inputs: Any, frees: bool) -> bool:
    """Return True for inputs with a forward-mode derivative that sharded modules do not support.

    The hooks of `fully_shard` would lose the derivative, or the backward pass of the derivative
    would find no parameters if the module ``frees`` them after forward. torch has no public name
    for running transforms of torch.func.
    """
    if not torch.is_grad_enabled():
        return False
    duals = []
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None:
            duals.append(leaf)
    # torch.func.jvp also uses dual tensors, but its backward pass runs through the hooks.
    if not duals or torch._C._functorch.maybe_current_level() is not None:
        return False
    return any(frees or each.requires_grad for each in duals)

"""Tensors of a sharded model: their local shards, their storages and their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

# Attribute with the name of the parameter, on sharded parameters and on the original parameters
SHARDED_AS = "_parallel2d_sharded_as"
# Attribute with the name of the parameter, on unsharded parameters
GATHERED_AS = "_parallel2d_gathered_as"

# Context in which attributes of a `DTensor` are read four times as fast. torch has no public name.
quick_reads = torch._C.DisableTorchFunctionSubclass


def part_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a `DTensor`, without autograd, or another tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: Tensor) -> int | None:
    """Return a number that identifies the storage of ``tensor``, also on meta and after a free.

    None for tensors without storage, such as sparse tensors.
    """
    try:
        # torch uses the same Python object for a storage as long as the storage exists.
        return id(part_of(tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def storage_object(parameter: Tensor) -> torch.UntypedStorage:
    """Return the storage object of ``parameter``. That of a `DTensor` has no memory.

    ``parameter.data = tensor`` changes this object; torch has no hook for the assignment.
    """
    with quick_reads():
        return parameter.untyped_storage()


def is_copied_view(tensor: DTensor) -> bool:
    """Return True for a view that `DTensor` has made by a copy, so that writes to it are lost."""
    base = tensor._base
    return isinstance(base, DTensor) and storage_of(tensor) != storage_of(base)


def version_of(tensor: Tensor) -> int:
    """Return autograd's version counter of ``tensor``; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def is_differentiated_forward(inputs: Any, frees: bool) -> bool:
    """Return True for inputs with a forward-mode derivative that sharded modules do not support.

    The hooks of `fully_shard` would lose the derivative of an input that requires grad. If the
    module ``frees`` its parameters after forward, backward of the derivative would not find them.
    torch has no public name for running transforms of torch.func.
    """
    if not torch.is_grad_enabled():
        return False
    duals = []
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None:
            duals.append(leaf)
    # torch.func.jvp also uses dual tensors, but it is supported.
    if not duals or torch._C._functorch.maybe_current_level() is not None:
        return False
    return any(frees or each.requires_grad for each in duals)

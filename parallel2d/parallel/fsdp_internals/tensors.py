"""Tensors of a sharded model: their parts, their memory, and the names that they carry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

# An attribute of the parameters of a sharded model, and of those they have replaced: the name
SHARDED_AS = "_parallel2d_sharded_as"
# An attribute of gathered parameters: the name of the parameter
GATHERED_AS = "_parallel2d_gathered_as"

# Inside, attributes of a `DTensor` are read four times as fast. torch has no public one.
quick_reads = torch._C.DisableTorchFunctionSubclass


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part of a `DTensor`, unknown to autograd; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: Tensor) -> int | None:
    """The number of the memory that ``tensor`` is a view of, also on meta and once it is freed;
    None where there is none, as for sparse ones. torch has no public identity of a storage."""
    try:
        return part_of(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def identity_of(parameter: Tensor) -> int:
    """A number that ``parameter.data = tensor`` changes. torch has no hook there."""
    with quick_reads():
        return parameter.untyped_storage()._cdata


def is_copied_view(tensor: DTensor) -> bool:
    """True for a view that needed other ranks' parts: values that are written to it are lost."""
    base = tensor._base
    return isinstance(base, DTensor) and storage_of(tensor) != storage_of(base)


def version_of(tensor: Tensor) -> int:
    """The number of changes in place that autograd has counted. 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def is_differentiated_forward(inputs: Any, frees: bool) -> bool:
    """True if ``inputs`` of a module carry a forward-mode derivative that would be lost in the
    hooks of `fully_shard`, or whose backward pass would find no parameters where the module
    ``frees`` them after forward. torch has no public name for whether there are any."""
    if forward_ad._current_level < 0 or not torch.is_grad_enabled():
        return False
    # torch.func.jvp uses the same numbers, and its backward pass goes through the hooks.
    if torch._C._functorch.maybe_current_level() is not None:
        return False
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    duals = [each for each in tensors if forward_ad.unpack_dual(each).tangent is not None]
    return any(frees or each.requires_grad for each in duals)

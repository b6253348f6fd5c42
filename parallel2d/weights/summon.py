"""Whole parameters for a moment: `summon_full_params` and `apply_full`, to look at or change what
is sharded.

A parallelized model flows in; inside the context its parameters are plain whole tensors, afterwards
they are sharded again, with the changes where they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallel2d.errors import ConfigError
from parallel2d.model_structure import canonical_name
from parallel2d.weights.geometry import copy_slice
from parallel2d.weights.scatter import scatter_tensor


@contextmanager
def summon_full_params(
    model: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside, the parameters of ``model``, a parallelized model or a module of one, are whole plain
    tensors. Collective.

    Args:
        recurse: also those of submodules; False: only those that ``model`` owns itself.
        writeback: changes made inside are kept, each rank's part of its own copy (they must be
            equal on all ranks); with ``rank0_only`` those of rank 0, sent to the others. False:
            they are dropped.
        rank0_only: other ranks keep their sharded parameters and pay the memory of one whole
            parameter, while it is gathered.
        offload_to_cpu: whole tensors are moved to CPU memory one by one.
        with_grads: ``.grad`` is whole as well, and written back like the parameters.

    Call neither forward nor backward inside: the hooks expect sharded parameters. Memory: the whole
    parameters (and gradients) of what is summoned. Raises `ConfigError` inside another such context
    on the same parameters.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    sharded: dict[int, nn.Parameter] = {}
    for module in model.modules() if recurse else [model]:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if hasattr(parameter, _MARK):
                raise ConfigError(
                    f"summon_full_params: {name} of {type(module).__name__} is whole already, in "
                    "an outer context"
                )
            places.setdefault(id(parameter), []).append((module, name))
            sharded[id(parameter)] = parameter
    keep = not rank0_only or dist.get_rank() == 0
    whole: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for key, parameter in sharded.items():
            full = _gather(parameter, keep, offload_to_cpu)
            gradient = (
                _gather(parameter.grad, keep, offload_to_cpu)
                if with_grads and parameter.grad is not None
                else None
            )
            if full is not None:
                whole[key] = nn.Parameter(full, parameter.requires_grad)
                setattr(whole[key], _MARK, True)
                if gradient is not None:
                    if gradient.dtype != full.dtype:
                        whole[key].grad_dtype = gradient.dtype
                    whole[key].grad = gradient
        for key, parameter in whole.items():
            for module, name in places[key]:
                module._parameters[name] = parameter
    try:
        yield
    finally:
        for key, parameter in sharded.items():
            for module, name in places[key]:
                module._parameters[name] = parameter
        if writeback:
            for key, parameter in sharded.items():
                changed = whole.get(key)
                _write(parameter, changed.detach() if changed is not None else None, rank0_only)
                if with_grads and parameter.grad is not None:
                    _write(
                        parameter.grad, changed.grad if changed is not None else None, rank0_only
                    )


def apply_full(model: nn.Module, function: Callable[[nn.Module], object]) -> nn.Module:
    """``model.apply(function)`` with whole parameters: children first, one module's own parameters
    at a time. Collective.

    ``function(module)`` sees the parameters that ``module`` owns itself as plain whole tensors,
    those below it sharded. It must do the same on every rank, random numbers included; each rank
    keeps its part of its own result. Memory: the parameters of the module that owns most. Returns
    ``model``.
    """
    for child in model.children():
        apply_full(child, function)
    with summon_full_params(model, recurse=False):
        function(model)
    return model


def sharded_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(canonical name, module) of the modules with a hook that gathers parameters, ``model`` itself
    (name ``""``) included.

    One per bucket, and one per module of a bucket of several. The order is that of
    ``named_modules``.
    """
    found: list[tuple[str, nn.Module]] = [
        (canonical_name(name), module) for name, module in model.named_modules()
    ]
    return [(name, module) for name, module in found if isinstance(module, FSDPModule)]


_MARK = "_summoned_whole"


def _gather(tensor: Tensor, keep: bool, offload: bool) -> Tensor | None:
    full = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
    if not keep:
        return None
    moved = full.cpu() if offload else full
    # With one rank, or unsharded, "whole" may be the parameter's own storage, in which a change
    # could not be dropped.
    return moved.clone() if moved.untyped_storage().data_ptr() == _storage(tensor) else moved


def _storage(tensor: Tensor) -> int:
    local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


@torch.no_grad()
def _write(sharded: Tensor, whole: Tensor | None, from_rank0: bool) -> None:
    if from_rank0:
        scatter_tensor(sharded, whole if dist.get_rank() == 0 else None, 0)
    else:
        assert whole is not None
        copy_slice(sharded, whole)

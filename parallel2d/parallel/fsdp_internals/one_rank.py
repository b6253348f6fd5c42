"""Gathered parameters that are the memory of the sharded ones, because the shard axis has one rank.
torch would copy them, and keep both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from parallel2d.parallel.fsdp_internals.tensors import part_of


def share_memory(
    group: FSDPParamGroup, computes_in: torch.dtype, moved: Callable[[], None]
) -> None:
    """Let the whole parameters of ``group`` show the memory of the sharded ones, where nothing is
    cast to ``computes_in``. ``moved``: called when they did not before."""
    copy = group.wait_for_unshard

    # torch calls this where parameters must be there, and its ``unshard``, which gathers nothing
    # for one rank, also long before, or in vain.
    def wait_for_unshard() -> None:
        hidden = [parameter for parameter in group.fsdp_params if not _is_shown(parameter)]
        if not all(_is_stored_in(each.sharded_param, computes_in) for each in hidden):
            copy()
            return
        for parameter in hidden:
            _show(parameter)
        if hidden:
            moved()
        group._to_unsharded()
        group._all_gather_result = None

    group.wait_for_unshard = wait_for_unshard  # type: ignore[method-assign]


def _is_stored_in(sharded: nn.Parameter, dtype: torch.dtype) -> bool:
    """True if ``sharded`` need not be cast, and has no all-gather of its own class of tensors."""
    is_cast = sharded.is_floating_point() and sharded.dtype != dtype
    return not is_cast and not hasattr(part_of(sharded), "fsdp_pre_all_gather")


def _is_shown(parameter: FSDPParam) -> bool:
    """True if the whole parameter shows the memory of the sharded one."""
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is None:
        return False
    return part_of(whole).data_ptr() == part_of(parameter.sharded_param).data_ptr()


def _show(parameter: FSDPParam) -> None:
    """Make the whole parameter show the memory of the sharded one."""
    stored = part_of(parameter.sharded_param)
    whole = getattr(parameter, "_unsharded_param", None)
    # A storage and a version of its own tell it from the sharded one. Fake tensors have no memory.
    alias = stored.data if isinstance(stored, FakeTensor) else torch.from_dlpack(stored.detach())
    if whole is not None:
        part_of(whole).data = alias
        return
    with torch.no_grad():
        shown = _over_tensor_axis(alias, parameter.sharded_param)
    parameter._unsharded_param = nn.Parameter(shown, parameter.sharded_param.requires_grad)


def _over_tensor_axis(local: Tensor, sharded: Tensor) -> Tensor:
    """``local`` as it is placed over the tensor axis, which is the last one of ``sharded``."""
    assert isinstance(sharded, DTensor)
    mesh = sharded.device_mesh
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return local
    return DTensor.from_local(
        local,
        mesh["tensor"],
        sharded.placements[-1:],
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )

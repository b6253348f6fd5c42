"""Make unsharded parameters aliases of the sharded parameters, on a mesh of one rank.

Without these aliases, FSDP copies the parameters in each all-gather.
"""

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
    """Make the unsharded parameters of ``group`` aliases of the sharded parameters.

    Args:
        group: an FSDP group on a mesh of one rank.
        computes_in: dtype of the forward pass. FSDP still copies parameters with another dtype.
        moved: called after the memory of an unsharded parameter has changed.
    """
    copy = group.wait_for_unshard

    # Replace `wait_for_unshard` and not `unshard`: FSDP calls `wait_for_unshard` directly before
    # the parameters are used, and `unshard` also for a prefetch without a use.
    def wait_for_unshard() -> None:
        hidden = []
        for parameter in group.fsdp_params:
            if not _is_shown(parameter):
                hidden.append(parameter)
        if not all(_is_stored_in(each.sharded_param, computes_in) for each in hidden):
            copy()
            return
        for parameter in hidden:
            _show(parameter)
        if hidden:
            moved()
        group._to_unsharded()

    group.wait_for_unshard = wait_for_unshard  # type: ignore[method-assign]


def _is_stored_in(sharded: nn.Parameter, dtype: torch.dtype) -> bool:
    """Return True if ``sharded`` needs no cast and has no custom all-gather."""
    is_cast = sharded.is_floating_point() and sharded.dtype != dtype
    return not is_cast and not hasattr(part_of(sharded), "fsdp_pre_all_gather")


def _is_shown(parameter: FSDPParam) -> bool:
    """True if the unsharded parameter is an alias of the sharded parameter."""
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is None:
        return False
    return part_of(whole).data_ptr() == part_of(parameter.sharded_param).data_ptr()


def _show(parameter: FSDPParam) -> None:
    """Make the unsharded parameter an alias of the sharded parameter."""
    stored = part_of(parameter.sharded_param)
    whole = getattr(parameter, "_unsharded_param", None)
    # `from_dlpack` makes an alias with a separate storage object and version counter, by which
    # autograd and the script checks distinguish it from the sharded parameter. Fake tensors do not
    # support it.
    alias = stored.data if isinstance(stored, FakeTensor) else torch.from_dlpack(stored.detach())
    if whole is not None:
        part_of(whole).data = alias
        return
    with torch.no_grad():
        shown = _over_tensor_axis(alias, parameter.sharded_param)
    parameter._unsharded_param = nn.Parameter(shown, parameter.sharded_param.requires_grad)


def _over_tensor_axis(local: Tensor, sharded: Tensor) -> Tensor:
    """Return ``local`` with its placement on the tensor axis, the last axis of ``sharded``."""
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

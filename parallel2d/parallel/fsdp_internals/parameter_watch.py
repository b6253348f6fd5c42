"""What shows that a script has written to one gathered parameter, or put another tensor in its
place: `ParameterWatch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor

# An attribute of gathered parameters: the name of the parameter
GATHERED = "_parallel2d_gathered"


def storage_of(tensor: Tensor) -> int | None:
    """The number of the memory that ``tensor`` is a view of; equal for all its views, on meta too.
    None for tensors without one, such as sparse ones. torch has no public identity of a storage:
    its address is zero on meta and where the memory is freed."""
    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    try:
        return inner.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


class ParameterWatch:
    """Compares one parameter with what it was at the call before. ``storages``: by number the name
    of each gathered parameter, to which this one is added."""

    def __init__(self, parameter: FSDPParam, name: str, storages: dict[int, str]) -> None:
        self.name = name
        self._parameter = parameter
        self._storages = storages
        info = parameter._module_info
        self.places = [(info.module, info.param_name)]
        self.places += zip(info.shared_modules, info.shared_param_names, strict=True)
        sharded = self._sharded
        self._version = sharded._version
        self._wrapper = sharded.untyped_storage()._cdata
        self._local = sharded._local_tensor  # type: ignore[attr-defined]
        self._whole_version = 0
        self._whole_storage: int | None = None

    @property
    def whole(self) -> nn.Parameter | None:
        """None before the first forward."""
        return getattr(self._parameter, "_unsharded_param", None)

    @property
    def _sharded(self) -> nn.Parameter:
        # torch takes over what allocation has replaced in the first forward.
        if self.whole is None:
            module, attribute = self.places[0]
            found = getattr(module, attribute)
            if isinstance(found, DTensor):
                return found  # type: ignore[return-value]
        return self._parameter.sharded_param

    @property
    def registered(self) -> nn.Parameter:
        """The one that torch's engine has put into the modules."""
        parameter = self._parameter
        if parameter.sharded_state == ShardedState.UNSHARDED:
            return parameter._unsharded_param
        return parameter.sharded_param

    def reassigned(self) -> bool:
        """Whether ``.data`` of the sharded parameter was set, which reaches neither this rank's
        part nor torch's engine, since the last call."""
        sharded = self._sharded
        wrapper, local = sharded.untyped_storage()._cdata, sharded._local_tensor  # type: ignore[attr-defined]
        # Conversions and loading replace both.
        changed = wrapper != self._wrapper and local is self._local
        self._wrapper, self._local = wrapper, local
        return changed

    def updated(self) -> bool:
        """Whether the sharded parameter was changed since the last call."""
        version = self._parameter.sharded_param._version
        changed = version != self._version
        self._version = version
        return changed

    def remember(self) -> None:
        """Takes down what the gathered parameter is, which later gathers do not change."""
        whole = self.whole
        assert whole is not None
        setattr(whole, GATHERED, self.name)
        self._whole_version = _version_of(whole)
        self._whole_storage = storage_of(whole)
        if self._whole_storage is not None:
            self._storages[self._whole_storage] = self.name

    def invalidate(self) -> None:
        """Lets autograd raise its own error where a backward needs the values of before."""
        whole = self.whole
        if whole is not None and not whole.is_inference():
            torch.autograd.graph.increment_version(whole)
            self._whole_version += 1

    def written(self) -> bool:
        """Whether the gathered parameter was written to in place, or its ``.data`` were set."""
        whole = self.whole
        assert whole is not None
        if _version_of(whole) != self._whole_version:
            return True
        return storage_of(whole) != self._whole_storage

    def differs(self) -> bool:
        """Whether this rank's part of the gathered parameter has other bits than its shard. Shows
        writes through ``.data``, which count nowhere."""
        parameter = self._parameter
        whole = parameter._unsharded_param
        local = whole._local_tensor if isinstance(whole, DTensor) else whole.detach()
        shard = parameter._sharded_local_tensor.detach()
        begin = parameter.mesh_info.shard_mesh_rank * parameter.padded_sharded_param_size.numel()
        gathered = local.reshape(-1)[begin : begin + shard.numel()]
        own = shard.reshape(-1).to(gathered.device, gathered.dtype)
        return not torch.equal(gathered.view(torch.uint8), own.view(torch.uint8))


def _version_of(tensor: Tensor) -> int:
    # Tensors that were made in inference mode have none.
    return 0 if tensor.is_inference() else tensor._version


def refuse_numbers_of_parts() -> None:
    """Makes float(), bool() and ``.item()`` of a `DTensor` raise RuntimeError where each rank would
    get a number of its own. torch has no public way to register an operator of `DTensor`."""

    def number(_operator: Any, args: tuple[DTensor], _kwargs: Any) -> Any:
        (tensor,) = args
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate() and tensor.device_mesh.size(axis) > 1:
                raise RuntimeError(
                    f"a number was asked of a DTensor that is placed as {tensor.placements}, of "
                    "which this rank has a part: float(tensor.full_tensor()) is that of the whole, "
                    "on all ranks together"
                )
        return tensor._local_tensor.item()

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = number

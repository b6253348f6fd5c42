"""What shows that a script has written to the gathered parameters of a group, or put others in
their places: `GroupWatch`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import ne
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

# An attribute of gathered parameters: the name of the parameter
GATHERED = "_parallel2d_gathered"


def storage_of(tensor: Tensor) -> int | None:
    """The number of the memory that ``tensor`` is a view of; equal for all its views, on meta too.
    None for tensors without one, such as sparse ones. torch has no public identity of a storage:
    its address is zero on meta and where the memory is freed."""
    try:
        return _local(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


class GroupWatch:
    """Compares the parameters of one group with what they were before. ``storages``: by number the
    names of gathered parameters, to which those of this group are added."""

    # In lists, because a step calls each of these a few times: 300 parameters cost 0.3 ms.

    def __init__(
        self, group: FSDPParamGroup, names: Sequence[str], storages: dict[int, str]
    ) -> None:
        self.names = names
        self._group = group
        self._storages = storages
        self._parameters = group.fsdp_params
        # By parameter the (module, attribute) of each of its occurrences
        self.places: list[list[tuple[nn.Module, str]]] = []
        for parameter in self._parameters:
            info = parameter._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            self.places.append([(info.module, info.param_name), *shared])
        # Allocation may have replaced what torch takes over in the first forward.
        registered = [getattr(*places[0]) for places in self.places]
        self._versions = [each._version for each in registered]
        self._wrappers = [each.untyped_storage()._cdata for each in registered]
        self._locals = [weakref.ref(each._local_tensor) for each in registered]
        # Of the gathered ones, once they have been
        self._whole: list[Tensor] = []
        self._whole_versions: list[int] = []
        self._whole_storages: list[int] = []

    @property
    def registered(self) -> list[nn.Parameter]:
        """The parameters that torch's engine has put into the modules."""
        if self._group.is_unsharded:
            return [each._unsharded_param for each in self._parameters]
        return [each.sharded_param for each in self._parameters]

    def reassigned(self) -> str:
        """The name of a sharded parameter whose ``.data`` was set since the last call, which
        reaches neither this rank's part nor torch's engine; empty if none was."""
        sharded: list[Any] = [each.sharded_param for each in self._parameters]
        wrappers = [each.untyped_storage()._cdata for each in sharded]
        if wrappers == self._wrappers:
            return ""
        changed = map(ne, wrappers, self._wrappers)
        names = []
        for name, each, earlier in compress(
            zip(self.names, sharded, self._locals, strict=True), changed
        ):
            # Conversions and loading replace the local tensor too.
            if each._local_tensor is earlier():
                names.append(name)
        self._wrappers = wrappers
        self._locals = [weakref.ref(each._local_tensor) for each in sharded]
        return next(iter(names), "")

    def take_updates(self) -> bool:
        """Whether sharded parameters were changed since the last call. Counts that as what it is
        for autograd, a change of the gathered ones in place, so that it raises its own error where
        a backward pass needs the values of before."""
        versions = [each.sharded_param._version for each in self._parameters]
        if versions == self._versions:
            return False
        changed = list(map(ne, versions, self._versions))
        self._versions = versions
        if self._whole_versions:
            torch.autograd.graph.increment_version(compress(self._whole, changed))
            self._whole_versions = self._versions_now()
        return True

    def remember(self) -> None:
        """Takes down what the gathered parameters are, which later gathers do not change."""
        self._whole = [each._unsharded_param for each in self._parameters]
        # Those that were made in inference mode have no versions, and cannot be trained.
        if not any(each.is_inference() for each in self._whole):
            self._whole_versions = self._versions_now()
        self._whole_storages = self._storages_now()
        self._storages.update(zip(self._whole_storages, self.names, strict=True))
        for name, each in zip(self.names, self._whole, strict=True):
            setattr(each, GATHERED, name)

    def _versions_now(self) -> list[int]:
        return [each._version for each in self._whole]

    def _storages_now(self) -> list[int]:
        return [_local(each).untyped_storage()._cdata for each in self._whole]

    def written(self, by_value: bool) -> str:
        """The name of a gathered parameter that was written to in place, or whose ``.data`` was
        set; empty if none was. ``by_value``: this rank's parts are compared with its shards, which
        shows writes through ``.data``: they count nowhere."""
        found: Iterator[bool] = map(ne, self._storages_now(), self._whole_storages)
        name = next(compress(self.names, found), "")
        if not name and self._whole_versions:
            found = map(ne, self._versions_now(), self._whole_versions)
            name = next(compress(self.names, found), "")
        if not name and by_value:
            name = next(compress(self.names, map(_differs, self._parameters)), "")
        return name


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _differs(parameter: FSDPParam) -> bool:
    """Whether this rank's part of the gathered parameter has other bits than its shard."""
    shard = parameter._sharded_local_tensor.detach()
    begin = parameter.mesh_info.shard_mesh_rank * parameter.padded_sharded_param_size.numel()
    whole = _local(parameter._unsharded_param).detach().reshape(-1)
    gathered = whole[begin : begin + shard.numel()]
    own = shard.reshape(-1).to(gathered.device, gathered.dtype)
    return not torch.equal(gathered.view(torch.uint8), own.view(torch.uint8))


def refuse_numbers_of_parts() -> None:
    """Makes float(), bool() and ``.item()`` of a `DTensor` raise RuntimeError where each rank would
    get a number of its own. torch has no public way to register an operator of `DTensor`."""

    def number(op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        tensor: DTensor = args[0]
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

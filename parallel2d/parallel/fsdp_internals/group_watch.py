"""What shows that a script has written to the gathered parameters of a group, or put others in
their places: `GroupWatch`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import ne, or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

# An attribute of gathered parameters: the name of the parameter
GATHERED_AS = "_parallel2d_gathered_as"


def storage_of(tensor: Tensor) -> int | None:
    """The number of the memory that ``tensor`` is a view of, also on meta and once it is freed;
    None where there is none, as for sparse ones. torch has no public identity of a storage."""
    try:
        return _local(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


class GroupWatch:
    """Compares the parameters of one group with what they were before, in lists, because each step
    does. ``storages``: by number the names of gathered parameters, to which these are added."""

    def __init__(
        self, group: FSDPParamGroup, names: Sequence[str], storages: dict[int, str]
    ) -> None:
        self.names = names
        self._parameters = group.fsdp_params
        self._storages = storages
        # By parameter the (module, attribute) of each of its occurrences
        self.places: list[list[tuple[nn.Module, str]]] = []
        for parameter in self._parameters:
            info = parameter._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            self.places.append([(info.module, info.param_name), *shared])
        # Allocation may have replaced what torch takes over in the first forward.
        registered = [getattr(*places[0]) for places in self.places]
        self.versions = [each._version for each in registered]
        self._wrappers = _wrappers(registered)
        # Of the gathered ones, once they have been: storage and version
        self._stamps: list[tuple[int, int]] = []

    def registered(self, gathered: bool) -> list[nn.Parameter]:
        """The parameters that torch has put into the modules."""
        name = "_unsharded_param" if gathered else "sharded_param"
        return [getattr(each, name) for each in self._parameters]

    def reassigned(self) -> str:
        """The name of a sharded parameter whose ``.data`` was set since the last call, which
        reaches neither this rank's part nor torch's engine; empty if none was."""
        before, self._wrappers = self._wrappers, _wrappers(self.registered(gathered=False))
        if before != self._wrappers:
            pairs = zip(self.names, before, self._wrappers, strict=True)
            for name, (storage, local), now in pairs:
                # Conversions and loading replace the local tensor too.
                if storage != now[0] and local == now[1]:
                    return name
        return ""

    def take_updates(self) -> bool:
        """Whether sharded parameters were changed since the last call. Autograd hears of it as a
        change of the gathered ones, so that it raises its own error where a backward pass needs the
        values of before."""
        versions = [each.sharded_param._version for each in self._parameters]
        if versions == self.versions:
            return False
        before, self.versions = self.versions, versions
        for number, (storage, version) in enumerate(self._stamps):
            whole = self._parameters[number]._unsharded_param
            if versions[number] != before[number] and not whole.is_inference():
                torch.autograd.graph.increment_version(whole)
                self._stamps[number] = (storage, version + 1)
        return True

    def remember(self) -> None:
        """Takes down what the gathered parameters are, which later gathers do not change."""
        self._stamps = self._stamps_now()
        whole = self.registered(gathered=True)
        for name, each, (storage, _) in zip(self.names, whole, self._stamps, strict=True):
            setattr(each, GATHERED_AS, name)
            self._storages[storage] = name

    def _stamps_now(self) -> list[tuple[int, int]]:
        found = []
        for each in self.registered(gathered=True):
            # Those that were made in inference mode have no version.
            version = 0 if each.is_inference() else each._version
            found.append((_local(each).untyped_storage()._cdata, version))
        return found

    def written(self, by_value: bool) -> str:
        """The name of a gathered parameter that was written to, or whose ``.data`` was set; empty
        if none was. ``by_value``: shows writes through ``.data`` too, which count nowhere."""
        differs = map(ne, self._stamps_now(), self._stamps)
        if by_value:
            differs = map(or_, differs, map(_differs, self._parameters))
        return next(compress(self.names, differs), "")


def _wrappers(parameters: Sequence[Any]) -> list[tuple[int, int]]:
    return [(each.untyped_storage()._cdata, id(each._local_tensor)) for each in parameters]


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
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            if size > 1 and not placement.is_replicate():
                raise RuntimeError(
                    f"a number was asked of a DTensor that is placed as {tensor.placements}, of "
                    "which this rank has a part: use tensor.full_tensor() on all ranks first"
                )
        return tensor._local_tensor.item()

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = number

    def values(_tensor: DTensor, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "numpy() or tolist() was asked of a DTensor, of which this rank has a part: use "
            "tensor.full_tensor() on all ranks first"
        )

    DTensor.numpy = DTensor.tolist = values  # type: ignore[method-assign, assignment]

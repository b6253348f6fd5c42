"""What shows that a script has written to the gathered parameters of a group, or put others in
their places: `GroupWatch`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import add, attrgetter, is_not, ne, or_
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
        return part_of(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


# Of an `FSDPParam`. Each step reads these of all parameters, in maps, which cost least.
_SHARDED, _WHOLE = attrgetter("sharded_param"), attrgetter("_unsharded_param")
_SHARDED_VERSION, _VERSION = attrgetter("sharded_param._version"), attrgetter("_version")
# Inside, attributes of a `DTensor` are read four times as fast. torch has no public one.
quick_reads = torch._C.DisableTorchFunctionSubclass


class GroupWatch:
    """Compares the parameters of one group with what they were before. ``storages``: by number the
    names of gathered parameters, to which these are added."""

    def __init__(
        self, group: FSDPParamGroup, names: Sequence[str], storages: dict[int, str]
    ) -> None:
        self._parameters = group.fsdp_params
        self._names = names
        self._storages = storages
        # Of each occurrence of each parameter: where it is registered, and under which key
        self._occurring: list[FSDPParam] = []
        self._occurring_names: list[str] = []
        self._holders: list[dict[str, nn.Parameter | None]] = []
        self._keys: list[str] = []
        self.versions: list[int] = []
        for name, each in zip(names, self._parameters, strict=True):
            info = each._module_info
            # Allocation may have replaced what torch takes over in the first forward.
            self.versions.append(getattr(info.module, info.param_name)._version)
            modules = [info.module, *info.shared_modules]
            self._keys += [info.param_name, *info.shared_param_names]
            self._holders += [vars(module)["_parameters"] for module in modules]
            self._occurring += [each] * len(modules)
            self._occurring_names += [name] * len(modules)
        self._written: list[int] = []  # of the gathered ones, once they have been
        self._numbers: list[int] = []  # of their storages
        self._values: list[Tensor] = []  # before this forward

    def misplaced(self, gathered: bool) -> str:
        """The name of a parameter in whose place is another than torch has put there; empty if none
        is."""
        wanted = map(_WHOLE if gathered else _SHARDED, self._occurring)
        found = map(dict.get, self._holders, self._keys)
        return next(compress(self._occurring_names, map(is_not, found, wanted)), "")

    def take_updates(self) -> bool:
        """Whether sharded parameters were changed since the last call. Autograd hears of it as a
        change of the gathered ones, so that it raises its own error where a backward pass needs the
        values of before."""
        with quick_reads():
            versions = list(map(_SHARDED_VERSION, self._parameters))
        if versions == self.versions:
            return False
        is_new = list(map(ne, versions, self.versions))
        self.versions = versions
        # None before the first forward; those of inference mode have no version.
        whole = list(map(_WHOLE, self._parameters)) if self._written else []
        if whole and not whole[0].is_inference():
            torch.autograd.graph.increment_version(compress(whole, is_new))
            self._written = list(map(add, self._written, is_new))
        return True

    def remember(self) -> None:
        """Takes down what the gathered parameters are, which later gathers do not change."""
        self._written = self._counts()
        for number in self._numbers:
            del self._storages[number]
        self._numbers = []
        for name, each in zip(self._names, map(_WHOLE, self._parameters), strict=True):
            setattr(each, GATHERED_AS, name)
            self._numbers.append(part_of(each).untyped_storage()._cdata)
            self._storages[self._numbers[-1]] = name

    def keep_values(self) -> None:
        """Keeps what `written` compares values with: copies, where what is written to a gathered
        parameter is written to the sharded one."""
        self._values = []
        for each in self._parameters:
            shard = each._sharded_local_tensor.detach()
            is_shared = each.mesh_info.shard_mesh_size == 1 and is_gathered_as_stored(each)
            self._values.append(shard.clone() if is_shared else shard)

    def _counts(self) -> list[int]:
        whole = list(map(_WHOLE, self._parameters))
        # Those that were made in inference mode, all in one forward, have no version.
        if whole[0].is_inference():
            return [0] * len(whole)
        with quick_reads():
            return list(map(_VERSION, whole))

    def written(self, by_value: bool) -> str:
        """The name of a gathered parameter that was written to; empty if none was. ``by_value``:
        shows writes through ``.data`` too, and one that was set, which count nowhere, since
        `keep_values`."""
        differs = map(ne, self._counts(), self._written)
        if by_value:
            whole = map(_WHOLE, self._parameters)
            moved = [storage_of(each) not in self._storages for each in whole]
            differs = map(or_, differs, moved)
            differs = map(or_, differs, map(_differs, self._parameters, self._values))
        name = next(compress(self._names, differs), "")
        self._values = []
        return name


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part of a `DTensor`, unknown to autograd; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_gathered_as_stored(parameter: FSDPParam) -> bool:
    """Whether nothing is cast, and no class of tensors has a way of its own to be gathered."""
    own = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    return parameter.param_dtype is None and not own


def _differs(parameter: FSDPParam, shard: Tensor) -> bool:
    """Whether this rank's part of the gathered parameter has other bits than ``shard``."""
    begin = parameter.mesh_info.shard_mesh_rank * parameter.padded_sharded_param_size.numel()
    whole = part_of(parameter._unsharded_param).detach().reshape(-1)
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

"""Raise errors for reads of unsharded parameters whose storage FSDP has freed: `refusing_reads`.

A script may keep a view of an unsharded parameter. After resharding the storage of the view has no
bytes. A kernel that reads the view then reads address 0, and the process ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d.parallel.fsdp_internals.tensors import quick_reads

# Maps the id of a storage to the name of its unsharded parameter; None for other storages
NameOf = Callable[[int], str | None]

# Methods that read memory without an operator, or with operators that a dispatch mode does not see
_DIRECT = frozenset(
    (
        *("numpy", "tolist", "__array__", "__dlpack__", "share_memory_"),
        *("__deepcopy__", "__reduce_ex__", "__repr__", "__format__"),
    )
)


def refusing_reads(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], name_of: NameOf
) -> AbstractContextManager[Any]:
    """Return a context for the call ``name`` of torch, in which reads of freed storage raise.

    The context does nothing if no argument has freed storage.
    """
    freed = _freed_in(args, kwargs, name_of)
    if freed is None:
        return contextlib.nullcontext()
    if name in _DIRECT:
        raise _refusal(freed, name)
    return _RefuseReads(name_of)


class _RefuseReads(TorchDispatchMode):
    """Raise an error for operators that read or write freed storage.

    Views and operators that use only metadata are allowed.
    """

    def __init__(self, name_of: NameOf) -> None:
        super().__init__()
        self._name_of = name_of

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        freed = _freed_in(args, kwargs, self._name_of)
        if freed is None:
            return func(*args, **kwargs)
        refusal = _refusal(freed, func.overloadpacket.__name__)
        if not _uses_metadata_only(func):
            raise refusal
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # torch checks that a view fits into its storage, which is empty
            raise refusal from None


def _uses_metadata_only(operator: Any) -> bool:
    name = operator.overloadpacket.__name__
    # Besides in-place views, `set_` and `resize_` have the tag inplace_view.
    is_view = operator.is_view or torch.Tag.inplace_view in operator.tags
    return is_view or name.endswith("_like") or name.startswith("new_")


def _freed_in(args: Iterable[Any], kwargs: dict[str, Any], name_of: NameOf) -> str | None:
    """Return the name of the parameter if an argument is a view of its freed storage, or None."""
    for given in (*args, *kwargs.values()):
        for each in given if isinstance(given, list | tuple) else (given,):
            if isinstance(each, Tensor) and not isinstance(each, DTensor):
                freed = _freed_as(each, name_of)
                if freed is not None:
                    return freed
    return None


def _freed_as(tensor: Tensor, name_of: NameOf) -> str | None:
    # A subclass, such as the parameters of lazy modules, may raise an error for these calls.
    with quick_reads():
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a tensor of torch.func
            return None
        return None if storage.nbytes() or not tensor.numel() else name_of(id(storage))


def _refusal(parameter: str, operator: str) -> RuntimeError:
    return RuntimeError(
        f"{operator}() uses a view of {parameter} that was kept while the parameter was "
        "unsharded, and its memory is freed: keep a clone(), or the parameter of the model and "
        "its full_tensor()"
    )

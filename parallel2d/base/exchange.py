"""Collectives for small Python values: `all_gather`, `gather` and `broadcast`. The values are sent
as JSON. `reduce` reduces a tensor of a custom training loop. Other functions check that all ranks
see the same folder and data.

torch's object collectives are not used, because these collectives unpickle received data, and
unpickling can run any code. The values of this module are None, booleans, numbers, strings, bytes,
lists, tuples, sets, dictionaries, dtypes, small tensors, and the dataclasses and errors that
`sendable` has registered. Receivers get the same types.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import mmap
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError, did_you_mean
from parallel2d.base.metering import control_traffic
from parallel2d.base.replicas import agreed, current, first_rank, is_present, present_ranks

_Class = TypeVar("_Class", bound=type)

_sendable: dict[str, type] = {}


_meeting: Callable[[str], None] | None = None


def meet_before_collectives(function: Callable[[str], None]) -> None:
    """Register ``function``. `meet` calls it before a collective of all ranks outside of a model.
    ``function`` raises an error if ranks are about to call different collectives."""
    global _meeting
    _meeting = function


def meet(point: str) -> None:
    """Check that all ranks that share a model reach ``point``, a place in the script."""
    # The ranks of a joining replica reach the point later than the other ranks.
    if _meeting is not None and current() is None:
        _meeting(point)


_members: ContextVar[dist.ProcessGroup | None] = ContextVar("members", default=None)


@contextlib.contextmanager
def among(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Restrict the collectives of this module to the ranks of ``group``, in this thread and inside
    the context. None does not change the ranks."""
    token = _members.set(group or _members.get())
    try:
        yield
    finally:
        _members.reset(token)


def group_of_members() -> dist.ProcessGroup | None:
    """Return the group that `among` has set; None stands for all ranks."""
    return _members.get()


def members() -> list[int]:
    """Return the global ranks with values that `all_gather` returns, in the same order."""
    ranks = dist.get_process_group_ranks(_members.get() or dist.group.WORLD)
    return list(filter(is_present, ranks))  # failed ranks have no value


def leader(group: dist.ProcessGroup | None = None) -> int:
    """Return the global rank of the leader of ``group``: its first rank, or the first live rank if
    ``group`` has all ranks. Default: the ranks of `among`."""
    group = group or _members.get()
    if group is None or group.size() == dist.get_world_size():
        return first_rank()
    return dist.get_global_rank(group, 0)


def sendable(kind: _Class) -> _Class:
    """Class decorator. Registers a dataclass, a named tuple, or an exception with one text
    argument, so that its objects can be sent."""
    _sendable[_name(kind)] = kind
    return kind


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of ``group``, in the order of the ranks. Collective. Raises
    TypeError for a value of an unregistered type."""
    return _decoded(_received(value, group))


def gather(value: Any, group: dist.ProcessGroup | None = None, to: int | None = None) -> list[Any]:
    """Like `all_gather`, but only global rank ``to`` (default: the first) gets the values; other
    ranks get an empty list."""
    # An all-gather connects each rank only to its neighbors. `dist.gather` would connect every rank
    # to this rank.
    received = _received(value, group)
    if dist.get_rank() != (leader(group) if to is None else to):
        return []
    return _decoded(received)


def broadcast(value: Any, source: int | None = None, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of rank ``source`` (default: the first). Collective. Raises TypeError for a
    value of an unregistered type."""
    group = group or _members.get()
    source = leader(group) if source is None else source
    device = _device(group)
    # Receivers need the size to allocate the buffer for the data.
    if dist.get_rank() == source:
        data = _encoded(value, device)
        dist.broadcast(torch.tensor([data.numel()], device=device), source, group=group)
        dist.broadcast(data, source, group=group)
        return value
    length = torch.tensor([0], device=device)
    dist.broadcast(length, source, group=group)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return decode(data.cpu().numpy().tobytes())


def encode(value: Any) -> str:
    """Encode ``value`` as JSON. Raises TypeError for an unregistered type."""
    return json.dumps(_plain(value))


def decode(text: str | bytes) -> Any:
    """Decode the value that `encode` has encoded as ``text``."""
    return json.loads(text, object_hook=_restored)


@control_traffic()
def _received(value: Any, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the encoded values of all ranks, by rank. Collective."""
    group = group or _members.get()
    device = _device(group)
    data = _encoded(value, device)
    ranks = dist.get_world_size(group)
    lengths = []
    for _ in range(ranks):
        lengths.append(torch.zeros(1, dtype=torch.int64, device=device))
    dist.all_gather(lengths, torch.tensor([data.numel()], device=device), group=group)
    sizes = list(map(int, lengths))
    # An all-gather needs tensors of equal shape, so each is padded with zeros to the largest size.
    own = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    own[: data.numel()] = data
    received = [torch.zeros_like(own) for _ in sizes]
    dist.all_gather(received, own, group=group)
    return [each[:size] for each, size in zip(received, sizes, strict=True)]


def _decoded(received: list[Tensor]) -> list[Any]:
    found: list[Any] = []
    for part in received:
        data = part.cpu().numpy().tobytes()
        # If a rank has failed, its row is still zero. JSON never begins with a zero byte.
        if data[:1].strip(b"\0"):
            found.append(decode(data))
    return found


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the CPU if the group can send from it, otherwise this rank's accelerator."""
    cpu = torch.device("cpu")
    group = group or dist.distributed_c10d._get_default_group()
    if cpu in group._device_types:
        return cpu
    return torch.device(torch.accelerator.current_accelerator() or cpu)


def _encoded(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(encode(value).encode()), dtype=torch.uint8).to(device)


def _plain(value: Any) -> Any:
    """Convert ``value`` to types of JSON; any other type becomes a dictionary {kind: parts}."""
    if isinstance(value, _SCALARS):
        return value
    if type(value) is list:
        return _items(value)
    name = _name(type(value))
    if isinstance(value, ConfigError) and name not in _sendable:
        # An unregistered subclass arrives as its base class ConfigError.
        name = _name(ConfigError)
    if name in _sendable:
        return {name: _items(_arguments(value))}
    for kind, converter in _KINDS.items():
        if type(value) in converter.classes:
            return {kind: converter.to_json(value)}
    raise TypeError(f"a {name} cannot be sent to other ranks")


def _restored(entry: dict[str, Any]) -> Any:
    ((kind, parts),) = entry.items()  # a dictionary of `_plain`; its parts are restored already
    return _sendable[kind](*parts) if kind in _sendable else _KINDS[kind].from_json(parts)


def _arguments(value: Any) -> Iterable[Any]:
    """Return the constructor arguments that make an equal copy of a registered ``value``."""
    if dataclasses.is_dataclass(value):
        arguments = []
        for field in dataclasses.fields(value):
            if field.init:
                arguments.append(getattr(value, field.name))
        return arguments
    if isinstance(value, BaseException):
        return [str(value)]
    return value  # a named tuple


def _items(value: Iterable[Any]) -> list[Any]:
    return list(map(_plain, value))


def _tensor_parts(value: Tensor) -> list[Any]:
    if value.layout != torch.strided:
        raise TypeError(f"a {value.layout} tensor cannot be sent to other ranks")
    # A conjugated or negated view has the bytes of its base, so resolve the view.
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [_plain(value.dtype), list(value.shape), _plain(data)]


def _tensor(parts: list[Any]) -> Tensor:
    dtype, shape, data = parts
    # `frombuffer` refuses an empty buffer, and shares memory with its argument.
    buffer = bytearray(data) or bytearray(1)
    flat = torch.frombuffer(buffer, dtype=torch.uint8)[: len(data)]
    return flat.view(dtype).reshape(shape)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {
    _dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}

# Types that JSON supports
_SCALARS = (type(None), bool, int, float, str)


class _Converter(NamedTuple):
    """Conversion of values of some classes to JSON and back."""

    classes: tuple[type, ...]
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


_KINDS = {
    # Pairs, because keys of JSON objects are always strings.
    "dict": _Converter((dict,), lambda value: _items(map(list, value.items())), dict),
    "tuple": _Converter((tuple,), _items, tuple),
    "set": _Converter((set,), _items, set),
    "frozenset": _Converter((frozenset,), _items, frozenset),
    "bytes": _Converter((bytes,), lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "size": _Converter((torch.Size,), list, torch.Size),
    "dtype": _Converter((torch.dtype,), _dtype_name, _DTYPES.__getitem__),
    "tensor": _Converter((Tensor, torch.nn.Parameter), _tensor_parts, _tensor),
}

sendable(ConfigError)


def shared_memory(group: dist.ProcessGroup, size: int) -> mmap.mmap | None:
    """Return zero-filled memory that all ranks of ``group`` share, or None on every rank if they
    cannot share memory. Collective.

    The memory has no name in a file system: it is freed with the last process that maps it.
    """
    name, path, file = f"parallel2d-{uuid.uuid4().hex}", "", -1
    # Only Linux has `memfd_create`.
    with contextlib.suppress(OSError, AttributeError):
        if group.rank() == 0:
            file = os.memfd_create(name)
            os.truncate(file, size)
            path = f"/proc/{os.getpid()}/fd/{file}"
    name, path = broadcast((name, path), dist.get_global_rank(group, 0), group)
    memory = None
    # In another PID namespace, the path may name a file of another process, or no file.
    with contextlib.suppress(OSError):
        if name in os.readlink(path):
            with open(path, "r+b", buffering=0) as opened:
                memory = mmap.mmap(opened.fileno(), size)
    everywhere = all(all_gather(memory is not None, group))
    if file >= 0:
        os.close(file)
    return memory if everywhere else None


def check_shared(folder: str) -> None:
    """Raise `ConfigError` with the nodes that do not see rank 0's ``folder``. Collective."""
    # A new name, so that no file of an earlier start is mistaken for rank 0's file.
    name = broadcast(uuid.uuid4().hex)
    path = os.path.join(folder, f".shared-{name}")
    is_first = dist.get_rank() == leader()
    if is_first:
        open(path, "w").close()
    dist.barrier(_members.get())
    try:
        _refuse_where(
            not os.path.exists(path),
            f"{folder} is not the same folder on every rank: it must be on a shared file system",
        )
    finally:
        if is_first:
            os.unlink(path)


def check_same_data(fingerprint: str) -> None:
    """Raise `ConfigError` with the nodes whose data differ from the data of rank 0. Collective."""
    _refuse_where(
        fingerprint != agreed("data", broadcast(fingerprint)),
        "data differ from those of rank 0 (other files, or another Python's library)",
    )


def _refuse_where(wrong: bool, what: str) -> None:
    """Raise `ConfigError` on every rank if any rank passes True, with the hosts of these ranks.
    Collective."""
    answers = all_gather(socket.gethostname() if wrong else None)
    hosts = sorted(set(filter(None, answers)))
    if hosts:
        raise ConfigError(f"on {', '.join(hosts)}: {what}")


_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def reduce(
    value: Any, group: dist.ProcessGroup | None = None, op: str | dist.ReduceOp | Any = "mean"
) -> Any:
    """Return a new tensor with ``value`` reduced over the ranks of ``group``. Collective.

    The result has the dtype and device of ``value``, with two exceptions. A mean of integers or
    booleans is fp64, because a rounded mean is rarely intended. A sum of booleans is int64. Values
    in bf16 and fp16 are added in fp32. ``value`` is not changed.

    Args:
        value: a tensor. Values of other types are returned unchanged. Without a process group, the
            result is a copy of the tensor.
        group: default: all ranks.
        op: ``mean`` (or ``avg``), ``sum``, ``max``, ``min``, ``product``, or a ``dist.ReduceOp``.

    Raises:
        ConfigError: for another ``op`` and for a `DTensor`.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        raise ConfigError(
            "reduce: a DTensor is one tensor over all its ranks; give its .to_local() or take "
            ".full_tensor()"
        )
    operation, is_mean = _operation_of(op)
    sums, kept = _dtypes_of(value.dtype, operation, is_mean)
    result = value.detach().clone().to(sums)
    if dist.is_initialized():
        result = result.contiguous()
        if group in (None, dist.group.WORLD):
            meet("calls parallel2d.reduce")
        with control_traffic():
            dist.all_reduce(result, operation, group)
        if is_mean:
            result /= present_ranks() if group is None else dist.get_world_size(group)
    return result.to(kept)


def _operation_of(op: str | dist.ReduceOp | Any) -> tuple[Any, bool]:
    """Return torch's operation for ``op``, and True if the result is divided by the number of
    ranks afterwards."""
    word = op.lower() if isinstance(op, str) else op
    # gloo does not implement the mean.
    if word in ("mean", "avg", dist.ReduceOp.AVG):
        return dist.ReduceOp.SUM, True
    if not isinstance(word, str):
        return word, False
    if word not in _OPERATIONS:
        hint = did_you_mean(word, ["mean", "avg", *_OPERATIONS], alike=0.4)
        raise ConfigError(
            f"reduce: op={op} is not one of mean, avg, {', '.join(_OPERATIONS)}{hint}"
        )
    return _OPERATIONS[word], False


def _dtypes_of(
    dtype: torch.dtype, operation: Any, is_mean: bool
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the reduction of a tensor of ``dtype``, and the dtype of the result."""
    kept = dtype
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    if is_exact and is_mean:
        kept = torch.float64
    elif dtype == torch.bool and operation == dist.ReduceOp.SUM:
        kept = torch.int64
    # In bf16 and fp16 every sum would be rounded. Some backends cannot reduce booleans.
    wider = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.int64}
    return wider.get(kept, kept), kept

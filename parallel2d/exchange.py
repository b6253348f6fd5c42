"""Small values between ranks, as JSON.

torch's object collectives pickle, and a pickle from the network runs code. Here values are None,
booleans, numbers, strings, bytes, lists, tuples, sets, dictionaries, dtypes, small tensors, and the
dataclasses and errors that `sendable` has registered. Another rank receives the same types.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# the names in torch.distributed may be wrapped, to count bytes
from torch.distributed import distributed_c10d as c10d

from parallel2d.errors import ConfigError

_Class = TypeVar("_Class", bound=type)

_sendable: dict[str, type] = {}


def sendable(kind: _Class) -> _Class:
    """Lets values of a dataclass, a named tuple or an exception of one argument be sent. A
    decorator."""
    _sendable[_name(kind)] = kind
    return kind


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, by rank in ``group`` (default: all). Collective. Raises TypeError
    for what cannot be sent."""
    own, lengths = _padded(value, group)
    received = [torch.empty_like(own) for _ in lengths]
    c10d.all_gather(received, own, group=group)
    return [_decoded(each[:length]) for each, length in zip(received, lengths, strict=True)]


def gather(value: Any, group: dist.ProcessGroup | None = None, to: int = 0) -> list[Any] | None:
    """As `all_gather`, on global rank ``to`` alone; None elsewhere."""
    own, lengths = _padded(value, group)
    received = [torch.empty_like(own) for _ in lengths] if dist.get_rank() == to else None
    c10d.gather(own, received, dst=to, group=group)
    return (
        [_decoded(each[:length]) for each, length in zip(received, lengths, strict=True)]
        if received is not None
        else None
    )


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The value of global rank ``source``, on every rank. Collective. Raises TypeError for what
    cannot be sent."""
    device, mine = _device(group), dist.get_rank() == source
    data = _encoded(value, device) if mine else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor([data.numel()], device=device)
    c10d.broadcast(length, source, group=group)
    if not mine:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    c10d.broadcast(data, source, group=group)
    return value if mine else _decoded(data)


def encode(value: Any) -> str:
    """The value as JSON. Raises TypeError for what cannot be sent."""
    return json.dumps(_plain(value))


def decode(text: str | bytes) -> Any:
    """The value of what `encode` made."""
    return json.loads(text, object_hook=_restored)


def _padded(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    device = _device(group)
    data = _encoded(value, device)
    lengths = [
        torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))
    ]
    c10d.all_gather(lengths, torch.tensor([data.numel()], device=device), group=group)
    sizes = [int(length) for length in lengths]
    own = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    own[: data.numel()] = data
    return own, sizes


def _device(group: dist.ProcessGroup | None) -> torch.device:
    types = (group or c10d._get_default_group())._device_types
    return (
        torch.device("cpu")
        if torch.device("cpu") in types
        else torch.device(torch.accelerator.current_accelerator() or "cpu")
    )


def _encoded(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(encode(value).encode()), dtype=torch.uint8).to(device)


def _decoded(data: Tensor) -> Any:
    return decode(data.cpu().numpy().tobytes())


def _plain(value: Any) -> Any:
    """``value`` in JSON's types; what JSON lacks becomes a dictionary of one entry, the kind and
    its parts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, ConfigError) and _name(type(value)) not in _sendable:
        value = ConfigError(str(value))
    if (name := _name(type(value))) in _sendable:
        if dataclasses.is_dataclass(value):
            parts = [
                getattr(value, field.name) for field in dataclasses.fields(value) if field.init
            ]
        else:
            parts = [str(value)] if isinstance(value, BaseException) else list(value)
        return {name: [_plain(part) for part in parts]}
    for kind, (known, parts_of, _) in _KINDS.items():
        if type(value) in known:
            return {kind: parts_of(value)}
    raise TypeError(f"a {name} cannot be sent to other ranks")


def _restored(told: dict[str, Any]) -> Any:
    ((kind, parts),) = told.items()
    if kind in _sendable:
        return _sendable[kind](*parts)
    return _KINDS[kind][2](parts)


def _items(value: Any) -> list[Any]:
    return [_plain(item) for item in value]


def _tensor_parts(value: Tensor) -> list[Any]:
    if value.layout != torch.strided:
        raise TypeError(f"a {value.layout} tensor cannot be sent to other ranks")
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [_plain(value.dtype), list(value.shape), _plain(data)]


def _tensor(parts: list[Any]) -> Tensor:
    dtype, shape, data = parts
    return (
        torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
        .view(dtype)
        .reshape(shape)
    )


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

# kind -> classes, value to JSON, JSON to value
_KINDS: dict[str, tuple[tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": ((), list, dict),
    "tuple": ((tuple,), _items, tuple),
    "set": ((set,), _items, set),
    "frozenset": ((frozenset,), _items, frozenset),
    "bytes": ((bytes,), lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "size": ((torch.Size,), list, torch.Size),
    "dtype": ((torch.dtype,), lambda value: str(value).removeprefix("torch."), _DTYPES.__getitem__),
    "tensor": ((Tensor, torch.nn.Parameter), _tensor_parts, _tensor),
}

sendable(ConfigError)

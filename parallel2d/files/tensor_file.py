"""One safetensors file: its header written, parsed and checked, its tensors read by byte range.

Named tensors flow in and blocks of bytes flow out; or a `ByteSource` flows in and views of its
tensors flow out. The format is safetensors (8 bytes of header length, a JSON header, packed
values): data only, so reading it can run nothing. It is written here rather than through the
library because blocks must be hashed on their way to any storage, and read here because a rank
wants ranges of rows, from local files and object stores alike. Every number in a header is treated
as hostile.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel2d.errors import ConfigError
from parallel2d.exchange import sendable
from parallel2d.files import check_density, printable

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMS = 16
MAX_NAME = 1024


@sendable
class DamagedCheckpointError(ConfigError):
    """A checkpoint that is incomplete, altered, or not what its manifest says. The message names
    the file and the fault."""


class ByteSource(Protocol):
    """A file of ``size`` bytes. ``buffer`` returns a writable buffer with the bytes ``begin`` to
    ``end``."""

    size: int

    def buffer(self, begin: int, end: int) -> Any: ...


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: dtype by safetensors name, shape, and its bytes counted from the start of
    the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The values of a contiguous CPU tensor, without a copy."""
    flat = tensor.detach().reshape(-1)
    # a single value counts as contiguous whatever its stride
    flat = flat.as_strided(flat.shape, (1,))
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def encode_header(
    entries: Iterable[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None = None
) -> bytes:
    """The head of a file whose tensors, (name, dtype name, shape), follow packed in this order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, dtype, shape in entries:
        size = math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def encode(
    tensors: Sequence[tuple[str, Tensor]], metadata: dict[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yields the blocks of a file that holds ``tensors`` (contiguous, on CPU), widest dtypes first
    so that each is aligned."""
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    yield encode_header(((name, DTYPE_NAMES[t.dtype], t.shape) for name, t in ordered), metadata)
    for _, tensor in ordered:
        yield tensor_bytes(tensor)


def is_size(value: Any) -> bool:
    """A whole number that can be a size or an offset: not negative, below 2**63; ``true`` is
    none."""
    return type(value) is int and 0 <= value < 2**63


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises `DamagedCheckpointError` for all else, repeated keys included."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        check_density(data)
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{what}: not valid JSON ({printable(error)})") from None
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what}: not a JSON object")
    return value


def check_description(name: Any, dtype: Any, shape: Any, what: str) -> None:
    """Raises `DamagedCheckpointError` unless these can describe a tensor."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise DamagedCheckpointError(f"{what}: {printable(name)!r} cannot be a tensor's name")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} has the unknown dtype {printable(dtype)!r}"
        )
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(is_size, shape)):
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} has the impossible shape {printable(shape)}"
        )
    if math.prod(shape) * DTYPES[dtype].itemsize >= 2**63:
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} of shape {printable(shape)} is larger than any memory"
        )


def read_header(source: ByteSource, what: str) -> dict[str, Entry]:
    """The tensors of a safetensors file by name.

    Raises `DamagedCheckpointError`, naming ``what``, unless the header is one that a correct writer
    makes: known dtypes, sizes that follow from shapes, ranges that fill the file from the header's
    end to its own end without holes or overlap.
    """
    if source.size < 8:
        raise DamagedCheckpointError(
            f"{what}: {source.size} bytes are too few for a safetensors file"
        )
    (length,) = struct.unpack("<Q", bytes(source.buffer(0, 8)))
    if length > MAX_HEADER_BYTES or 8 + length > source.size:
        raise DamagedCheckpointError(
            f"{what}: a header of {length} bytes does not fit a file of {source.size} bytes"
        )
    header = parse_json(bytes(source.buffer(8, 8 + length)), f"{what}: header")
    header.pop("__metadata__", None)
    base = 8 + length
    found: dict[str, Entry] = {}
    for name, item in header.items():
        if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
            raise DamagedCheckpointError(
                f"{what}: {printable(name)} is not described by dtype, shape and data_offsets"
            )
        check_description(name, item["dtype"], item["shape"], what)
        offsets = item["data_offsets"]
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
            raise DamagedCheckpointError(
                f"{what}: {printable(name)} has the impossible offsets {printable(offsets)}"
            )
        size = math.prod(item["shape"]) * DTYPES[item["dtype"]].itemsize
        if offsets[1] - offsets[0] != size:
            raise DamagedCheckpointError(
                f"{what}: {printable(name)} needs {size} bytes, its offsets are "
                f"{printable(offsets)}"
            )
        found[name] = Entry(
            item["dtype"], tuple(item["shape"]), base + offsets[0], base + offsets[1]
        )
    position = base
    for entry in sorted(found.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise DamagedCheckpointError(
                f"{what}: tensors overlap or leave a hole at byte {min(position, entry.begin)}"
            )
        position = entry.end
    if position != source.size:
        raise DamagedCheckpointError(
            f"{what}: its tensors end at byte {position}, the file at byte {source.size}"
        )
    return found


def read_rows(source: ByteSource, entry: Entry, begin: int, end: int) -> Tensor:
    """Rows ``begin`` to ``end`` of dim 0 of a tensor, as a CPU tensor over the source's own memory
    where that is mapped.

    A scalar counts as one row and comes back as a scalar. The tensor must not be written to.
    """
    dtype = DTYPES[entry.dtype]
    rows = entry.shape[0] if entry.shape else 1
    shape = (end - begin, *entry.shape[1:])
    if not rows or not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    row = (entry.end - entry.begin) // rows
    buffer = source.buffer(entry.begin + begin * row, entry.begin + end * row)
    if (entry.begin + begin * row) % dtype.itemsize:
        buffer = bytearray(buffer)  # packed at an odd place by another writer
    tensor = torch.frombuffer(buffer, dtype=dtype)
    return tensor.view(shape) if entry.shape else tensor.view(())

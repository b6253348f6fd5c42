"""Writes, checks and reads safetensors files. A file consists of 8 bytes with the length of the
header, a JSON header, and packed values. Start at `encode_header` to write a file, and at
`read_header` to read a file.

The safetensors library is not used for two reasons: this package hashes blocks while it writes
them, and a rank reads ranges of rows, also from object stores. Every number in a header is
untrusted and checked.
"""

from __future__ import annotations

import gc
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import sendable
from parallel2d.base.files import is_count, parse, printable

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
MAX_TENSORS = 250_000  # in a file or a checkpoint; the check of so many tensors takes seconds
MAX_DIMS = 16
MAX_NAME = 1024


@sendable
class DamagedCheckpointError(ConfigError):
    """Incomplete or altered checkpoint. The message names the file and the fault."""


class ByteSource(Protocol):
    """Readable file. ``buffer`` returns a writable buffer with the bytes ``begin`` to ``end``."""

    size: int

    def buffer(self, begin: int, end: int) -> Any: ...


@dataclass(frozen=True)
class Entry:
    """Tensor in a file: dtype by safetensors name, shape, and byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor`` as uint8. The result is a view if the tensor is contiguous."""
    # A single value counts as contiguous with any stride; the view needs a stride of 1.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def encode_header(
    entries: Iterable[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None = None
) -> bytes:
    """Encode the header of a file. ``entries``: (name, dtype name, shape) of the packed tensors, in
    their order in the file."""
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = metadata
    position = 0
    for name, dtype, shape in entries:
        end = position + _packed_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded to a multiple of 8 bytes, to align the values.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector inside the context. While millions of objects are created, the
    collector would traverse them repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `DamagedCheckpointError` for any other text, and for repeated
    keys."""
    try:
        value = parse(data, unique=True)
    except ValueError as error:
        raise DamagedCheckpointError(f"{what}: not valid JSON ({printable(error)})") from None
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what}: not a JSON object")
    return value


def check_description(name: str, dtype: Any, shape: Any, what: str) -> None:
    """Raise `DamagedCheckpointError` unless name, dtype and shape can describe a tensor."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise DamagedCheckpointError(f"{what}: {printable(name)!r} cannot be a tensor's name")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} has the unknown dtype {printable(dtype)!r}"
        )
    if not _are_sizes(shape, at_most=MAX_DIMS):
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} has the impossible shape {printable(shape)}"
        )
    if _packed_bytes(dtype, shape) >= 2**63:
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} of shape {printable(shape)} is larger than any memory"
        )


def _are_sizes(value: Any, at_most: int) -> bool:
    """True if ``value`` is a list of at most ``at_most`` numbers that can be sizes or offsets."""
    # The length is checked first, because a hostile list may be long.
    return isinstance(value, list) and len(value) <= at_most and all(map(is_count, value))


def _packed_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def read_header(source: ByteSource, what: str) -> dict[str, Entry]:
    """Return the tensors of a safetensors file by name.

    Raises:
        DamagedCheckpointError: naming ``what``, unless the header is valid. A valid header has
            known dtypes, sizes that match the shapes, and byte ranges that fill the file after the
            header without holes or overlap.
    """
    return read_file(source, what)[0]


@without_collector()
def read_file(source: ByteSource, what: str) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Return the result of `read_header` and the metadata in the header. The metadata are
    untrusted."""
    if source.size < 8:
        raise DamagedCheckpointError(
            f"{what}: {source.size} bytes are too few for a safetensors file"
        )
    (length,) = struct.unpack("<Q", bytes(source.buffer(0, 8)))
    # Checked before a buffer of that size is read or allocated
    if length > MAX_HEADER_BYTES or 8 + length > source.size:
        raise DamagedCheckpointError(
            f"{what}: a header of {length} bytes does not fit a file of {source.size} bytes"
        )
    header = parse_json(bytes(source.buffer(8, 8 + length)), f"{what}: header")
    metadata = header.pop("__metadata__", None)
    check_number(len(header), what)
    # Offsets in the header are relative to its end, where the values begin.
    base = 8 + length
    found = {}
    for name, item in header.items():
        found[name] = _read_entry(name, item, base, what)
    position = base
    # The end is part of the sort key, so that an empty tensor comes before a tensor with the same
    # begin.
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
    return found, metadata if isinstance(metadata, dict) else {}


def check_number(tensors: int, what: str) -> None:
    """Raise `DamagedCheckpointError`, naming ``what``, for more than `MAX_TENSORS` tensors."""
    if tensors > MAX_TENSORS:
        raise DamagedCheckpointError(f"{what}: {tensors} tensors, more than {MAX_TENSORS}")


def _read_entry(name: str, item: Any, base: int, what: str) -> Entry:
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} is not described by dtype, shape and data_offsets"
        )
    # Each value may have any type, and is checked before use.
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    check_description(name, dtype, shape, what)
    if not _are_sizes(offsets, at_most=2) or len(offsets) != 2:
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} has the impossible offsets {printable(offsets)}"
        )
    begin, end = offsets
    size = _packed_bytes(dtype, shape)
    if end - begin != size:
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} needs {size} bytes, its offsets are {printable(offsets)}"
        )
    return Entry(dtype, tuple(shape), base + begin, base + end)


def read_rows(source: ByteSource, entry: Entry, begin: int, end: int) -> Tensor:
    """Return rows ``begin`` to ``end`` of dim 0 of a tensor, on CPU. The result is read-only: it
    shares the memory of a mapped source. A scalar counts as one row."""
    dtype = DTYPES[entry.dtype]
    shape = (end - begin, *entry.shape[1:])
    # `torch.frombuffer` refuses an empty buffer.
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    row_bytes = _packed_bytes(entry.dtype, entry.shape[1:])
    first_byte = entry.begin + begin * row_bytes
    buffer = source.buffer(first_byte, entry.begin + end * row_bytes)
    if first_byte % dtype.itemsize:
        # Other programs may write unaligned values. A copy is aligned.
        buffer = bytearray(buffer)
    tensor = torch.frombuffer(buffer, dtype=dtype)
    return tensor.view(shape if entry.shape else ())

"""One rank's copy in shared memory: `Buffer` fills and seals it, `find_copies` finds it again,
`check_file` verifies it.

A copy is written to a file that is mapped once and used again for every copy, so it costs one pass
over the state and no other memory. A small ``record.json`` lists what the copy holds. It is removed
before the first byte changes, and renamed into place after the last one was summed up. So a copy
with a record is whole, whatever was killed and when.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel2d.base.files import is_count
from parallel2d.base.files.folder import LocalFolder
from parallel2d.base.files.tensor_file import (
    DTYPE_NAMES,
    DamagedCheckpointError,
    encode,
    encode_header,
    parse_json,
)
from parallel2d.parallel.weights.geometry import Region
from parallel2d.training.checkpoint.manifest import (
    MAX_BYTES,
    PLAIN,
    Manifest,
    StoredFile,
    chunk_key,
    content_digest,
    require,
)

RECORD = "record.json"
_BLOCK = 4 * 2**20  # bytes under one CRC-32


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor that this rank copies. ``base``: the rectangle that it and its node's
    other holders share."""

    name: str
    shape: tuple[int, ...]
    region: Region
    base: Region
    values: Tensor
    is_received: bool = False  # another replica sends it; the values here say size and dtype only


@dataclass(frozen=True)
class Found:
    """A sealed copy: where it is, and its record."""

    folder: str
    record: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.record["common"]["step"])

    @property
    def rank(self) -> int:
        return int(self.record["rank"])


class Buffer:
    """A file of one rank in shared memory, mapped, and its record."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.name, self.rng_name = f"rank-{rank:05d}.safetensors", f"rng-{rank:05d}.safetensors"
        self._head = b""
        self._bytes: Tensor | None = None
        self._pinned = False
        self._views: list[Tensor] = []
        self._view_of: dict[tuple[str, Region], Tensor] = {}
        self._parts: list[list[Any]] = []

    def fill(self, parts: Sequence[Part]) -> None:
        """Copies ``parts`` from any device; what was in here is void from the first byte on. Raises
        OSError when shared memory is full."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, RECORD))
        # The widest first, so that each part begins at a multiple of its own width.
        ordered = [part for part in parts if part.values.numel()]
        ordered.sort(key=lambda part: -part.values.element_size())
        self._prepare(ordered)
        on_device = False
        self._view_of = {}
        for view, part in zip(self._views, ordered, strict=True):
            self._view_of[part.name, part.region] = view
            # What another replica will send has no values yet.
            if part.is_received:
                continue
            view.copy_(part.values, non_blocking=self._pinned)
            on_device = on_device or part.values.is_cuda
        # Training goes on after this, and changes what is being copied.
        if on_device:
            torch.cuda.synchronize()
        self._parts = [_describe(part, self.name) for part in ordered]

    def view(self, part: Part) -> Tensor:
        """Where ``part`` is in this buffer, after `fill`."""
        return self._view_of[part.name, part.region]

    def _prepare(self, parts: Sequence[Part]) -> None:
        entries = [
            (chunk_key(p.name, p.shape, p.region), DTYPE_NAMES[p.values.dtype], p.values.shape)
            for p in parts
        ]
        head = encode_header(entries, {"format": "pt"})
        # The same parts as last time, which is nearly always: the mapping can stay.
        if head == self._head and self._bytes is not None:
            return
        self.release()
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        size = len(head) + sum(part.values.numel() * part.values.element_size() for part in parts)
        self._bytes = map_new_file(os.path.join(self.folder, self.name), size)
        self._bytes[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        position = len(head)
        for part in parts:
            count = part.values.numel() * part.values.element_size()
            view = self._bytes[position : position + count].view(part.values.dtype)
            self._views.append(view.view(part.values.shape))
            position += count
        if any(part.values.is_cuda for part in parts):
            # Copies from a GPU are asynchronous only into page-locked memory. Where it cannot be
            # locked, they are slower and nothing else.
            status = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), size, 0)
            self._pinned = int(status) == 0
        self._head = head

    def seal(
        self,
        incarnation: str,
        manifest: Manifest,
        tensors: Sequence[list[Any]],
        rng: Mapping[str, Tensor],
    ) -> None:
        """Sums up what `fill` copied and publishes the record. ``tensors``: [name, dtype, whole
        shape] of all of the job's tensors, so that one of which nothing is left is missed. ``rng``:
        random generators, this rank's and those it keeps for another."""
        assert self._bytes is not None, "fill() comes first"
        data = memoryview(self._bytes.numpy().data)
        files = {self.name: {"bytes": len(data), "digest": digest(data)}}
        stored = {name: tensor for name, tensor in rng.items() if tensor.numel()}
        if stored:
            blob = b"".join(encode(list(stored.items()), {"format": "pt"}))
            _write(os.path.join(self.folder, self.rng_name), blob)
            files[self.rng_name] = {"bytes": len(blob), "digest": digest(memoryview(blob))}
        parts = list(self._parts)
        for name, tensor in rng.items():
            shape = tuple(tensor.shape)
            whole = Region.whole(shape)
            parts.append(_describe(Part(name, shape, whole, whole, tensor), self.rng_name))
        common = json.loads(manifest.encode())
        record: dict[str, Any] = {
            "incarnation": incarnation,
            "rank": self.rank,
            "common": {key: common[key] for key in PLAIN},
            "tensors": list(tensors),
            "files": files,
            "parts": parts,
        }
        # With lists for tuples, as it will be read: the checksum is one of that.
        record = json.loads(json.dumps(record))
        record["sha256"] = content_digest(record)
        draft = os.path.join(self.folder, f".{RECORD}")
        _write(draft, json.dumps(record, separators=(",", ":")).encode())
        os.rename(draft, os.path.join(self.folder, RECORD))

    def release(self) -> None:
        """Lets go of the mapping; the file stays where it is."""
        if self._pinned and self._bytes is not None:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._pinned, self._head, self._views, self._bytes = False, b"", [], None


def _describe(part: Part, file: str) -> list[Any]:
    region = [part.region.offsets, part.region.lengths]
    base = [part.base.offsets, part.base.lengths]
    return [part.name, DTYPE_NAMES[part.values.dtype], part.shape, *region, *base, file]


def map_new_file(path: str, size: int) -> Tensor:
    """A new file of ``size`` bytes, in place of any that was there, as a tensor of bytes. Its
    memory is taken now: a full file system is an OSError here, instead of a signal that ends the
    process at the first write."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        os.posix_fallocate(descriptor, 0, size)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def digest(data: memoryview) -> str:
    """SHA-256 in hex over the CRC-32s of ``data``'s blocks: as fast as memory, and good against
    accidents, the only thing that memory of our own is checked for."""
    sums = hashlib.sha256()
    for begin in range(0, len(data), _BLOCK):
        sums.update(zlib.crc32(data[begin : begin + _BLOCK]).to_bytes(4, "little"))
    return sums.hexdigest()


def check_file(folder: str, name: str, expected: StoredFile) -> None:
    """Raises `DamagedCheckpointError` unless the file has the size and the digest of its record."""
    source = LocalFolder(folder).source(name)
    if source.size != expected.bytes:
        raise DamagedCheckpointError(
            f"{name}: {source.size} bytes, its record says {expected.bytes}"
        )
    if digest(memoryview(source.buffer(0, source.size))) != expected.sha256:
        raise DamagedCheckpointError(
            f"{name}: its checksum is not that of its record: altered or damaged"
        )


def find_copies(root: str) -> tuple[list[Found], list[str]]:
    """All sealed copies below ``root``, and a line for each that has no sound record. A missing
    record is no fault to report: that copy was being written."""
    found, faults = [], []
    for slot in slots(root):
        if not os.path.lexists(os.path.join(slot, RECORD)):
            continue
        incarnation = os.path.relpath(slot, root).split(os.sep)[0]
        try:
            found.append(Found(slot, _read_record(slot, incarnation)))
        except DamagedCheckpointError as fault:
            faults.append(f"{os.path.relpath(slot, root)}: {fault}")
    return found, faults


def slots(root: str) -> Iterator[str]:
    """The folders of all buffers below ``root``: INCARNATION/rank-N/slot-N."""
    for incarnation in folders_in(root):
        for rank in folders_in(incarnation):
            yield from folders_in(rank)


def folders_in(path: str) -> list[str]:
    """The folders in ``path``, links not among them, by name; none where it does not exist."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _read_record(slot: str, incarnation: str) -> dict[str, Any]:
    record = parse_json(LocalFolder(slot).read(RECORD, MAX_BYTES), RECORD)
    try:
        require(_check_record(record, incarnation))
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{RECORD}: {type(error).__name__}: {error}") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{RECORD}: {error}") from None
    return record


def _check_record(record: dict[str, Any], incarnation: str) -> Iterator[tuple[object, str]]:
    is_same = record.pop("sha256") == content_digest(record)
    yield is_same, "its own checksum does not match"
    numbers = (record["rank"], record["common"]["step"], record["common"]["world_size"])
    is_own = record["incarnation"] == incarnation and all(map(is_count, numbers))
    yield is_own, "it is that of another copy"
    for name, file in record["files"].items():
        is_described = is_count(file["bytes"]) and isinstance(file["digest"], str)
        # A name with a slash could lead out of the folder.
        yield is_described and os.path.basename(name) == name, "its files are not described"
    listed = isinstance(record["parts"], list) and isinstance(record["tensors"], list)
    yield listed, "its parts are not listed"


def _write(path: str, data: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)

"""What a checkpoint consists of: `Manifest` encodes its list as JSON, and decodes JSON of any
origin into checked data or one error; `Checkpoint` verifies and reads the files.

It lists every file with size and checksum, and every tensor with the rectangles that it is stored
in. Checksums guard against accidents only: whoever alters a checkpoint on purpose recomputes them.
So every name, number and dtype is checked as if hostile, and nothing is imported or instantiated.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel2d.base.exchange import sendable
from parallel2d.base.files import is_count, printable
from parallel2d.base.files.folder import Folder, Progress, open_folder
from parallel2d.base.files.tensor_file import (
    DTYPES,
    ByteSource,
    DamagedCheckpointError,
    Entry,
    check_description,
    parse_json,
    read_header,
    read_rows,
    without_collector,
)
from parallel2d.parallel.weights.geometry import Region, local_part, local_region
from parallel2d.training.progress import LARGEST_COUNT, problems_of_state

FORMAT = 1
MANIFEST = "manifest.json"
MAX_BYTES = 96 * 2**20  # two million chunks, for which a reader needs 2 GiB of memory
_MOST_CORNERS = 1 << 18  # of the chunks of a tensor
_MOST_CUT = 6  # dims along which a tensor is cut
_MOST_AXES = 8
_TRAINED = "global_batch_size"  # in the layout of what the train command saves
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What is stored as it is, and what must be an object.
PLAIN = ("step", "state", "layout", "mesh", "world_size", "optimizer", "tied")
_OBJECTS = ("state", "layout", "mesh", "optimizer", "tied", "tensors", "files")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a tensor and the file that holds it, under `chunk_key`."""

    file: str
    region: Region


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: dtype by safetensors name, whole shape, and the chunks that tile
    it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@sendable
@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 in hex."""

    bytes: int
    sha256: str


@dataclass
class Manifest:
    """A checked manifest.

    ``state`` is what the caller gave to be kept (step, samples, counters), ``layout`` facts about
    the run that wrote it; ``optimizer`` its class, parameter groups and the state that is not
    tensors; ``tied`` maps further names of shared parameters to the one they are stored under.
    """

    step: int
    state: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    world_size: int = 1
    optimizer: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """The JSON text. Numbers that JSON has not (infinity, NaN) become their names."""
        # The position is for people and other programs: `decode` takes it from the state.
        content = {"format": FORMAT, "position": self.state.get("samples")}
        content |= {key: getattr(self, key) for key in PLAIN}
        content["files"] = {name: vars(file) for name, file in self.files.items()}
        tensors = {}
        for name, tensor in self.tensors.items():
            chunks = [[c.file, c.region.offsets, c.region.lengths] for c in tensor.chunks]
            tensors[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks}
        content["tensors"] = tensors
        content = _finite(content)
        content["sha256"] = content_digest(content)
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()

    @classmethod
    @without_collector()
    def decode(cls, data: bytes, what: str = MANIFEST) -> Manifest:
        """Raises `DamagedCheckpointError`, naming ``what``, for anything but a manifest that
        `encode` could have written."""
        if len(data) > MAX_BYTES:
            raise DamagedCheckpointError(f"{what}: {len(data)} bytes, more than {MAX_BYTES}")
        content = parse_json(data, what)
        try:
            _check_own_digest(content)
            _check_facts(content)
            files = {name: _decode_file(name, item) for name, item in content["files"].items()}
            tensors, stored = {}, content["tensors"]
            # One by one, or both forms of all of them would be in memory.
            for name in list(stored):
                tensors[name] = _decode_tensor(name, stored.pop(name), files, what)
            for name, other in content["tied"].items():
                if not isinstance(other, str) or f"model/{other}" not in tensors:
                    raise ValueError(
                        f"{printable(name)} is tied to {printable(other)}, which is not stored"
                    )
        except DamagedCheckpointError:
            raise
        except ValueError as error:
            raise DamagedCheckpointError(f"{what}: {error}") from None
        return cls(**{key: content[key] for key in PLAIN}, tensors=tensors, files=files)


class Checkpoint:
    """A readable checkpoint. Before a value is used, the manifest is compared with the sizes and
    headers of the files; every method raises `DamagedCheckpointError` when they do not match."""

    def __init__(self, folder: Folder, manifest: Manifest, *, exact: bool = True) -> None:
        """``exact=False``: files may hold more than the manifest takes from them."""
        self.folder, self.manifest, self._exact = folder, manifest, exact
        self._files: dict[str, tuple[ByteSource, dict[str, Entry]]] = {}
        # File -> chunk -> dtype and shape.
        self._expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                described = self._expected.setdefault(chunk.file, {})
                key = chunk_key(name, tensor.shape, chunk.region)
                described[key] = tensor.dtype, chunk.region.lengths

    @classmethod
    def open(cls, path: str, mapped: bool = True) -> Checkpoint:
        """The checkpoint at a local path or fsspec address; its manifest is checked, its files are
        not yet."""
        folder = open_folder(path, mapped)
        return cls(
            folder, Manifest.decode(folder.read(MANIFEST, MAX_BYTES), f"{folder.label}/{MANIFEST}")
        )

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.manifest.tensors

    def _file(self, name: str) -> tuple[ByteSource, dict[str, Entry]]:
        if name in self._files:
            return self._files[name]
        what = f"{self.folder.label}/{name}"
        source, size = self.folder.source(name), self.manifest.files[name].bytes
        if source.size != size:
            raise DamagedCheckpointError(f"{what}: {source.size} bytes, the manifest says {size}")
        header = read_header(source, what)
        # Of the right size, the file may still be that of another checkpoint.
        found = {key: (entry.dtype, entry.shape) for key, entry in header.items()}
        expected = self._expected.get(name, {})
        if not self._exact:
            found = {key: found[key] for key in expected if key in found}
        if found != expected:
            wrong = min(key for key, _ in found.items() ^ expected.items())
            there, told = found.get(wrong, "not there"), expected.get(wrong, "not there")
            raise DamagedCheckpointError(
                f"{what}: {printable(wrong)} is {there}, the manifest says {told}"
            )
        self._files[name] = source, header
        return source, header

    def verify(self, files: list[str] | None = None, progress: Progress | None = None) -> None:
        """Checks size, structure and SHA-256 of ``files`` (default all). ``progress`` gets the
        bytes read since the last call."""
        for name in self.manifest.files if files is None else files:
            self._file(name)
            if self.folder.digest(name, progress) != self.manifest.files[name].sha256:
                raise DamagedCheckpointError(
                    f"{self.folder.label}/{name}: its SHA-256 is not the manifest's: altered or "
                    "damaged"
                )

    def copy_into(self, name: str, region: Region, destination: Tensor) -> None:
        """Fills ``destination``, of the shape of ``region``, with that rectangle of the tensor;
        dtypes are converted."""
        tensor = self.tensors[name]
        for chunk in tensor.chunks:
            common = chunk.region.intersect(region)
            if common is None:
                continue
            source, header = self._file(chunk.file)
            entry = header[chunk_key(name, tensor.shape, chunk.region)]
            # Whole rows are read: those are consecutive in the file. A tensor without dims is one.
            rows, *others = common.slices_in(chunk.region) or (slice(0, 1),)
            values = read_rows(source, entry, rows.start, rows.stop)
            for dim, part in enumerate(others, start=1):
                values = values.narrow(dim, part.start, part.stop - part.start)
            destination[common.slices_in(region)].copy_(values)

    def fill(self, tensor: Tensor, name: str) -> None:
        """Copies this rank's part of the stored tensor ``name``, of the same shape, into
        ``tensor``."""
        region = local_region(tensor)
        if region.numel:
            self.copy_into(name, region, local_part(tensor.detach()).view(region.lengths))

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A tensor, or a rectangle of it, on CPU in its stored dtype."""
        tensor = self.tensors[name]
        region = region or Region.whole(tensor.shape)
        result = torch.empty(region.lengths, dtype=DTYPES[tensor.dtype])
        self.copy_into(name, region, result)
        return result


# These raise ValueError for what `Manifest.encode` does not write.


def _check_own_digest(content: dict[str, Any]) -> None:
    version = content.get("format")
    if version != FORMAT:
        raise ValueError(
            f"format {printable(version)} is not the format {FORMAT} that this version reads"
        )
    digest = content.pop("sha256", None)
    if digest != content_digest(content):
        raise ValueError("its own checksum does not match: it was altered or damaged")


def _check_facts(content: dict[str, Any]) -> None:
    for key in _OBJECTS:
        if not isinstance(content.get(key), dict):
            raise ValueError(f"{key} is missing or not an object")
    counts: list[Any] = [content.get("step"), content.get("world_size")]
    if not all(map(is_count, counts)):
        raise ValueError("step and world_size must be whole numbers")
    if max(counts) > LARGEST_COUNT:
        raise ValueError("step or world_size is larger than any")
    _check_mesh(content["mesh"], content["world_size"])
    # The state of somebody's own loop may hold anything.
    if _TRAINED in content["layout"]:
        problems = problems_of_state(content["state"], content["step"])
        if problems:
            raise ValueError(f"no run can continue from its state: {'; '.join(problems[:4])}")


def _check_mesh(mesh: dict[str, Any], world_size: int) -> None:
    if len(mesh) > _MOST_AXES or any(len(axis) > 100 for axis in mesh):
        raise ValueError("mesh has more axes than any")
    if not all(map(is_count, mesh.values())):
        raise ValueError("mesh must give whole numbers")
    if mesh and math.prod(mesh.values()) != world_size:
        raise ValueError(f"a mesh of {printable(mesh)} is not one of {world_size} ranks")


def _decode_file(name: str, item: Any) -> StoredFile:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{printable(name)!r} cannot be the name of a file of a checkpoint")
    if not isinstance(item, dict) or not is_count(item.get("bytes")):
        raise ValueError(f"the size of {name} is missing or impossible")
    if not isinstance(item.get("sha256"), str) or not _SHA256.fullmatch(item["sha256"]):
        raise ValueError(f"the checksum of {name} is missing or impossible")
    return StoredFile(item["bytes"], item["sha256"])


def _decode_tensor(
    name: str, item: Any, files: Mapping[str, StoredFile], what: str
) -> StoredTensor:
    described = isinstance(item, dict) and set(item) == {"dtype", "shape", "chunks"}
    if not described or not isinstance(item["chunks"], list):
        raise ValueError(f"{printable(name)} is not described by dtype, shape and chunks")
    check_description(name, item["dtype"], item["shape"], what)
    shape = tuple(item["shape"])
    try:
        chunks = tuple([_decode_chunk(chunk, shape, files) for chunk in item["chunks"]])
        check_tiling(shape, [chunk.region for chunk in chunks])
    except ValueError as error:
        raise ValueError(f"{printable(name)}: {error}") from None
    return StoredTensor(item["dtype"], shape, chunks)


def _decode_chunk(item: Any, shape: tuple[int, ...], files: Mapping[str, StoredFile]) -> Chunk:
    is_described = isinstance(item, list) and len(item) == 3 and isinstance(item[0], str)
    if not is_described or item[0] not in files:
        raise ValueError("a chunk names no file of this checkpoint")
    file, offsets, lengths = item
    for numbers in (offsets, lengths):
        if not isinstance(numbers, list) or len(numbers) != len(shape):
            raise ValueError("a chunk has impossible offsets or lengths")
        if not all(map(is_count, numbers)):
            raise ValueError("a chunk has impossible offsets or lengths")
    for begin, length, size in zip(offsets, lengths, shape, strict=True):
        if begin + length > size:
            raise ValueError(f"a chunk reaches outside of its shape {list(shape)}")
    return Chunk(file, Region(tuple(offsets), tuple(lengths)))


def check_tiling(shape: Sequence[int], regions: Sequence[Region]) -> None:
    """Raises ValueError unless ``regions``, all inside ``shape``, cover it exactly once.

    Takes linear time. Of each region the corners are counted, those with an odd number of ends
    below zero. The counts of all regions at each point equal those of the whole if and only if
    every element is covered once: they are the mixed difference of how often it is covered.
    """
    sizes = [region.numel for region in regions]
    if 0 in sizes:
        raise ValueError("it has an empty chunk")
    if sum(sizes) != math.prod(shape):
        raise ValueError(f"its chunks do not cover its shape {list(shape)} exactly once")
    # One chunk of that size is the whole.
    if len(regions) < 2:
        return
    cut = [dim for dim, size in enumerate(shape) if {r.lengths[dim] for r in regions} != {size}]
    if not cut:
        raise ValueError("it is stored twice")
    # Every region has two ends along each of these dims.
    corners_to_count = len(regions) << len(cut)
    if len(cut) > _MOST_CUT or corners_to_count > max(_MOST_CORNERS, 4 * len(regions)):
        raise ValueError(f"it is cut into {len(regions)} chunks along {len(cut)} dims")
    if not _cover_each_once(shape, regions, cut):
        raise ValueError("its chunks overlap")


def _cover_each_once(shape: Sequence[int], regions: Sequence[Region], cut: Sequence[int]) -> bool:
    corners: Counter[tuple[int, ...]] = Counter()
    for region in regions:
        _count_corners(corners, region, cut, 1)
    _count_corners(corners, Region.whole(shape), cut, -1)
    return not any(corners.values())


def _count_corners(
    corners: Counter[tuple[int, ...]], region: Region, dims: Sequence[int], sign: int
) -> None:
    """Adds ``sign`` at the corners of ``region`` along ``dims``, and subtracts it at those with an
    odd number of ends."""
    ends = [(region.offsets[dim], region.offsets[dim] + region.lengths[dim]) for dim in dims]
    for which in itertools.product((0, 1), repeat=len(dims)):
        corner = tuple(pair[end] for pair, end in zip(ends, which, strict=True))
        corners[corner] += -sign if sum(which) % 2 else sign


def content_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 over the sorted JSON of a manifest without its ``sha256``."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def chunk_key(name: str, shape: Sequence[int], region: Region) -> str:
    """The name of a chunk inside its file: the tensor's own when it is all of it, otherwise with
    the offsets behind ``@``."""
    if region.lengths == tuple(shape):
        return name
    return f"{name}@{','.join(map(str, region.offsets))}"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        "a checkpoint's manifest keeps numbers, strings, lists and dicts, not "
        f"{type(value).__name__}"
    )

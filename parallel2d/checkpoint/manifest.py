"""The manifest, which lists what a checkpoint consists of: `Manifest` encodes it as JSON, and
decodes JSON of any origin into checked data or one error.

It lists every file with size and checksum, and every tensor with the rectangles that it is stored
in. Its own checksum and those of the files guard against accidents only: whoever alters a
checkpoint on purpose recomputes them. So every name, number and dtype is checked as if hostile, and
nothing in a manifest is ever imported, instantiated or used as a path outside of its folder.
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

from parallel2d import files
from parallel2d.exchange import sendable
from parallel2d.files import is_count
from parallel2d.files.tensor_file import (
    DamagedCheckpointError,
    check_description,
    parse_json,
    printable,
)
from parallel2d.progress import LARGEST_COUNT, problems_of_state
from parallel2d.weights.geometry import Region

FORMAT = 1
NAME = "manifest.json"
MAX_BYTES = 256 * 2**20
_MOST_CORNERS = 1 << 18  # of the chunks of a tensor
_MOST_CUT = 6  # dims along which a tensor is cut
_MOST_AXES = 8
_TRAINED = "global_batch_size"  # in the layout of what the train command saves
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What is stored as it is, and what must be an object.
PLAIN = ("step", "state", "layout", "mesh", "world_size", "optimizer", "tied")
_OBJECTS = ("state", "layout", "mesh", "optimizer", "tied", "tensors", "files")


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor and the file that holds it, under `chunk_key`."""

    file: str
    region: Region


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: dtype by safetensors name, whole shape, and the chunks that tile
    it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def encode(self) -> dict[str, Any]:
        """What `Manifest.encode` writes of it."""
        chunks = [[c.file, c.region.offsets, c.region.lengths] for c in self.chunks]
        return {"dtype": self.dtype, "shape": self.shape, "chunks": chunks}


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
        content["tensors"] = {name: tensor.encode() for name, tensor in self.tensors.items()}
        content = _finite(content)
        content["sha256"] = content_digest(content)
        return json.dumps(content, allow_nan=False, indent=None, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, what: str = NAME) -> Manifest:
        """Raises `DamagedCheckpointError`, naming ``what``, for anything but a manifest that
        `encode` could have written."""
        content = parse_json(data, what)
        _check_own_digest(content, what)
        for key in _OBJECTS:
            if not isinstance(content.get(key), dict):
                raise DamagedCheckpointError(f"{what}: {key} is missing or not an object")
            check_depth(content[key], what)
        _check_counts(content, what)
        _check_mesh(content["mesh"], content["world_size"], what)
        _check_state(content, what)
        files = {name: _decode_file(name, item, what) for name, item in content["files"].items()}
        tensors = {
            name: _decode_tensor(name, item, files, what)
            for name, item in content["tensors"].items()
        }
        _check_ties(content["tied"], tensors, what)
        plain = {key: content[key] for key in PLAIN}
        return cls(**plain, tensors=tensors, files=files)


def _check_own_digest(content: dict[str, Any], what: str) -> None:
    version = content.get("format")
    if version != FORMAT:
        raise DamagedCheckpointError(
            f"{what}: format {printable(version)} is not the format {FORMAT} that this version "
            "reads"
        )
    rest = {key: value for key, value in content.items() if key != "sha256"}
    try:
        digest = content_digest(rest)
    except RecursionError:
        raise DamagedCheckpointError(f"{what}: nested too deeply") from None
    if content.get("sha256") != digest:
        raise DamagedCheckpointError(
            f"{what}: its own checksum does not match: it was altered or damaged"
        )


def _check_counts(content: dict[str, Any], what: str) -> None:
    counts: list[Any] = [content.get("step"), content.get("world_size")]
    if not all(map(is_count, counts)):
        raise DamagedCheckpointError(f"{what}: step and world_size must be whole numbers")
    if max(counts) > LARGEST_COUNT:
        raise DamagedCheckpointError(f"{what}: step or world_size is larger than any")


def _check_mesh(mesh: dict[str, Any], world_size: int, what: str) -> None:
    if len(mesh) > _MOST_AXES or any(len(axis) > 100 for axis in mesh):
        raise DamagedCheckpointError(f"{what}: mesh has more axes than any")
    if not all(map(is_count, mesh.values())):
        raise DamagedCheckpointError(f"{what}: mesh must give whole numbers")
    if mesh and math.prod(mesh.values()) != world_size:
        raise DamagedCheckpointError(
            f"{what}: a mesh of {printable(mesh)} is not one of {world_size} ranks"
        )


def _check_state(content: dict[str, Any], what: str) -> None:
    # The state of somebody's own loop may hold anything.
    if _TRAINED not in content["layout"]:
        return
    problems = problems_of_state(content["state"], content["step"])
    if problems:
        raise DamagedCheckpointError(
            f"{what}: its state cannot be gone on from: {'; '.join(problems[:4])}"
        )


def _check_ties(tied: dict[str, Any], tensors: Mapping[str, StoredTensor], what: str) -> None:
    for name, other in tied.items():
        if not isinstance(other, str) or f"model/{other}" not in tensors:
            raise DamagedCheckpointError(
                f"{what}: {printable(name)} is tied to {printable(other)}, which is not stored"
            )


def check_depth(value: Any, what: str) -> None:
    """Raises `DamagedCheckpointError` when lists and dicts nest deeper than any code that walks
    them expects."""
    try:
        files.check_depth(value)
    except ValueError as error:
        raise DamagedCheckpointError(f"{what}: {error}") from None


def content_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 over the sorted JSON of a manifest without its ``sha256``."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def chunk_key(name: str, shape: Sequence[int], region: Region) -> str:
    """The name of a chunk inside its file: the tensor's own when it is all of it, otherwise with
    the offsets behind ``@``."""
    if region == Region.whole(shape):
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


def _decode_file(name: str, item: Any, what: str) -> StoredFile:
    if not _FILE_NAME.fullmatch(name):
        raise DamagedCheckpointError(
            f"{what}: {printable(name)!r} cannot be the name of a file of a checkpoint"
        )
    if not isinstance(item, dict) or not is_count(item.get("bytes")):
        raise DamagedCheckpointError(f"{what}: the size of {name} is missing or impossible")
    if not isinstance(item.get("sha256"), str) or not _SHA256.fullmatch(item["sha256"]):
        raise DamagedCheckpointError(f"{what}: the checksum of {name} is missing or impossible")
    return StoredFile(item["bytes"], item["sha256"])


def _decode_tensor(
    name: str, item: Any, files: Mapping[str, StoredFile], what: str
) -> StoredTensor:
    described = isinstance(item, dict) and set(item) == {"dtype", "shape", "chunks"}
    if not described or not isinstance(item["chunks"], list):
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} is not described by dtype, shape and chunks"
        )
    check_description(name, item["dtype"], item["shape"], what)
    shape = tuple(item["shape"])
    label = f"{what}: a chunk of {printable(name)}"
    chunks = tuple(_decode_chunk(chunk, shape, files, label) for chunk in item["chunks"])
    check_tiling(name, shape, [chunk.region for chunk in chunks], what)
    return StoredTensor(item["dtype"], shape, chunks)


def _decode_chunk(
    item: Any, shape: tuple[int, ...], files: Mapping[str, StoredFile], label: str
) -> Chunk:
    is_described = isinstance(item, list) and len(item) == 3 and isinstance(item[0], str)
    if not is_described or item[0] not in files:
        raise DamagedCheckpointError(f"{label} names no file of this checkpoint")
    file, offsets, lengths = item
    for numbers in (offsets, lengths):
        sizes = isinstance(numbers, list) and all(map(is_count, numbers))
        if not sizes or len(numbers) != len(shape):
            raise DamagedCheckpointError(f"{label} has impossible offsets or lengths")
    for begin, length, size in zip(offsets, lengths, shape, strict=True):
        if begin + length > size:
            raise DamagedCheckpointError(f"{label} reaches outside of its shape {list(shape)}")
    return Chunk(file, Region(tuple(offsets), tuple(lengths)))


def check_tiling(name: str, shape: Sequence[int], regions: Sequence[Region], what: str) -> None:
    """Raises `DamagedCheckpointError` unless ``regions``, all inside ``shape``, cover it exactly
    once.

    Takes time linear in the number of regions. Of each region the corners are counted, those with
    an odd number of ends below zero. The counts of all regions at each point equal those of the
    whole if and only if every element is covered once: they are the mixed difference of how often
    it is covered. Dims that no region cuts are left out.
    """
    sizes = [region.numel for region in regions]
    if 0 in sizes:
        raise DamagedCheckpointError(f"{what}: {printable(name)} has an empty chunk")
    if sum(sizes) != math.prod(shape):
        raise DamagedCheckpointError(
            f"{what}: the chunks of {printable(name)} do not cover its shape {list(shape)} exactly "
            "once"
        )
    cut = [dim for dim in range(len(shape)) if _is_cut(dim, shape, regions)]
    if len(regions) > 1 and not cut:
        raise DamagedCheckpointError(f"{what}: {printable(name)} is stored twice")
    # Every region has two ends along each of these dims.
    corners_to_count = len(regions) << len(cut)
    if len(cut) > _MOST_CUT or corners_to_count > max(_MOST_CORNERS, 4 * len(regions)):
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} is cut into {len(regions)} chunks along {len(cut)} dims"
        )
    if not _cover_each_once(regions, shape, cut):
        raise DamagedCheckpointError(f"{what}: chunks of {printable(name)} overlap")


def _cover_each_once(regions: Sequence[Region], shape: Sequence[int], cut: Sequence[int]) -> bool:
    """Whether every element is in one region; see `check_tiling`. ``cut``: dims that are cut."""
    corners: Counter[tuple[int, ...]] = Counter()
    for region in regions:
        _count_corners(corners, region, cut, 1)
    # A tensor without elements has no regions, so there is nothing to subtract.
    if regions:
        _count_corners(corners, Region.whole(shape), cut, -1)
    return not any(corners.values())


def _is_cut(dim: int, shape: Sequence[int], regions: Sequence[Region]) -> bool:
    return any(region.lengths[dim] != shape[dim] for region in regions)


def _count_corners(
    corners: Counter[tuple[int, ...]], region: Region, dims: Sequence[int], sign: int
) -> None:
    """Adds ``sign`` at the corners of ``region`` along ``dims``, and subtracts it at those with an
    odd number of ends."""
    ends = [(region.offsets[dim], region.offsets[dim] + region.lengths[dim]) for dim in dims]
    for which in itertools.product((0, 1), repeat=len(dims)):
        corner = tuple(pair[end] for pair, end in zip(ends, which, strict=True))
        corners[corner] += -sign if sum(which) % 2 else sign

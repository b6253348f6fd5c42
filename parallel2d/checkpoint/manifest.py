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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel2d import files
from parallel2d.exchange import sendable
from parallel2d.files.tensor_file import (
    DamagedCheckpointError,
    check_description,
    is_size,
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
        content: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "position": self.state.get("samples"),
            "mesh": self.mesh,
            "world_size": self.world_size,
            "state": self.state,
            "layout": self.layout,
            "optimizer": self.optimizer,
            "tied": self.tied,
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "chunks": [[c.file, c.region.offsets, c.region.lengths] for c in tensor.chunks],
                }
                for name, tensor in self.tensors.items()
            },
            "files": {
                name: {"bytes": file.bytes, "sha256": file.sha256}
                for name, file in self.files.items()
            },
        }
        content = _finite(content)
        content["sha256"] = content_digest(content)
        return json.dumps(content, allow_nan=False, indent=None, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, what: str = NAME) -> Manifest:
        """Raises `DamagedCheckpointError`, naming ``what``, for anything but a manifest that
        `encode` could have written."""
        content = parse_json(data, what)
        version = content.get("format")
        if version != FORMAT:
            raise DamagedCheckpointError(
                f"{what}: format {printable(version)} is not the format {FORMAT} that this version "
                "reads"
            )
        try:
            digest = content_digest({k: v for k, v in content.items() if k != "sha256"})
        except RecursionError:
            raise DamagedCheckpointError(f"{what}: nested too deeply") from None
        if content.get("sha256") != digest:
            raise DamagedCheckpointError(
                f"{what}: its own checksum does not match: it was altered or damaged"
            )
        kinds = {
            "state": dict,
            "layout": dict,
            "mesh": dict,
            "optimizer": dict,
            "tied": dict,
            "tensors": dict,
            "files": dict,
        }
        for key, kind in kinds.items():
            if not isinstance(content.get(key), kind):
                raise DamagedCheckpointError(f"{what}: {key} is missing or not an object")
            check_depth(content[key], what)
        if not is_size(content.get("step")) or not is_size(content.get("world_size")):
            raise DamagedCheckpointError(f"{what}: step and world_size must be whole numbers")
        world = content["world_size"]
        if len(content["mesh"]) > _MOST_AXES or any(len(axis) > 100 for axis in content["mesh"]):
            raise DamagedCheckpointError(f"{what}: mesh has more axes than any")
        if not all(is_size(size) for size in content["mesh"].values()):
            raise DamagedCheckpointError(f"{what}: mesh must give whole numbers")
        if content["mesh"] and math.prod(content["mesh"].values()) != world:
            raise DamagedCheckpointError(
                f"{what}: a mesh of {printable(content['mesh'])} is not one of {world} ranks"
            )
        if content["step"] > LARGEST_COUNT or content["world_size"] > LARGEST_COUNT:
            raise DamagedCheckpointError(f"{what}: step or world_size is larger than any")
        if _TRAINED in content["layout"] and (
            problems := problems_of_state(content["state"], content["step"])
        ):
            raise DamagedCheckpointError(
                f"{what}: its state cannot be gone on from: {'; '.join(problems[:4])}"
            )
        files = {name: _decode_file(name, item, what) for name, item in content["files"].items()}
        tensors = {
            name: _decode_tensor(name, item, files, what)
            for name, item in content["tensors"].items()
        }
        for name, other in content["tied"].items():
            if not isinstance(other, str) or f"model/{other}" not in tensors:
                raise DamagedCheckpointError(
                    f"{what}: {printable(name)} is tied to {printable(other)}, which is not stored"
                )
        return cls(
            step=content["step"],
            state=content["state"],
            layout=content["layout"],
            mesh=content["mesh"],
            world_size=content["world_size"],
            optimizer=content["optimizer"],
            tied=content["tied"],
            tensors=tensors,
            files=files,
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
    if not isinstance(item, dict) or not is_size(item.get("bytes")):
        raise DamagedCheckpointError(f"{what}: the size of {name} is missing or impossible")
    if not isinstance(item.get("sha256"), str) or not _SHA256.fullmatch(item["sha256"]):
        raise DamagedCheckpointError(f"{what}: the checksum of {name} is missing or impossible")
    return StoredFile(item["bytes"], item["sha256"])


def _decode_tensor(
    name: str, item: Any, files: Mapping[str, StoredFile], what: str
) -> StoredTensor:
    if (
        not isinstance(item, dict)
        or set(item) != {"dtype", "shape", "chunks"}
        or not isinstance(item["chunks"], list)
    ):
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} is not described by dtype, shape and chunks"
        )
    check_description(name, item["dtype"], item["shape"], what)
    shape = tuple(item["shape"])
    chunks = []
    for chunk in item["chunks"]:
        if (
            not isinstance(chunk, list)
            or len(chunk) != 3
            or not isinstance(chunk[0], str)
            or chunk[0] not in files
        ):
            raise DamagedCheckpointError(
                f"{what}: a chunk of {printable(name)} names no file of this checkpoint"
            )
        for numbers in chunk[1:]:
            if (
                not isinstance(numbers, list)
                or len(numbers) != len(shape)
                or not all(map(is_size, numbers))
            ):
                raise DamagedCheckpointError(
                    f"{what}: a chunk of {printable(name)} has impossible offsets or lengths"
                )
        region = Region(tuple(chunk[1]), tuple(chunk[2]))
        if any(
            begin + length > size for begin, length, size in zip(*chunk[1:], shape, strict=True)
        ):
            raise DamagedCheckpointError(
                f"{what}: a chunk of {printable(name)} reaches outside of its shape {list(shape)}"
            )
        chunks.append(Chunk(chunk[0], region))
    check_tiling(name, shape, [chunk.region for chunk in chunks], what)
    return StoredTensor(item["dtype"], shape, tuple(chunks))


def check_tiling(name: str, shape: Sequence[int], regions: Sequence[Region], what: str) -> None:
    """Raises `DamagedCheckpointError` unless ``regions``, all inside ``shape``, cover it exactly
    once.

    Takes time linear in the number of regions. Of each region the corners are counted, those with
    an odd number of ends below zero. The counts of all regions at each point equal those of the
    whole if and only if every element is covered once: they are the mixed difference of how often
    it is covered. Dims that no region cuts are left out.
    """
    if any(region.numel == 0 for region in regions):
        raise DamagedCheckpointError(f"{what}: {printable(name)} has an empty chunk")
    if sum(region.numel for region in regions) != math.prod(shape):
        raise DamagedCheckpointError(
            f"{what}: the chunks of {printable(name)} do not cover its shape {list(shape)} exactly "
            "once"
        )
    if not regions:
        return
    cut = [
        dim
        for dim, size in enumerate(shape)
        if any(region.lengths[dim] != size for region in regions)
    ]
    if len(regions) > 1 and not cut:
        raise DamagedCheckpointError(f"{what}: {printable(name)} is stored twice")
    if len(cut) > _MOST_CUT or len(regions) << len(cut) > max(_MOST_CORNERS, 4 * len(regions)):
        raise DamagedCheckpointError(
            f"{what}: {printable(name)} is cut into {len(regions)} chunks along {len(cut)} dims"
        )
    corners: dict[tuple[int, ...], int] = {}
    for region, sign in [(Region.whole(shape), -1), *((region, 1) for region in regions)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(
                region.offsets[dim] + end * region.lengths[dim]
                for dim, end in zip(cut, ends, strict=True)
            )
            corners[corner] = corners.get(corner, 0) + (-sign if sum(ends) % 2 else sign)
    if any(corners.values()):
        raise DamagedCheckpointError(f"{what}: chunks of {printable(name)} overlap")

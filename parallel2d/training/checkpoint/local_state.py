"""One rank's part of a run's state as one file: `pack` lays the file out, `Staging` holds it, and
`LocalState` reads it on a rank at the same position of any replica with the same state.

In-memory checkpoints are such files, a joining replica receives them from another replica, and a
checkpoint on disk consists of one file per rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel2d.base.device import synchronize
from parallel2d.base.files.folder import Progress
from parallel2d.base.files.tensor_file import DTYPE_NAMES, DamagedCheckpointError, encode_header
from parallel2d.parallel.weights.geometry import Region, local_part, local_region
from parallel2d.training.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    Chunk,
    Manifest,
    StoredTensor,
    chunk_key,
)
from parallel2d.training.checkpoint.storage import step_name

STATE = "state.safetensors"
_ROOM = 2**16  # bytes of spare room: numbers in the header and generator states may grow


class Part(NamedTuple):
    """A rectangle of the tensor ``name`` with the unsharded ``shape``, and its values."""

    name: str
    shape: torch.Size
    region: Region
    values: Tensor


def local_parts(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yield this rank's part of each tensor."""
    for name, tensor in tensors.items():
        yield Part(name, tensor.shape, local_region(tensor), local_part(tensor.detach()))


def pack(parts: Iterable[Part], file: str = STATE) -> tuple[dict[str, StoredTensor], list[Tensor]]:
    """Return the manifest entries of these parts, and the blocks of their ``file``: a header on
    CPU, then the values on their device."""
    stored, entries, blocks = {}, [], []
    # Wide dtypes come first, so that every tensor begins at a multiple of its element size.
    for name, shape, region, values in sorted(parts, key=lambda each: -each.values.element_size()):
        dtype = DTYPE_NAMES[values.dtype]
        chunks: tuple[Chunk, ...] = ()
        if region.numel:
            chunks = (Chunk(file, region),)
            entries.append((chunk_key(name, shape, region), dtype, region.lengths))
            blocks.append(values)
        stored[name] = StoredTensor(dtype, tuple(shape), chunks)
    return stored, [as_bytes(encode_header(entries, {"format": "pt"})), *blocks]


class Staging:
    """A CPU buffer for a packed file, allocated once; pinned if the tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, blocks: Sequence[Tensor]) -> Tensor:
        """Copy the blocks into the buffer, one after the other."""
        sizes = [block.nbytes for block in blocks]
        types = {block.device.type for block in blocks} - {"cpu"}
        on_device = bool(types)
        total = sum(sizes)
        if self._buffer.numel() < total:
            self._buffer = torch.empty(total + _ROOM, dtype=torch.uint8, pin_memory=on_device)
        staged = self._buffer[:total]
        for block, piece in zip(blocks, staged.split(sizes), strict=True):
            # `copy_` makes a block contiguous, so that no second copy of all blocks exists.
            piece.view(block.dtype).view(block.shape).copy_(block, non_blocking=on_device)
        # Copies into pinned memory are asynchronous, and training soon changes the values.
        for device_type in types:
            synchronize(device_type)
        return staged


def as_bytes(data: bytes) -> Tensor:
    """Return ``data`` as a tensor of uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _InMemory:
    """The folder of a `Checkpoint` with a single file, held in a tensor of uint8."""

    def __init__(self, label: str, data: Tensor) -> None:
        self.label, self.size, self._data = label, data.numel(), memoryview(data.numpy().data)

    def source(self, name: str) -> _InMemory:
        return self

    def digest(self, name: str, progress: Progress | None = None) -> str:
        return hashlib.sha256(self._data).hexdigest()

    def buffer(self, begin: int, end: int) -> Any:
        return self._data[begin:end]


class LocalState(Checkpoint):
    """A checkpoint that describes every tensor and has one rank's part of each, in the file
    `STATE`."""

    def __init__(self, manifest: Manifest, data: Tensor, label: str) -> None:
        # State of replicas in this file belongs to a single replica. Without a mesh it reads like
        # the state of a run with one replica, and no state of other replicas counts as missing.
        folder: Any = _InMemory(label, data)
        super().__init__(folder, dataclasses.replace(manifest, mesh={}))

    @classmethod
    def from_bytes(cls, manifest: Tensor, data: Tensor, mesh: dict[str, int]) -> LocalState:
        """Decode manifest and data of any origin, and verify them. Raises `DamagedCheckpointError`
        for damaged data and for a mesh other than ``mesh``."""
        decoded = Manifest.decode(manifest.numpy().tobytes(), MANIFEST, local=True)
        state = cls(decoded, data, f"{step_name(decoded.step)} from memory")
        if decoded.mesh != mesh:
            raise DamagedCheckpointError(f"{state.folder.label} was saved on another mesh")
        state.verify()
        return state

    def copy_into(self, name: str, region: Region, destination: Tensor) -> None:
        held = [chunk.region for chunk in self.tensors[name].chunks]
        if held != ([region] if region.numel else []):
            raise DamagedCheckpointError(
                f"{self.folder.label} has {held} of {name}, and not {region}: the layout differs"
            )
        super().copy_into(name, region, destination)

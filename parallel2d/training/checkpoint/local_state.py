"""What one rank has of a run's state, as one file: `pack` lays it out, `Staging` holds it, and
`LocalState` reads it again on the rank in the same place, of any replica that has the same. Copies
in memory are such files, a replica that joins others takes theirs, and a checkpoint on disk has one
of each rank.
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
_ROOM = 2**16  # bytes by which a file may grow: numbers in its header, states of generators


class Part(NamedTuple):
    """A rectangle of the tensor ``name``, of this whole shape, and the values in it."""

    name: str
    shape: torch.Size
    region: Region
    values: Tensor


def local_parts(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    """What this rank has of each."""
    for name, tensor in tensors.items():
        yield Part(name, tensor.shape, local_region(tensor), local_part(tensor.detach()))


def pack(parts: Iterable[Part], file: str = STATE) -> tuple[dict[str, StoredTensor], list[Tensor]]:
    """Returns what a manifest says of these parts, and the blocks that make up their ``file``: a
    header, then the values, on whatever device."""
    stored, entries, blocks = {}, [], []
    # The widest first, so that each begins at a multiple of its own width.
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
    """A buffer on CPU that holds a packed file, allocated once (page-locked beside a GPU)."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, blocks: Sequence[Tensor]) -> Tensor:
        """Copies the blocks, one after the other."""
        sizes = [block.nbytes for block in blocks]
        types = {block.device.type for block in blocks} - {"cpu"}
        on_device = bool(types)
        total = sum(sizes)
        if self._buffer.numel() < total:
            self._buffer = torch.empty(total + _ROOM, dtype=torch.uint8, pin_memory=on_device)
        staged = self._buffer[:total]
        for block, piece in zip(blocks, staged.split(sizes), strict=True):
            # One without gaps is made here alone.
            piece.view(block.dtype).view(block.shape).copy_(block, non_blocking=on_device)
        # Copies into page-locked memory run beside this thread, and training would change values.
        for device_type in types:
            synchronize(device_type)
        return staged


def as_bytes(data: bytes) -> Tensor:
    """``data`` as a tensor of uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _InMemory:
    """The folder of a `Checkpoint` whose one file is in a tensor of uint8."""

    def __init__(self, label: str, data: Tensor) -> None:
        self.label, self.size, self._data = label, data.numel(), memoryview(data.numpy().data)

    def source(self, name: str) -> _InMemory:
        return self

    def digest(self, name: str, progress: Progress | None = None) -> str:
        return hashlib.sha256(self._data).hexdigest()

    def buffer(self, begin: int, end: int) -> Any:
        return self._data[begin:end]


class LocalState(Checkpoint):
    """Every tensor of a checkpoint, and of each the part that one rank has, in the file `STATE`."""

    def __init__(self, manifest: Manifest, data: Tensor, label: str) -> None:
        # What is here of replicas is of this rank's own alone: as with one replica, nothing of
        # another one is missing.
        folder: Any = _InMemory(label, data)
        super().__init__(folder, dataclasses.replace(manifest, mesh={}))

    @classmethod
    def from_bytes(cls, manifest: Tensor, data: Tensor, mesh: dict[str, int]) -> LocalState:
        """Checks both, whose origin may be any, and that they are of a ``mesh`` as here. Raises
        `DamagedCheckpointError`."""
        decoded = Manifest.decode(manifest.numpy().tobytes(), MANIFEST, local=True)
        state = cls(decoded, data, f"{step_name(decoded.step)} from memory")
        if decoded.mesh != mesh:
            raise DamagedCheckpointError(f"{state.folder.label} is of another mesh")
        state.verify()
        return state

    def copy_into(self, name: str, region: Region, destination: Tensor) -> None:
        held = [chunk.region for chunk in self.tensors[name].chunks]
        if held != ([region] if region.numel else []):
            raise DamagedCheckpointError(
                f"{self.folder.label} has {held} of {name}, and not {region}: the layout is another"
            )
        super().copy_into(name, region, destination)

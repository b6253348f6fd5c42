"""What one rank has of a run's state, as one file: `pack` lays it out, and `LocalState` reads it
again on the rank in the same place, of any replica that has the same. Copies in memory are such
files, and a replica that joins others takes theirs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallel2d.base.files.folder import Progress
from parallel2d.base.files.tensor_file import (
    DTYPE_NAMES,
    DamagedCheckpointError,
    encode_header,
)
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


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, StoredTensor], list[Tensor]]:
    """Returns what a manifest says of this rank's parts of ``tensors``, and the blocks of bytes
    that make up their file: a header, then views of the parts, on whatever device."""
    stored, entries, parts = {}, [], []
    # The widest first, so that each part begins at a multiple of its own width.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        region, shape, dtype = local_region(tensor), tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]
        chunks: tuple[Chunk, ...] = ()
        if region.numel:
            chunks = (Chunk(STATE, region),)
            entries.append((chunk_key(name, shape, region), dtype, region.lengths))
            part = local_part(tensor.detach()).contiguous()
            # A single value counts as contiguous whatever its stride; the view needs a stride of 1.
            parts.append(part.as_strided((part.numel(),), (1,)).view(torch.uint8))
        stored[name] = StoredTensor(dtype, shape, chunks)
    header = as_bytes(encode_header(entries, {"format": "pt"}))
    return stored, [header, *parts]


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
    def from_bytes(cls, manifest: Tensor, data: Tensor) -> LocalState:
        """Checks both, whose origin may be any. Raises `DamagedCheckpointError`."""
        decoded = Manifest.decode(manifest.numpy().tobytes(), MANIFEST, local=True)
        state = cls(decoded, data, f"{step_name(decoded.step)} from memory")
        if set(decoded.files) != {STATE}:
            raise DamagedCheckpointError(f"{state.folder.label} is not in the one file {STATE}")
        state.verify()
        return state

    def copy_into(self, name: str, region: Region, destination: Tensor) -> None:
        held = [chunk.region for chunk in self.tensors[name].chunks]
        if held != ([region] if region.numel else []):
            raise DamagedCheckpointError(
                f"{self.folder.label} has {held} of {name}, and not {region}: the layout is another"
            )
        super().copy_into(name, region, destination)

"""The format of in-memory checkpoints: one file with the local shards of one rank.

`pack` chooses the layout of the file, and `Staging` copies the shards to CPU memory. `LocalState`
reads the file on a rank at the same position of any replica with the same state.

A joining replica receives a file in this format from another replica. A checkpoint on disk consists
of one such file per rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel2d.base.device import (
    current_stream,
    free_host_buffer,
    host_buffer,
    new_copy_stream,
    on_stream,
)
from parallel2d.base.files.folder import Progress
from parallel2d.base.files.tensor_file import DTYPE_NAMES, DamagedCheckpointError, encode_header
from parallel2d.parallel.weights.geometry import Region, local_part, local_region
from parallel2d.training.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Manifest,
    StoredTensor,
    chunk_key,
)
from parallel2d.training.checkpoint.reader import Checkpoint
from parallel2d.training.checkpoint.storage import step_name

STATE = "state.safetensors"
_ROOM = 2**16  # spare bytes, because the header and generator states may grow


class Part(NamedTuple):
    """A rectangle of the tensor ``name``, and the values in it. ``shape`` is the unsharded
    shape."""

    name: str
    shape: torch.Size
    region: Region
    values: Tensor


def local_parts(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yield this rank's local shard of each tensor."""
    for name, tensor in tensors.items():
        yield Part(name, tensor.shape, local_region(tensor), local_part(tensor.detach()))


def pack(parts: Iterable[Part], file: str = STATE) -> tuple[dict[str, StoredTensor], list[Tensor]]:
    """Return the manifest entries of ``parts``, and the blocks of a file with these parts: the
    header on CPU, then the values on their devices."""
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
    """A reusable CPU buffer for a packed file, and the copies into this buffer.

    [Note: copies next to training] Tensors on a device are copied on a separate stream. The host
    waits for the copies only in `wait`, which a background thread may call. Tensors that only the
    optimizer changes are copied while the next forward and backward run, and `before_update` makes
    the optimizer wait for these copies. For the copies of all other tensors the current stream
    waits immediately.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._locked_for = "cpu"  # device type for which the buffer is page-locked
        self._stream: torch.Stream | None = None
        self._copied: list[Tensor] = []  # sources of copies that the host has not waited for
        self._is_read = False  # True if the next update must wait for the copies

    @torch.no_grad()
    def start(self, blocks: Sequence[Tensor], until_update: Collection[int] = ()) -> Tensor:
        """Start to copy the blocks into the buffer, one after the other. Returns the part of the
        buffer with the copies, which are complete after `wait`.

        Args:
            blocks: the tensors to copy, on CPU or on devices of one type.
            until_update: ids of the blocks that only the optimizer changes.
        """
        sizes = []
        for block in blocks:
            sizes.append(block.nbytes)
        device_type = next(
            (each.device.type for each in blocks if each.device.type != "cpu"), "cpu"
        )
        total = sum(sizes)
        if self._buffer.numel() < total or self._locked_for != device_type:
            self.close()
            self._buffer = host_buffer(total + _ROOM, device_type)
            self._locked_for = device_type
        staged = self._buffer[:total]
        # Pairs of a block and its place in the buffer: blocks that may change now, and blocks that
        # change only in the next update
        now: list[tuple[Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        for block, piece in zip(blocks, staged.split(sizes), strict=True):
            (later if id(block) in until_update else now).append((block, piece))
        if device_type == "cpu":
            _copy([*now, *later])
            return staged
        self._stream = self._stream or new_copy_stream(device_type)
        training = current_stream(device_type)
        self._stream.wait_stream(training)
        # The sources must not be freed before the copies end.
        self._copied = list(blocks)
        with on_stream(device_type, self._stream):
            _copy(now)
        if now:
            training.wait_stream(self._stream)
        with on_stream(device_type, self._stream):
            _copy(later)
        self._is_read = bool(later)
        return staged

    def before_update(self) -> None:
        """Make the current stream wait for the copies of the tensors that the update changes."""
        if self._is_read and self._stream is not None:
            current_stream(self._locked_for).wait_stream(self._stream)
        self._is_read = False

    def wait(self) -> None:
        """Wait on the host until the copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()
        self._copied = []

    def take(self, blocks: Sequence[Tensor]) -> Tensor:
        """Copy the blocks, wait for the copies, and return them."""
        staged = self.start(blocks, set(map(id, blocks)))
        self.wait()
        self._is_read = False
        return staged

    def close(self) -> None:
        """Free the buffer."""
        if self._buffer.numel():
            self.wait()
            free_host_buffer(self._buffer, self._locked_for)
        self._buffer, self._locked_for = torch.empty(0, dtype=torch.uint8), "cpu"


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each block into its place in the buffer."""
    for block, piece in pairs:
        # `copy_` also accepts blocks that are not contiguous, so no contiguous copies are needed
        # first.
        piece.view(block.dtype).view(block.shape).copy_(block, non_blocking=True)


def as_bytes(data: bytes) -> Tensor:
    """Return ``data`` as a tensor of uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _InMemory:
    """The folder of a `Checkpoint` with a single file, whose bytes are in a tensor of uint8."""

    def __init__(self, label: str, data: Tensor) -> None:
        self.label, self.size, self._data = label, data.numel(), memoryview(data.numpy().data)

    def source(self, name: str) -> _InMemory:
        return self

    def digest(self, name: str, progress: Progress | None = None) -> str:
        return hashlib.sha256(self._data).hexdigest()

    def buffer(self, begin: int, end: int) -> Any:
        return self._data[begin:end]


class LocalState(Checkpoint):
    """A checkpoint with the state of one rank. Its manifest describes every tensor, and the file
    `STATE` has this rank's local shards."""

    def __init__(self, manifest: Manifest, data: Tensor, label: str) -> None:
        # The file has the state of a single replica. Without a mesh the manifest describes a run
        # with one replica, so that the state of other replicas does not count as missing.
        folder: Any = _InMemory(label, data)
        super().__init__(folder, dataclasses.replace(manifest, mesh={}))

    @classmethod
    def from_bytes(cls, manifest: Tensor, data: Tensor, mesh: dict[str, int]) -> LocalState:
        """Decode and verify a manifest and its data, which need not be trusted. Raises
        `DamagedCheckpointError` for damaged data and for a mesh other than ``mesh``."""
        decoded = Manifest.decode(manifest.numpy().tobytes(), MANIFEST, local=True)
        state = cls(decoded, data, f"{step_name(decoded.step)} from memory")
        if decoded.mesh != mesh:
            raise DamagedCheckpointError(f"{state.folder.label} was saved on another mesh")
        state.verify()
        return state

    def copy_into(self, name: str, region: Region, destination: Tensor) -> None:
        held = []
        for chunk in self.tensors[name].chunks:
            held.append(chunk.region)
        if held != ([region] if region.numel else []):
            raise DamagedCheckpointError(
                f"{self.folder.label} has {held} of {name}, and not {region}: the layout differs"
            )
        super().copy_into(name, region, destination)

"""Reads tensors from a checkpoint and reshards them on load: `Checkpoint.fill` copies this rank's
local shard from the stored rectangles of any layout."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel2d.base.files import printable, tensor_file
from parallel2d.base.files.folder import Folder, Progress, open_folder
from parallel2d.base.files.tensor_file import DTYPES, ByteSource, DamagedCheckpointError, Entry
from parallel2d.parallel.weights.geometry import Region, local_part, local_region
from parallel2d.training.checkpoint.manifest import MANIFEST, MAX_BYTES, Manifest, chunk_key


class Checkpoint:
    """A readable checkpoint. The size and header of each file are compared with the manifest before
    any value is read. Every method raises `DamagedCheckpointError` if they differ."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.tensors = manifest.tensors
        self._files: dict[str, tuple[ByteSource, dict[str, Entry]]] = {}
        # File -> chunk -> dtype and shape
        self._expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                described = self._expected.setdefault(chunk.file, {})
                key = chunk_key(name, tensor.shape, chunk.region)
                described[key] = tensor.dtype, chunk.region.lengths

    @classmethod
    def open(cls, path: str, mapped: bool = True) -> Checkpoint:
        """Open the checkpoint at a path or fsspec address. The method checks only the manifest."""
        folder = open_folder(path, mapped)
        data = folder.read(MANIFEST, MAX_BYTES)
        return cls(folder, Manifest.decode(data, f"{folder.label}/{MANIFEST}"))

    def _file(self, name: str) -> tuple[ByteSource, dict[str, Entry]]:
        if name in self._files:
            return self._files[name]
        what = f"{self.folder.label}/{name}"
        source, size = self.folder.source(name), self.manifest.files[name].bytes
        if source.size != size:
            raise DamagedCheckpointError(f"{what}: {source.size} bytes, the manifest says {size}")
        header = tensor_file.read_header(source, what)
        expected = self._expected.get(name, {})
        # A file with the expected size may still belong to another checkpoint.
        found = {}
        for key, entry in header.items():
            found[key] = (entry.dtype, entry.shape)
        if found != expected:
            wrong = min(key for key, _ in found.items() ^ expected.items())
            stored, listed = found.get(wrong, "missing"), expected.get(wrong, "missing")
            raise DamagedCheckpointError(
                f"{what}: {printable(wrong)} is {stored}, the manifest says {listed}"
            )
        self._files[name] = source, header
        return source, header

    def verify(self, files: list[str] | None = None, progress: Progress | None = None) -> None:
        """Check size, structure and SHA-256 of ``files``, by default all files. ``progress`` is
        called with the bytes read."""
        for name in self.manifest.files if files is None else files:
            self._file(name)
            if self.folder.digest(name, progress) != self.manifest.files[name].sha256:
                raise DamagedCheckpointError(
                    f"{self.folder.label}/{name}: its SHA-256 is not the manifest's: altered or "
                    "damaged"
                )

    def copy_into(self, name: str, region: Region, destination: Tensor) -> None:
        """Copy the rectangle ``region`` of tensor ``name`` into ``destination``, which has the
        shape of ``region``. The values are converted to the dtype of ``destination``."""
        tensor = self.tensors[name]
        for chunk in tensor.chunks:
            common = chunk.region.intersect(region)
            if common is None:
                continue
            source, header = self._file(chunk.file)
            entry = header[chunk_key(name, tensor.shape, chunk.region)]
            # Read complete rows, which are consecutive in the file. A tensor without dims has one
            # row.
            rows, *others = common.slices_in(chunk.region) or (slice(0, 1),)
            values = tensor_file.read_rows(source, entry, rows.start, rows.stop)
            for dim, part in enumerate(others, start=1):
                values = values.narrow(dim, part.start, part.stop - part.start)
            destination[common.slices_in(region)].copy_(values)

    def fill(self, tensor: Tensor, name: str) -> None:
        """Copy this rank's local shard of the stored tensor ``name`` into ``tensor``, which has the
        same unsharded shape."""
        region = local_region(tensor)
        if region.numel:
            self.copy_into(name, region, local_part(tensor.detach()).view(region.lengths))

    def read(self, name: str) -> Tensor:
        """Read an unsharded tensor on CPU in its stored dtype."""
        tensor = self.tensors[name]
        result = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        self.copy_into(name, Region.of_shape(tensor.shape), result)
        return result

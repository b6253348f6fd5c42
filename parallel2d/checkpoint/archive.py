"""One opened checkpoint: `Checkpoint` verifies it, and reads it by tensor and rectangle.

Before a value is used, the manifest is compared with the sizes and headers of the files. So a file
that was swapped, truncated or made up is refused, whatever its checksum is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel2d.checkpoint.manifest import MAX_BYTES, NAME, Manifest, StoredTensor, chunk_key
from parallel2d.files.folder import Folder, Progress, open_folder
from parallel2d.files.tensor_file import (
    DTYPES,
    ByteSource,
    DamagedCheckpointError,
    Entry,
    printable,
    read_header,
    read_rows,
)
from parallel2d.weights.geometry import Region, local_part, local_region


class Checkpoint:
    """A readable checkpoint. Raises `DamagedCheckpointError` from every method when the files do
    not match the manifest."""

    def __init__(self, folder: Folder, manifest: Manifest, *, exact: bool = True) -> None:
        """``exact=False``: files may hold more than the manifest takes from them."""
        self.folder, self.manifest, self._exact = folder, manifest, exact
        self._files: dict[str, tuple[ByteSource, dict[str, Entry]]] = {}
        self._expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                key = chunk_key(name, tensor.shape, chunk.region)
                self._expected.setdefault(chunk.file, {})[key] = (
                    tensor.dtype,
                    chunk.region.lengths,
                )

    @classmethod
    def open(cls, path: str, mapped: bool = True) -> Checkpoint:
        """The checkpoint at a local path or fsspec address; its manifest is checked, its files are
        not yet."""
        folder = open_folder(path, mapped)
        return cls(folder, Manifest.decode(folder.read(NAME, MAX_BYTES), f"{folder.label}/{NAME}"))

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.manifest.tensors

    def _file(self, name: str) -> tuple[ByteSource, dict[str, Entry]]:
        if name not in self._files:
            what = f"{self.folder.label}/{name}"
            source = self.folder.source(name)
            if source.size != self.manifest.files[name].bytes:
                raise DamagedCheckpointError(
                    f"{what}: {source.size} bytes, the manifest says "
                    f"{self.manifest.files[name].bytes}"
                )
            header = read_header(source, what)
            # Of the right size, the file may still be that of another checkpoint.
            found = {key: (entry.dtype, entry.shape) for key, entry in header.items()}
            expected = self._expected.get(name, {})
            if not self._exact:
                found = {key: entry for key, entry in found.items() if key in expected}
            if found != expected:
                differing = [k for k in {*found, *expected} if found.get(k) != expected.get(k)]
                wrong = min(differing)
                raise DamagedCheckpointError(
                    f"{what}: {printable(wrong)} is {_describe(found.get(wrong))}, the manifest "
                    f"says {_describe(expected.get(wrong))}"
                )
            self._files[name] = source, header
        return self._files[name]

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
            wanted = common.slices_in(chunk.region)
            if wanted:
                # Whole rows are read: those are consecutive in the file.
                rows = read_rows(source, entry, wanted[0].start, wanted[0].stop)
                values = rows[(slice(None), *wanted[1:])]
            else:
                values = read_rows(source, entry, 0, 1)  # a tensor without dims is one row
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


def _describe(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "not there" if entry is None else f"{entry[0]} {list(entry[1])}"

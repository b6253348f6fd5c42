"""``torch.save`` files, one tensor in memory at a time.

A nested dict of descriptions flows in and a file that ``torch.load(weights_only=True)`` reads flows out, and
the other way round. The file is first written with its structure only, the values left as holes; then each
tensor's bytes are put in their place and the archive's checksums are made true. Reading unpickles with
PyTorch's weights-only reader, which builds tensors and plain containers and refuses all else, and under fake
tensors, so that values are read by range afterwards.
"""

from __future__ import annotations

import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel2d.checkpoint.tensor_file import DamagedCheckpointError, printable, tensor_bytes
from parallel2d.config import ConfigError


class TorchWriter:
    """Writes ``content`` to ``path``; ``hole(dtype, shape)`` makes the tensors in it, `fill` gives them
    values."""

    def __init__(self, path: str) -> None:
        self.path, self._mode = path, FakeTensorMode()
        self._checksums: dict[int, int] = {}

    def hole(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor without values."""
        with self._mode:
            return torch.empty(shape, dtype=dtype)

    def begin(self, content: dict[str, Any]) -> dict[str, Any]:
        """Writes the file with holes; returns ``content`` as a reader sees it, tensors knowing their place in
        the file."""
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, self.path)
        with FakeTensorMode():
            return torch.load(self.path, weights_only=True)

    def fill(self, place: Tensor, values: Tensor) -> None:
        """Writes ``values`` (CPU) where ``place`` from `begin` lies in the file."""
        data = tensor_bytes(values.contiguous())
        offset = _offset(place)
        if not data or offset is None:
            return
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(data)
        self._checksums[offset] = zlib.crc32(data)

    def finish(self) -> None:
        """Puts the true checksums into the archive's two directories and flushes the file to the disk."""
        with zipfile.ZipFile(self.path) as archive:
            entries, directory = archive.infolist(), archive.start_dir
        with open(self.path, "r+b") as file:
            position = directory
            for entry in entries:
                file.seek(position)
                head = file.read(46)
                name, extra, comment = struct.unpack("<HHH", head[28:34])
                file.seek(entry.header_offset)
                local = file.read(30)
                data = entry.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
                if data in self._checksums:
                    checksum = struct.pack("<I", self._checksums[data])
                    flags = struct.unpack("<H", local[6:8])[0]
                    if flags & 8:  # the local checksum follows the data, behind a signature
                        file.seek(data + entry.file_size + 4)
                    else:
                        file.seek(entry.header_offset + 14)
                    file.write(checksum)
                    file.seek(position + 16)
                    file.write(checksum)
                position += 46 + name + extra + comment
            os.fsync(file.fileno())


def _offset(tensor: Tensor) -> int | None:
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


class TorchReader:
    """A ``torch.save`` file: its containers now, its tensors by `read`.

    Raises `ConfigError` for a file that is not weights-only: it is not loaded by other means.
    """

    def __init__(self, path: str) -> None:
        self.path, self.label = path, os.path.basename(path)
        self._streamed = zipfile.is_zipfile(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a refused file says enough
                if self._streamed:
                    with FakeTensorMode():
                        self.content = torch.load(path, map_location="cpu", weights_only=True)
                else:  # the format before archives: one stream, which can only be read as a whole
                    self.content = torch.load(path, map_location="cpu", weights_only=True)
        except (
            pickle.UnpicklingError,
            RuntimeError,
            EOFError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            first = printable(str(error).splitlines()[0] if str(error) else type(error).__name__, 200)
            raise ConfigError(f"{self.label} is not a file of weights alone, and is not loaded: {first}") from None
        self._size = os.path.getsize(path)

    def read(self, tensor: Tensor) -> Tensor:
        """The values of a tensor found in ``content``."""
        if not self._streamed or not tensor.numel():
            return tensor if not self._streamed else torch.empty(tensor.shape, dtype=tensor.dtype)
        begin = _offset(tensor)
        assert begin is not None
        size, item = tensor.untyped_storage().nbytes(), tensor.element_size()
        strides, first = tensor.stride(), int(tensor.storage_offset())
        last = int(first) + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
        if begin < 0 or (last + 1) * item > size or begin + size > self._size or min(strides, default=0) < 0:
            raise DamagedCheckpointError(f"{self.label}: a tensor reaches outside of the file")
        with open(self.path, "rb") as file:
            file.seek(begin + first * item)
            data = bytearray(file.read((last + 1 - first) * item))
        return torch.frombuffer(data, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def tensors_of(content: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of a dict of tensors. Raises `ConfigError` for anything else in it."""
    if not isinstance(content, dict):
        raise ConfigError(f"a file of weights holds a dict of tensors, this one a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(f"{prefix}{printable(name)} is a {type(value).__name__}, not a tensor")
        yield prefix + name, value

"""Writes and reads ``torch.save`` files with one tensor in memory at a time: `TorchWriter`,
`TorchReader`.

A file is first written with its structure only, with holes for the values. Then each tensor's bytes
are put in their place, and the archive's checksums are corrected. The result can be read by
``torch.load(weights_only=True)``. Reading unpickles with PyTorch's weights-only reader, which
builds tensors and plain containers and refuses all else. It runs under fake tensors, so that values
are read by range afterwards.
"""

from __future__ import annotations

import contextlib
import os
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel2d.errors import ConfigError
from parallel2d.files.tensor_file import DamagedCheckpointError, printable, tensor_bytes

_LONGEST_NAME, _LONGEST_TEXT = 500, 1 << 24
_DEEPEST = 20  # tuples in each other
_REFUSED = re.compile("INST|OBJ|NEWOBJ|NEWOBJ_EX|STACK_GLOBAL|EXT1|EXT2|EXT4|DUP|NEXT_BUFFER")
_ALLOWED = re.compile(
    r"collections OrderedDict|torch\._utils "
    r"_rebuild_(tensor|tensor_v2|parameter|parameter_with_state)|torch\.storage \w*Storage"
    r"|torch (Size|device|\w+Storage|b?float\w*|u?int\d+|bool|complex\d+)"
)
# a magic number, a version, facts about the system, the content, the keys of its storages
_PICKLES_OF_A_STREAM = 5
# how many times a value may be seen through views, and a size that is always allowed
_REPEATED, _SMALL = 4, 2**20


class TorchWriter:
    """Writes ``content`` to ``path``; ``hole(dtype, shape)`` makes the tensors in it, `fill` gives
    them values."""

    def __init__(self, path: str) -> None:
        self.path, self._mode = path, FakeTensorMode()
        self._checksums: dict[int, int] = {}

    def hole(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor without values."""
        with self._mode:
            return torch.empty(shape, dtype=dtype)

    def begin(self, content: dict[str, Any]) -> dict[str, Any]:
        """Writes the file with holes; returns ``content`` as a reader sees it, in which tensors
        have their place in the file."""
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, self.path)
        with FakeTensorMode():
            return torch.load(self.path, weights_only=True)

    def fill(self, place: Tensor, values: Tensor) -> None:
        """Writes ``values`` (CPU) where ``place`` from `begin` lies in the file."""
        data = tensor_bytes(values.contiguous())
        offset = offset_in_file(place)
        if not data or offset is None:
            return
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(data)
        self._checksums[offset] = zlib.crc32(data)

    def finish(self) -> None:
        """Puts the true checksums into the archive's two directories and flushes the file to the
        disk."""
        with zipfile.ZipFile(self.path) as archive:
            entries, directory = archive.infolist(), archive.start_dir
        with open(self.path, "r+b") as file:
            # An entry of the directory at the end is 46 bytes, with its checksum at 16 and the
            # lengths of what follows at 28: name, extra field, comment. The header before the data
            # is 30 bytes, with its checksum at 14 and two such lengths at 26.
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


def offset_in_file(tensor: Tensor) -> int | None:
    """Where the storage of a tensor begins in its file; None for one that is in memory. torch notes
    this when it loads under a `FakeTensorMode`."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


class _Bounded:
    """A file that gives no line and no piece of more than a limit. For pickletools."""

    def __init__(self, file: Any) -> None:
        self._file, self.tell = file, file.tell

    def read(self, size: int) -> bytes:
        if size > _LONGEST_TEXT:
            raise ValueError("a text in it is too long")
        return bytes(self._file.read(size))

    def readline(self) -> bytes:
        line = bytes(self._file.readline(_LONGEST_NAME))
        if len(line) == _LONGEST_NAME:
            raise ValueError("a name in it is too long")
        return line


def _walk(file: Any) -> None:
    """Follows a pickle without building anything. Raises ValueError for what torch.save does not
    write for weights: other names than those of tensors and containers, and tuples of tuples so
    deep that hashing one takes for ever."""
    stack: list[int | None] = []  # how deep each tuple is, 0 for all else; None: a mark
    memo: dict[Any, int | None] = {}
    for operation, argument, _ in pickletools.genops(file):
        name = operation.name
        if name == "GLOBAL" and not _ALLOWED.fullmatch(str(argument)):
            raise ValueError(f"it asks for {argument}")
        if _REFUSED.fullmatch(name):
            raise ValueError(f"it makes objects by {name}")
        if name == "MARK":
            stack.append(None)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            deepest = _deepest_taken(stack, operation.stack_before)
            depth = deepest + 1 if "TUPLE" in name else 0
            if depth > _DEEPEST:
                raise ValueError("its tuples are nested too deeply")
            stack += [depth] * len(operation.stack_after)


def _deepest_taken(stack: list[int | None], before: list[Any]) -> int:
    """Takes from the stack what an operation of pickle takes: ``before`` in pickletools' terms."""
    taken = [0]
    fixed = len(before)
    if pickletools.markobject in before:
        fixed = before.index(pickletools.markobject)
        while (item := stack.pop()) is not None:
            taken.append(item)
    taken += [stack.pop() or 0 for _ in range(fixed)]
    return max(taken)


class TorchReader:
    """A ``torch.save`` file: its containers now, its tensors by `read`.

    Raises `ConfigError` for a file that is not weights-only: it is not loaded by other means.
    """

    def __init__(self, path: str) -> None:
        self.path, self.label = path, os.path.basename(path)
        self._size = os.path.getsize(path)
        self._streamed = self._is_archive()
        self._scan()
        # The format before archives is one stream, which can only be read as a whole.
        mode = FakeTensorMode() if self._streamed else contextlib.nullcontext()
        try:
            with warnings.catch_warnings(), mode:
                warnings.simplefilter("ignore")  # a refused file gets one error
                self.content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's reader may raise anything
            # Its advice to load the file with weights_only=False is not passed on.
            text = (str(error) or type(error).__name__).splitlines()[0].split(". In PyTorch")[0]
            raise ConfigError(
                f"{self.label} is not a file of weights alone, and is not loaded: "
                f"{printable(text, 200)}"
            ) from None

    def _is_archive(self) -> bool:
        """torch.save compresses nothing, so what is read is no larger than the file. Raises
        `ConfigError` for another archive."""
        try:
            with open(self.path, "rb") as file:
                if file.read(4) != b"PK\x03\x04":  # as torch decides it
                    return False
            with zipfile.ZipFile(self.path) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
            raise ConfigError(f"{self.label} is a damaged archive: {printable(error)}") from None
        if any(
            entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size
            for entry in entries
        ):
            raise ConfigError(
                f"{self.label} is a compressed archive, which torch.save does not write, and is "
                "not unpacked"
            )
        # Readers differ in which of the two they take.
        if len({entry.filename.lower() for entry in entries}) < len(entries):
            raise ConfigError(f"{self.label} has two entries of one name")
        if sum(entry.file_size for entry in entries) > self._size:
            raise ConfigError(f"{self.label} announces more bytes than it has")
        return True

    def _scan(self) -> None:
        """Walks through the pickles without building anything. Raises `ConfigError` for what is
        none, and for names that are longer than any: torch takes minutes to refuse one of 50,000
        characters."""
        try:
            if self._streamed:
                with zipfile.ZipFile(self.path) as archive:
                    for name in archive.namelist():
                        if name.lower().endswith("data.pkl"):
                            with archive.open(name) as record:
                                _walk(_Bounded(record))
            else:
                with open(self.path, "rb") as file:
                    for _ in range(_PICKLES_OF_A_STREAM):
                        _walk(_Bounded(file))
        except Exception as error:  # pickletools may raise anything
            raise ConfigError(
                f"{self.label} is not a file of weights alone, and is not loaded: "
                f"{printable(error)}"
            ) from None

    def check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `ConfigError` for tensors that are not plain values, and when all together are
        several times as large as the file: views that repeat its values."""
        for name, tensor in tensors.items():
            if (
                tensor.layout != torch.strided
                or tensor.is_quantized
                or (tensor.is_meta and not self._streamed)
            ):
                raise ConfigError(
                    f"{self.label}: {printable(name)} is no plain tensor but {tensor.layout} on "
                    f"{tensor.device}"
                )
            if self._streamed and tensor.numel() and offset_in_file(tensor) is None:
                raise ConfigError(f"{self.label}: {printable(name)} has no values in the file")
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if total > _REPEATED * self._size + _SMALL:
            raise ConfigError(
                f"{self.label} has {self._size} bytes, and its tensors would take {total}: they "
                "repeat their values (expand); save them with .contiguous() if that is meant"
            )

    def read(self, tensor: Tensor) -> Tensor:
        """The values of a tensor found in ``content``."""
        if not self._streamed:
            return tensor.resolve_conj().resolve_neg()
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        begin = offset_in_file(tensor)
        assert begin is not None
        size, item = tensor.untyped_storage().nbytes(), tensor.element_size()
        strides, first = tensor.stride(), int(tensor.storage_offset())
        steps = zip(tensor.shape, strides, strict=True)
        last = first + sum((length - 1) * stride for length, stride in steps)
        if (
            begin < 0
            or (last + 1) * item > size
            or begin + size > self._size
            or min(strides, default=0) < 0
        ):
            raise DamagedCheckpointError(f"{self.label}: a tensor reaches outside of the file")
        with open(self.path, "rb") as file:
            file.seek(begin + first * item)
            data = bytearray(file.read((last + 1 - first) * item))
        values = torch.frombuffer(data, dtype=tensor.dtype).as_strided(tensor.shape, strides)
        values = values.conj().resolve_conj() if tensor.is_conj() else values
        return values.neg() if tensor.is_neg() else values


def tensors_of(content: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a dict of tensors. Raises `ConfigError` for anything else in it."""
    if not isinstance(content, dict):
        raise ConfigError(
            f"a file of weights holds a dict of tensors, this one a {type(content).__name__}"
        )
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(f"{printable(name)} is a {type(value).__name__}, not a tensor")
        yield name, value

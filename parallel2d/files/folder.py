"""Reads the files of one checkpoint folder, on this machine or behind fsspec. Start at
`open_folder`.

Files are opened by name, never outside of the folder. Local files are memory-mapped, so a rank
reads only the pages that it needs; remote files are read by range. On this machine only regular
files inside the folder are opened: a symbolic link, a device or a pipe in a checkpoint is refused,
not followed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from parallel2d.files.tensor_file import ByteSource, DamagedCheckpointError, printable

BLOCK = 8 * 2**20  # bytes read at a time when hashing

Progress = Callable[[int], object]


class Folder(Protocol):
    """A folder of files. Every method raises `DamagedCheckpointError` when the file is missing or
    is no ordinary file."""

    label: str  # for messages

    def read(self, name: str, limit: int) -> bytes:
        """The whole content; a file of more than ``limit`` bytes is an error."""
        ...

    def size(self, name: str) -> int:
        """Bytes of the file."""
        ...

    def digest(self, name: str, progress: Progress | None = None) -> str:
        """SHA-256 of the content, in hex; ``progress(bytes)`` is called after each block."""
        ...

    def source(self, name: str) -> ByteSource:
        """The file, for reading ranges of bytes."""
        ...


def is_remote(path: str) -> bool:
    """Whether ``path`` is an fsspec address (``scheme://...``) rather than a path of this
    machine."""
    return "://" in path


def open_folder(path: str, mapped: bool = True) -> Folder:
    """The folder at a local path or fsspec address. ``mapped``: as of `LocalFolder`."""
    if is_remote(path):
        return RemoteFolder(path)
    return LocalFolder(path, mapped)


class _MappedFile:
    """A memory-mapped file. The mapping is private: writing to a buffer never reaches the file."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map: Any = b""
        if size:  # an empty file cannot be mapped
            self._map = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)

    def buffer(self, begin: int, end: int) -> Any:
        return memoryview(self._map)[begin:end]


class _LocalFile:
    """A local file, read by range; each buffer is a copy."""

    def __init__(self, descriptor: int, size: int, label: str) -> None:
        self._file = os.fdopen(os.dup(descriptor), "rb", buffering=0)
        self.size = size
        self.label = label

    def buffer(self, begin: int, end: int) -> Any:
        data = bytearray(end - begin)
        done = 0
        # One call may return less than was asked for; Linux reads at most 2 GiB at a time.
        while done < len(data):
            count = os.preadv(self._file.fileno(), [memoryview(data)[done:]], begin + done)
            if not count:
                raise DamagedCheckpointError(f"{self.label}: ends before byte {end}")
            done += count
        return data


class LocalFolder:
    """A folder on a file system of this machine. ``mapped=False`` reads by range instead of mapping
    files to memory."""

    def __init__(self, path: str, mapped: bool = True) -> None:
        self.path = path
        self.label = os.path.basename(os.path.abspath(path))
        self.mapped = mapped

    def _open(self, name: str) -> tuple[int, int]:
        """(descriptor, bytes) of a regular file inside the folder."""
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise DamagedCheckpointError(
                f"{self.label}: {printable(name)!r} is a path, not the name of a file in the folder"
            )
        path = os.path.join(self.path, name)
        try:
            # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is missing") from None
        except OSError as error:
            if os.path.islink(path):
                raise DamagedCheckpointError(
                    f"{self.label}: {printable(name)} is a symbolic link, which is not followed"
                ) from None
            raise DamagedCheckpointError(
                f"{self.label}: {printable(name)} cannot be opened: {error.strerror}"
            ) from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is not a regular file")
        return descriptor, status.st_size

    def size(self, name: str) -> int:
        descriptor, size = self._open(name)
        os.close(descriptor)
        return size

    def read(self, name: str, limit: int) -> bytes:
        descriptor, size = self._open(name)
        with os.fdopen(descriptor, "rb") as file:
            _check_limit(self.label, name, size, limit)
            return file.read(limit)

    def digest(self, name: str, progress: Progress | None = None) -> str:
        descriptor, _ = self._open(name)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            try:
                return _sha256(file, progress)
            except OSError as error:
                raise DamagedCheckpointError(
                    f"{self.label}: {name} cannot be read: {error.strerror}"
                ) from None

    def source(self, name: str) -> ByteSource:
        descriptor, size = self._open(name)
        try:
            if self.mapped:
                return _MappedFile(descriptor, size)
            return _LocalFile(descriptor, size, f"{self.label}/{name}")
        finally:
            os.close(descriptor)  # the mapping, or a duplicate of the descriptor, stays


class _RemoteFile:
    """A remote file, read by range; each buffer is a copy."""

    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self.filesystem = filesystem
        self.path = path
        self.size = size

    def buffer(self, begin: int, end: int) -> Any:
        data = b""
        if end > begin:  # HTTP, which object stores use, has no empty ranges
            data = self.filesystem.cat_file(self.path, start=begin, end=end)
        if len(data) != end - begin:
            raise DamagedCheckpointError(f"{self.path}: got {len(data)} of {end - begin} bytes")
        return bytearray(data)


class RemoteFolder:
    """A folder behind any fsspec file system: object stores, and whatever else has a
    ``scheme://``."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.filesystem, self.path = fsspec.core.url_to_fs(url)
        self.label = self.path.rstrip("/").rsplit("/", 1)[-1]

    def _path(self, name: str) -> str:
        if "/" in name or name in ("", ".", ".."):
            raise DamagedCheckpointError(
                f"{self.label}: {printable(name)!r} is a path, not the name of a file in the folder"
            )
        return f"{self.path}/{name}"

    def size(self, name: str) -> int:
        path = self._path(name)
        try:
            information = self.filesystem.info(path)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is missing") from None
        size = information.get("size")
        is_file = information.get("type") == "file" and not information.get("islink")
        if not is_file or size is None:
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is not a regular file")
        return int(size)

    def read(self, name: str, limit: int) -> bytes:
        _check_limit(self.label, name, self.size(name), limit)
        return self.filesystem.cat_file(self._path(name))

    def digest(self, name: str, progress: Progress | None = None) -> str:
        self.size(name)  # raises for what is no regular file
        with self.filesystem.open(self._path(name), "rb") as file:
            return _sha256(file, progress)

    def source(self, name: str) -> ByteSource:
        return _RemoteFile(self.filesystem, self._path(name), self.size(name))


def _check_limit(label: str, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise DamagedCheckpointError(
            f"{label}: {printable(name)} has {size} bytes, more than the {limit} allowed"
        )


def _sha256(file: BinaryIO, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
        if progress:
            progress(len(block))
    return digest.hexdigest()

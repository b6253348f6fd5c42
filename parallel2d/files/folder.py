"""Reading one checkpoint folder, on this machine or behind fsspec: files by name, never outside of
the folder.

A path flows in; sizes, checksums and byte ranges flow out. Local files are memory-mapped, so a rank
touches the pages it needs; remote ones are read by range. On this machine only regular files inside
the folder are opened: a symbolic link, a device or a pipe in a checkpoint is refused, not followed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from typing import Any, Protocol

from parallel2d.files.tensor_file import ByteSource, DamagedCheckpointError, printable

BLOCK = 8 * 2**20  # bytes read at a time when hashing

Progress = Callable[[int], object]


class Folder(Protocol):
    """A folder of files. Every method raises `DamagedCheckpointError` when the file is missing or
    is no ordinary file."""

    label: str  # for messages

    def read(self, name: str, limit: int) -> bytes: ...

    def size(self, name: str) -> int: ...

    def digest(self, name: str, progress: Progress | None = None) -> str: ...

    def source(self, name: str) -> ByteSource: ...


def is_remote(path: str) -> bool:
    """Whether ``path`` is an fsspec address (``scheme://...``) rather than a path of this
    machine."""
    return "://" in path


def open_folder(path: str, mapped: bool = True) -> Folder:
    """The folder at a local path or fsspec address."""
    return RemoteFolder(path) if is_remote(path) else LocalFolder(path, mapped)


class _Mapped:
    """A memory-mapped file. The mapping is private: writing to a buffer never reaches the file."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map: Any = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) if size else b""

    def buffer(self, begin: int, end: int) -> Any:
        return memoryview(self._map)[begin:end]


class _Read:
    """A local file, read by range; each buffer is a copy."""

    def __init__(self, descriptor: int, size: int, label: str) -> None:
        self._file, self.size, self.label = (
            os.fdopen(os.dup(descriptor), "rb", buffering=0),
            size,
            label,
        )

    def buffer(self, begin: int, end: int) -> Any:
        data, done = bytearray(end - begin), 0
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
        self.path, self.label, self.mapped = path, os.path.basename(os.path.abspath(path)), mapped

    def _open(self, name: str) -> tuple[int, int]:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise DamagedCheckpointError(
                f"{self.label}: {printable(name)!r} is a path, not the name of a file in the folder"
            )
        try:
            descriptor = os.open(
                os.path.join(self.path, name),
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            )
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is missing") from None
        except OSError as error:
            if os.path.islink(os.path.join(self.path, name)):
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
            if size > limit:
                raise DamagedCheckpointError(
                    f"{self.label}: {printable(name)} has {size} bytes, more than the {limit} "
                    "allowed"
                )
            return file.read(limit)

    def digest(self, name: str, progress: Progress | None = None) -> str:
        descriptor, _ = self._open(name)
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            try:
                while block := file.read(BLOCK):
                    digest.update(block)
                    if progress:
                        progress(len(block))
            except OSError as error:
                raise DamagedCheckpointError(
                    f"{self.label}: {name} cannot be read: {error.strerror}"
                ) from None
        return digest.hexdigest()

    def source(self, name: str) -> ByteSource:
        descriptor, size = self._open(name)
        try:
            return (
                _Mapped(descriptor, size)
                if self.mapped
                else _Read(descriptor, size, f"{self.label}/{name}")
            )
        finally:
            os.close(descriptor)


class _Ranged:
    """A remote file, read by range; each buffer is a copy."""

    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self.filesystem, self.path, self.size = filesystem, path, size

    def buffer(self, begin: int, end: int) -> Any:
        data = self.filesystem.cat_file(self.path, start=begin, end=end) if end > begin else b""
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
        if (
            information.get("type") != "file"
            or information.get("islink")
            or information.get("size") is None
        ):
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is not a regular file")
        return int(information["size"])

    def read(self, name: str, limit: int) -> bytes:
        size = self.size(name)
        if size > limit:
            raise DamagedCheckpointError(
                f"{self.label}: {printable(name)} has {size} bytes, more than the {limit} allowed"
            )
        return self.filesystem.cat_file(self._path(name))

    def digest(self, name: str, progress: Progress | None = None) -> str:
        self.size(name)
        digest = hashlib.sha256()
        with self.filesystem.open(self._path(name), "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                if progress:
                    progress(len(block))
        return digest.hexdigest()

    def source(self, name: str) -> ByteSource:
        return _Ranged(self.filesystem, self._path(name), self.size(name))

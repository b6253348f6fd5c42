"""Reads the files of a checkpoint folder, which is local or remote (fsspec). Start at
`open_folder`.

Files are opened by their name in the folder, so a name cannot lead out of the folder. Local files
are memory-mapped, so a rank reads only the pages that it needs; remote files are read by range.
Only regular files of a local folder are opened: a symbolic link, a device or a pipe in a checkpoint
is refused.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from typing import Any, BinaryIO

from parallel2d.base.files import open_regular, printable
from parallel2d.base.files.tensor_file import ByteSource, DamagedCheckpointError

_BLOCK = 8 * 2**20  # bytes read at a time when hashing

Progress = Callable[[int], object]


def is_remote(path: str) -> bool:
    """True if ``path`` is an fsspec address (``scheme://...``), not a local path."""
    return "://" in path


def open_folder(path: str, mapped: bool = True) -> Folder:
    """Open the folder at a local path or fsspec address. ``mapped``: see `LocalFolder`."""
    return RemoteFolder(path) if is_remote(path) else LocalFolder(path, mapped)


class _MappedFile:
    """Memory-mapped file. The mapping is private: writes to a buffer do not reach the file."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = _size(file)
        self._map: Any = b""
        if self.size:  # an empty file cannot be mapped
            self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)

    def buffer(self, begin: int, end: int) -> Any:
        return memoryview(self._map)[begin:end]


class _LocalFile:
    """Local file that is read by range; each buffer is a copy."""

    def __init__(self, file: BinaryIO, label: str) -> None:
        self._file, self._label, self.size = file, label, _size(file)

    def buffer(self, begin: int, end: int) -> Any:
        data = bytearray(end - begin)
        done = 0
        # One call may return fewer bytes; Linux reads at most 2 GiB at a time.
        while done < len(data):
            count = os.preadv(self._file.fileno(), [memoryview(data)[done:]], begin + done)
            if not count:
                raise DamagedCheckpointError(f"{self._label}: ends before byte {end}")
            done += count
        return data


class LocalFolder:
    """Local folder. ``mapped=False``: files are read by range, not memory-mapped."""

    def __init__(self, path: str, mapped: bool = True) -> None:
        self.path, self.mapped = path, mapped
        self.label = os.path.basename(os.path.abspath(path))  # for messages

    def _open(self, name: str) -> BinaryIO:
        _check_name(name, self.label)
        try:
            return open_regular(os.path.join(self.path, name))
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is missing") from None
        except OSError as error:
            raise DamagedCheckpointError(
                f"{self.label}: {printable(name)} cannot be opened: {error.strerror}"
            ) from None

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file; more than ``limit`` bytes are an error."""
        with self._open(name) as file:
            _check_limit(self.label, name, _size(file), limit)
            return file.read(limit)

    def digest(self, name: str, progress: Progress | None = None) -> str:
        """Return the SHA-256 of a file, in hex; ``progress(bytes)`` is called after each block."""
        with self._open(name) as file:
            try:
                return _sha256(file, progress)
            except OSError as error:
                raise DamagedCheckpointError(
                    f"{self.label}: {name} cannot be read: {error.strerror}"
                ) from None

    def source(self, name: str) -> ByteSource:
        file = self._open(name)
        if not self.mapped:
            return _LocalFile(file, f"{self.label}/{name}")
        with file:  # the mapping stays valid after the file is closed
            return _MappedFile(file)


class _RemoteFile:
    """Remote file that is read by range; each buffer is a copy."""

    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self._filesystem, self._path, self.size = filesystem, path, size

    def buffer(self, begin: int, end: int) -> Any:
        data = b""
        if end > begin:  # HTTP, which object stores use, has no empty ranges
            data = self._filesystem.cat_file(self._path, start=begin, end=end)
        if len(data) != end - begin:
            raise DamagedCheckpointError(f"{self._path}: got {len(data)} of {end - begin} bytes")
        return bytearray(data)


class RemoteFolder:
    """Folder of any fsspec file system, such as an object store."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._filesystem, self._path = fsspec.core.url_to_fs(url)
        self.label = self._path.rstrip("/").rsplit("/", 1)[-1]

    def _file(self, name: str) -> tuple[str, int]:
        _check_name(name, self.label)
        path = f"{self._path}/{name}"
        try:
            information = self._filesystem.info(path)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is missing") from None
        size = information.get("size")
        is_file = information.get("type") == "file" and not information.get("islink")
        if not is_file or size is None:
            raise DamagedCheckpointError(f"{self.label}: {printable(name)} is not a regular file")
        return path, int(size)

    def read(self, name: str, limit: int) -> bytes:
        path, size = self._file(name)
        _check_limit(self.label, name, size, limit)
        return self._filesystem.cat_file(path)

    def digest(self, name: str, progress: Progress | None = None) -> str:
        path, _ = self._file(name)
        with self._filesystem.open(path, "rb") as file:
            return _sha256(file, progress)

    def source(self, name: str) -> ByteSource:
        return _RemoteFile(self._filesystem, *self._file(name))


# Every method raises `DamagedCheckpointError` for a missing file or a file that is not regular.
Folder = LocalFolder | RemoteFolder


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _check_name(name: str, label: str) -> None:
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise DamagedCheckpointError(
            f"{label}: {printable(name)!r} is a path, not the name of a file in the folder"
        )


def _check_limit(label: str, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise DamagedCheckpointError(
            f"{label}: {printable(name)} has {size} bytes, more than the {limit} allowed"
        )


def _sha256(file: BinaryIO, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
        if progress:
            progress(len(block))
    return digest.hexdigest()

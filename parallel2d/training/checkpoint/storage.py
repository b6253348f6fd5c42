"""The folder with all checkpoints of a run, called the store. `open_store` returns an object that
writes and publishes new checkpoints, deletes old checkpoints, and moves damaged checkpoints aside
(renames them to ``aside-...``).

[Note: atomic publication] Readers never see an incomplete checkpoint, even if a process is killed,
and no file is overwritten. On a file system, a checkpoint is first written to a folder
``.saving-...``, which readers ignore. Every file is flushed to disk and read back, and the manifest
is written last. Then the folder is flushed and renamed to ``step-00000100``. Object stores cannot
rename a folder. In an object store, a folder counts as a checkpoint only if the folder has a
manifest. The manifest is written last and deleted first.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from parallel2d.base.errors import ConfigError, PlainError
from parallel2d.base.files import flush_folder, printable, refuse_link, remove_tree, replace
from parallel2d.base.files.folder import is_remote
from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.training.checkpoint.manifest import MANIFEST, StoredFile

# The names that `step_name` produces: at least eight digits, filled with zeros.
_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")
_PIECE = 2**24  # bytes; pieces of this size let hashing overlap with disk writes

Blocks = Iterable[bytes | memoryview]
_TOKEN_S = 3600.0  # a test file of `check_folder` that is older is no longer in use


class CheckpointError(PlainError):
    """A checkpoint could not be written. The message names the path and the reason."""


def step_name(step: int) -> str:
    """Return the name of a step's folder: ``step-00000100``."""
    return f"step-{step:08d}"


def _steps_in(names: Iterable[str]) -> list[int]:
    return sorted(int(name.removeprefix("step-")) for name in names if _STEP.fullmatch(name))


def _free_name(step: int, is_taken: Callable[[str], bool]) -> str:
    """Return an unused name ``aside-...`` for a checkpoint."""
    names = (f"aside-{step_name(step)}-{number}" for number in itertools.count(1))
    return next(itertools.filterfalse(is_taken, names))


def _write_pieces(file: Any, blocks: Blocks) -> StoredFile:
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        view = memoryview(block)
        for begin in range(0, len(view), _PIECE):
            digest.update(view[begin : begin + _PIECE])
            file.write(view[begin : begin + _PIECE])
        size += len(view)
    return StoredFile(size, digest.hexdigest())


def open_store(root: str) -> Store:
    """Return the store at a local path or fsspec address."""
    return RemoteStore(root) if is_remote(root) else LocalStore(root)


def find_checkpoint(path: str) -> str:
    """Resolve ``path`` to a checkpoint: ``path`` itself, or the newest checkpoint of a run or store
    folder."""
    if os.path.isfile(path):
        return path
    for root in (path, f"{path.rstrip('/')}/checkpoints"):
        if root != path:
            refuse_link(root)
        store = open_store(root)
        steps = store.steps()
        if steps:
            found = store.path_of(steps[-1])
            refuse_link(found)
            return found
    return path


def _is_old_token(path: str) -> bool:
    """True if ``path`` is a test file that a killed start has left behind. Ranks that rejoin during
    a save use only newer test files."""
    if not os.path.basename(path).startswith(".shared-"):
        return False
    with contextlib.suppress(FileNotFoundError):
        return time.time() - os.lstat(path).st_mtime > _TOKEN_S
    return False


class LocalStore:
    """A store on a file system that renames folders atomically (any local file system, NFS,
    Lustre).

    Args:
        durable: flush and read back every file. False for a store in memory, which needs neither.
    """

    def __init__(self, root: str, durable: bool = True) -> None:
        self.root, self.durable = os.path.abspath(root), durable

    def prepare(self) -> None:
        """Create the root folder."""
        os.makedirs(self.root, exist_ok=True)

    def steps(self) -> list[int]:
        """Return the steps with a published checkpoint, ascending. The contents are not checked."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return _steps_in(names)

    def path_of(self, step: int) -> str:
        """Return the path or address of a published checkpoint."""
        return os.path.join(self.root, step_name(step))

    def begin(self, step: int, token: str) -> str:
        """Create the folder for a new checkpoint, and return its path. First deletes the folders of
        interrupted saves and deletions, to free their space."""
        self.prepare()
        for name in os.listdir(self.root):
            path = os.path.join(self.root, name)
            if name.startswith((".saving-", ".deleting-")) or _is_old_token(path):
                remove_tree(path)
        place = os.path.join(self.root, f".saving-{step_name(step)}-{token}")
        os.mkdir(place)
        return place

    def write(self, place: str, name: str, blocks: Blocks) -> StoredFile:
        """Write and flush a file, drop its cached pages, and read it back. Thus the check covers
        the bytes on the disk."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(os.path.join(place, name), flags, 0o666)
        with os.fdopen(descriptor, "rb+") as file:
            stored = _write_pieces(file, blocks)
            if not self.durable:
                return stored
            file.flush()
            os.fsync(file.fileno())
            # A read from the page cache would return the written bytes even if the bytes on the
            # disk differ, so the pages must be dropped first. The kernel drops only clean pages,
            # and pages are clean only after fsync has written them, so the drop comes after fsync.
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            returned = hashlib.file_digest(file, "sha256")
        if returned.hexdigest() != stored.sha256:
            raise CheckpointError(f"{name}: the disk returned other bytes than were written")
        return stored

    def publish(self, place: str, step: int, manifest: bytes) -> None:
        self.write(place, MANIFEST, [manifest])
        # The order of these calls matters. The manifest is written after all other files. The
        # folder is flushed before the rename. Otherwise a file system may persist the rename before
        # the names of the files, and a crash would leave a published checkpoint without these
        # files. The root is flushed after the rename, because the save counts as done when this
        # method returns.
        flush_folder(place)
        # A rename onto an existing empty folder would succeed silently.
        if os.path.lexists(self.path_of(step)):
            raise CheckpointError(f"{step_name(step)} exists already")
        os.rename(place, self.path_of(step))
        flush_folder(self.root)

    def discard(self, place: str) -> None:
        remove_tree(place)

    def move_aside(self, step: int) -> str:
        """Rename a checkpoint, and return its new name."""
        name = _free_name(step, lambda name: os.path.lexists(os.path.join(self.root, name)))
        os.rename(self.path_of(step), os.path.join(self.root, name))
        flush_folder(self.root)
        return name

    def delete(self, step: int) -> None:
        # The folder is renamed first, because a partly deleted folder with the original name would
        # look like a damaged checkpoint. Readers ignore the new name, and the next `begin` deletes
        # the folder if this deletion is interrupted.
        doomed = os.path.join(self.root, f".deleting-{step_name(step)}-{os.urandom(4).hex()}")
        os.rename(self.path_of(step), doomed)
        flush_folder(self.root)
        remove_tree(doomed, must_succeed=True)

    def put_note(self, name: str, text: str | None) -> None:
        """Write a file next to the checkpoints, or delete it if ``text`` is None."""
        path = os.path.join(self.root, name)
        if text is not None:
            replace(path, text, durable=True)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class RemoteStore:
    """A store behind fsspec, without renames. A checkpoint is published when its manifest is
    written, after all other files."""

    def __init__(self, root: str) -> None:
        import fsspec

        self.root = root.rstrip("/")
        self.filesystem, self._path = fsspec.core.url_to_fs(self.root)
        self._path = self._path.rstrip("/")

    def prepare(self) -> None:
        self.filesystem.makedirs(self._path, exist_ok=True)

    def steps(self) -> list[int]:
        # fsspec caches listings, but other processes also write to this folder.
        self.filesystem.invalidate_cache()
        try:
            listed = self.filesystem.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        found = _steps_in([str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed])
        place = f"{self._path}/{{}}/{MANIFEST}"
        return [step for step in found if self.filesystem.exists(place.format(step_name(step)))]

    def path_of(self, step: int) -> str:
        return f"{self.root}/{step_name(step)}"

    def begin(self, step: int, token: str) -> str:
        place = f"{self._path}/{step_name(step)}"
        if self.filesystem.exists(f"{place}/{MANIFEST}"):
            raise CheckpointError(f"{step_name(step)} exists already")
        # Files of an interrupted save may still exist.
        self._remove(place)
        self.filesystem.makedirs(place, exist_ok=True)
        return place

    def write(self, place: str, name: str, blocks: Blocks) -> StoredFile:
        with self.filesystem.open(f"{place}/{name}", "wb") as file:
            stored = _write_pieces(file, blocks)
        self.filesystem.invalidate_cache(place)
        arrived = self.filesystem.size(f"{place}/{name}")
        if arrived != stored.bytes:
            raise CheckpointError(f"{name}: {arrived} bytes arrived of {stored.bytes}")
        return stored

    def publish(self, place: str, step: int, manifest: bytes) -> None:
        self.filesystem.pipe_file(f"{place}/{MANIFEST}", manifest)

    def discard(self, place: str) -> None:
        with contextlib.suppress(Exception):
            self._remove(place)

    def _remove(self, path: str) -> None:
        if not self.filesystem.exists(path):
            return
        # The manifest is deleted first: a folder without a manifest is not a checkpoint, so an
        # interrupted deletion does not leave an incomplete checkpoint for readers.
        if self.filesystem.exists(f"{path}/{MANIFEST}"):
            self.filesystem.rm_file(f"{path}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(path, recursive=True)

    def move_aside(self, step: int) -> str:
        """Copy the files to a new name, then delete the old files, because object stores have no
        rename. Return the new name."""
        source = f"{self._path}/{step_name(step)}"
        name = _free_name(step, lambda name: self.filesystem.exists(f"{self._path}/{name}"))
        self.filesystem.makedirs(f"{self._path}/{name}", exist_ok=True)
        for path in self.filesystem.find(source):
            self.filesystem.cp_file(path, f"{self._path}/{name}/{str(path).rsplit('/', 1)[-1]}")
        self._remove(source)
        return name

    def delete(self, step: int) -> None:
        self._remove(f"{self._path}/{step_name(step)}")

    def put_note(self, name: str, text: str | None) -> None:
        path = f"{self._path}/{name}"
        if text is not None:
            self.filesystem.pipe_file(path, text.encode())
        elif self.filesystem.exists(path):
            self.filesystem.rm_file(path)


Store = LocalStore | RemoteStore


def describe_error(error: BaseException) -> str:
    """Return a line with the text of an error. The line includes the error's class, except for
    errors of files and checkpoints."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    if isinstance(error, DamagedCheckpointError | CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Convert any exception of a storage or a library to a `ConfigError` about ``what``."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as fault:
        raise ConfigError(f"{what}: {printable(describe_error(fault), 500)}") from None

"""The folder in shared memory that outlives a node's workers: `open_place` names it and makes it
private, `remove_place` removes it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from dataclasses import dataclass

from parallel2d.base.files import private_folders as folders
from parallel2d.base.memory import free_memory
from parallel2d.base.topology import MEMORY_DIR, SHARED_MEMORY

_TOKEN = "node"


@dataclass(frozen=True)
class Place:
    """A node's folder. ``token``: equal on two ranks if and only if they see the same folder.
    ``own``: it is named after the process that started the workers, so nobody else's files are in
    it."""

    root: str
    token: str
    own: bool


def open_place() -> Place:
    """The folder of this node, made if it does not exist. Raises OSError when it is not ours
    alone."""
    path = os.environ.get(MEMORY_DIR)
    if path:
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            # /tmp, /dev/shm: making it private would close it for others
            if stat.S_ISDIR(mode) and mode & 0o022:
                raise PermissionError(
                    errno.EPERM, "others may write to it; name a folder inside it", path
                )
        folders.make_private(path)
        return Place(os.path.abspath(path), _token(path), own=False)
    if not os.path.isdir(SHARED_MEMORY):
        raise FileNotFoundError(
            errno.ENOENT, f"no shared memory folder; set {MEMORY_DIR} to one", SHARED_MEMORY
        )
    path = folders.open_folder(os.getppid(), SHARED_MEMORY)
    return Place(path, _token(path), own=True)


def remove(path: str) -> None:
    """Removes a folder with all that is in it; nothing happens when it is not there."""
    shutil.rmtree(path, ignore_errors=True)


def remove_place(place: Place) -> None:
    """Removes a folder that was named here, and the one around it when that was the last. A folder
    that was named in the environment stays; only the token file in it is removed."""
    if place.own:
        folders.remove(place.root)
    else:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(place.root, _TOKEN))


def room(root: str) -> int:
    """Bytes that may be put into ``root`` now: free in its file system, and in the memory that this
    machine or container has left, of which a tenth stays free."""
    free = os.statvfs(root)
    return min(free.f_bavail * free.f_frsize, int(0.9 * free_memory()))


def used(path: str) -> int:
    """Bytes that the files below ``path`` occupy."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _token(root: str) -> str:
    """A random name of the folder, the first rank's: all others find it there."""
    path = os.path.join(root, _TOKEN)
    if not os.path.lexists(path):  # there is one after a restart, when the file system may be full
        draft = os.path.join(root, f".{_TOKEN}-{os.urandom(8).hex()}")
        with open(
            os.open(
                draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            ),
            "w",
        ) as file:
            file.write(os.urandom(16).hex())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        os.unlink(draft)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
        return file.read(64)

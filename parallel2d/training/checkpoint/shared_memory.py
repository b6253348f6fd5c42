"""The folder in shared memory that outlives a node's workers: `open_place` names it and makes it
private."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from parallel2d.base.files import private_folders
from parallel2d.base.memory import free_memory
from parallel2d.base.topology import MEMORY_DIR, SHARED_MEMORY


def open_place() -> str:
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
        private_folders.make_private(path)
        return os.path.abspath(path)
    if not os.path.isdir(SHARED_MEMORY):
        raise FileNotFoundError(
            errno.ENOENT, f"no shared memory folder; set {MEMORY_DIR} to one", SHARED_MEMORY
        )
    return private_folders.open_folder(os.getppid(), SHARED_MEMORY)


def free_bytes(place: str) -> int:
    """Bytes that may be put into ``place`` now: a tenth of the memory that this machine or
    container has left stays free."""
    system = os.statvfs(place)
    return min(system.f_bavail * system.f_frsize, int(0.9 * free_memory()))


def used(path: str) -> int:
    """Bytes that the files below ``path`` occupy, which other ranks may rename meanwhile."""
    blocks = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                blocks += os.lstat(os.path.join(folder, name)).st_blocks
    return 512 * blocks

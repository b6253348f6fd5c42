"""Folders of a launcher, for what must outlive its workers. Start at `open_folder`.

They are named after its process id and start time, since an id alone is given out again, inside a
folder of this user and this process-id namespace. Temporary folders are open to all users, and
these names can be guessed: so both are made private, and a folder of another user is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path


def temporary_place() -> str:
    """The user's runtime folder if it is private, otherwise the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return runtime if runtime and is_private(runtime) else tempfile.gettempdir()


def make_private(path: str) -> None:
    """Makes the folder if it does not exist, readable by this user alone. Raises OSError when it is
    a link, no folder, or belongs to another user."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
    # What was there before may be anybody's. lstat, because a link's own owner counts.
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder (a link is not followed)", path)
    if status.st_uid != os.getuid():
        reason = f"belongs to user {status.st_uid}, not to {os.getuid()}"
        raise PermissionError(errno.EPERM, reason, path)
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)


def make_own(path: str) -> None:
    """`make_private` of a folder that `folder_of` names, and of the one around it."""
    make_private(os.path.dirname(path))
    make_private(path)


def open_folder(process: int, place: str) -> str:
    """The private folder in ``place`` of a launcher with this process id; those of launchers that
    are gone are removed. Raises OSError as `make_private` does."""
    # The outer folder is private before anything in it is listed or removed.
    outer = around(place)
    make_private(outer)
    names: list[str] = []
    # A launcher that ends now may remove the folder.
    with contextlib.suppress(OSError):
        names = os.listdir(outer)
    for name in names:
        match = re.fullmatch(r"launcher-(\d+)-(\w+)", name)
        # The id may belong to a younger process by now, which has another start time.
        if match is not None and _started(int(match[1])) != match[2]:
            shutil.rmtree(os.path.join(outer, name), ignore_errors=True)
    path = folder_of(process, place)
    make_own(path)
    return path


def is_private(path: str) -> bool:
    """Whether it is a folder, no link, of this user, that nobody else can write to."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own_folder and not status.st_mode & 0o022


def around(place: str) -> str:
    """The folder in ``place`` of all launchers of this user in this process-id namespace."""
    namespace = 0  # off Linux
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return os.path.join(place, f"parallel2d-{os.getuid()}-{namespace}")


def folder_of(process: int, place: str) -> str:
    """The folder in ``place`` of a launcher with this process id."""
    return os.path.join(around(place), f"launcher-{process}-{_started(process)}")


def remove(path: str) -> None:
    """Removes a launcher's folder, if it is there, and the one around it with the last of them."""
    shutil.rmtree(path, ignore_errors=True)
    # rmdir refuses a folder that still holds those of other launchers.
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def _started(process: int) -> str:
    """When a process started, in clock ticks since boot; ``unknown`` without it, or off Linux."""
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{process}/stat").read_text()
        # proc(5): field 22 of the line, the 20th after the command's name. The name is in
        # parentheses and may itself hold spaces and parentheses, so they are counted from its end.
        return text.rpartition(")")[2].split()[19]
    return "unknown"

"""Private folders of a launcher, for files that must still exist after its workers have ended.
Start at `open_folder`.

A folder is named after the launcher's process id and start time, because process ids are reused.
Its parent folder is named after this user and the process-id namespace. All users can write to
temporary folders, and the names of both folders can be guessed. Therefore both folders are made
private, and a folder that belongs to another user is refused.
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
    """Return the user's runtime folder if it is private, otherwise the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return runtime if runtime and is_private(runtime) else tempfile.gettempdir()


def make_private(path: str) -> None:
    """Create the folder if it does not exist, readable only by this user. Raises OSError if the
    path is a link, is not a folder, or belongs to another user."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
    # An existing path may belong to another user, or be a link: lstat does not follow a link.
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder (a link is not followed)", path)
    if status.st_uid != os.getuid():
        reason = f"belongs to user {status.st_uid}, not to {os.getuid()}"
        raise PermissionError(errno.EPERM, reason, path)
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)


def make_own(path: str) -> None:
    """Apply `make_private` to a folder of `folder_of`, and to its parent."""
    make_private(os.path.dirname(path))
    make_private(path)


def open_folder(process: int, place: str) -> str:
    """Create the private folder in ``place`` for the launcher with process id ``process``. Remove
    the folders of launchers that have ended. Raises OSError as `make_private` does."""
    # The parent folder is private before its entries are listed or removed.
    outer = around(place)
    make_private(outer)
    names: list[str] = []
    # Another launcher may end now and remove the folder.
    with contextlib.suppress(OSError):
        names = os.listdir(outer)
    for name in names:
        match = re.fullmatch(r"launcher-(\d+)-(\w+)", name)
        # The id may belong to a newer process, which has another start time.
        if match is not None and _started(int(match[1])) != match[2]:
            shutil.rmtree(os.path.join(outer, name), ignore_errors=True)
    path = folder_of(process, place)
    make_own(path)
    return path


def is_private(path: str) -> bool:
    """True if ``path`` is a folder (not a link) of this user without write permission for
    others."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own_folder and not status.st_mode & 0o022


def around(place: str) -> str:
    """Return the path of the parent folder in ``place``, which all launchers of this user in this
    process-id namespace share."""
    namespace = 0  # on systems without /proc
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return os.path.join(place, f"parallel2d-{os.getuid()}-{namespace}")


def folder_of(process: int, place: str) -> str:
    """Return the folder in ``place`` of the launcher with this process id."""
    return os.path.join(around(place), f"launcher-{process}-{_started(process)}")


def remove(path: str) -> None:
    """Remove a launcher's folder, if it exists, and the parent folder if it is empty."""
    shutil.rmtree(path, ignore_errors=True)
    # rmdir fails if the parent still has folders of other launchers.
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def process_identity(process: int) -> str:
    """Return the identity ``MACHINE/PROCESS-START`` of a process. MACHINE has the boot id of the
    machine and the process-id namespace; PROCESS-START has the process id and the start time. No
    other process has the same identity."""
    machine = "unknown"
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{machine}/{process}-{_started(process)}"


def _started(process: int) -> str:
    """Return the start time of a process, in clock ticks since boot; ``unknown`` if the process
    does not exist, and on other systems than Linux."""
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{process}/stat").read_text()
        # proc(5): field 22 of the line, the 20th after the command's name. The name is in
        # parentheses and may contain spaces and parentheses, so the fields are counted from the
        # last parenthesis.
        return text.rpartition(")")[2].split()[19]
    return "unknown"

"""Folders that live as long as the process which starts a node's workers, for what must outlive the workers.

A place (a temporary folder, shared memory) flows in, the path of a folder in it flows out. It is named after that process's id and start
time, since an id alone is given out again, inside a folder of this user and this process-id namespace, where ids of others mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil


def around(place: str) -> str:
    """The folder in ``place`` that holds those of all launchers of this user in this process-id namespace."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        namespace = 0
    return os.path.join(place, f"parallel2d-{os.getuid()}-{namespace}")


def folder_of(process: int, place: str) -> str:
    """The folder in ``place`` of a launcher with this process id."""
    return os.path.join(around(place), f"launcher-{process}-{_started(process)}")


def remove(path: str) -> None:
    """Removes a launcher's folder, and the one around it when that was the last. Nothing happens when it is not there."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def remove_stale(place: str) -> None:
    """Removes the folders in ``place`` of launchers that no longer exist."""
    try:
        names = os.listdir(around(place))
    except OSError:
        return
    for name in names:
        match = re.fullmatch(r"launcher-(\d+)-(\w+)", name)
        if match and _started(int(match[1])) != match[2]:
            shutil.rmtree(os.path.join(around(place), name), ignore_errors=True)


def _started(process: int) -> str:
    """When a process started, in clock ticks since boot; ``unknown`` for one that does not exist, or off Linux."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "unknown"

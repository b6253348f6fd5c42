"""A lock that lets one process at a time write a folder, also when some of them are killed:
`folder_lock`.

It holds among the processes of all machines that share the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[int]:
    """Waits for and holds the folder's lock; creates the folder. Yields the lock's file descriptor.

    A flock(2) belongs to the open file: the kernel releases it when the last process that inherited
    the descriptor has ended, however it ended. If workers inherit it, the next holder also waits
    for the workers of a killed parent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the process that prepares %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()

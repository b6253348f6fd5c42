"""One process at a time in a folder, also when some of them are killed.

A folder flows in; while the context lasts, no other process of any machine that shares the file
system is in it.
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

    flock(2) belongs to the open file: the kernel drops it when the last process that inherited the
    descriptor is gone, in whatever way. Handing it to workers makes a successor wait for the
    workers of a killed parent, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the process that prepares %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()

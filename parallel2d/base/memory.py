"""Memory of this host. `free_memory` measures the free memory, and `keep_freed_memory` makes malloc
reuse freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import os

import psutil

_CGROUPS = "/sys/fs/cgroup"


def free_memory() -> int:
    """Return the bytes that can be allocated now, within the limits of the machine and of the
    container of this process."""
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # "max" stands for no limit
        with open("/proc/self/cgroup") as file:
            group = next(line.strip().split("::", 1)[1] for line in file if line.startswith("0::"))
        # The limit may be set for this control group or for any of its parents.
        while True:
            with contextlib.suppress(OSError, ValueError):
                facts = {}
                for name in ("max", "current", "stat"):
                    with open(os.path.join(_CGROUPS, group.lstrip("/"), f"memory.{name}")) as file:
                        facts[name] = file.read()
                # Inactive file caches count as used memory, but the kernel frees them when memory
                # is needed.
                words = facts["stat"].split()
                cached = int(words[words.index("inactive_file") + 1])
                available = min(available, int(facts["max"]) - int(facts["current"]) + cached)
            if group in ("", "/"):
                break
            group = os.path.dirname(group)
    return max(available, 0)


# Constants of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Make glibc keep up to 1 GiB of freed memory for the next allocations. Otherwise the kernel
    must provide new pages for the gradients in every step. With another C library nothing
    changes."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        # Larger blocks are always returned to the system: 32 MiB is glibc's maximum.
        set_option(_MMAP_THRESHOLD, 32 * 2**20)
        set_option(_TRIM_THRESHOLD, 2**30)

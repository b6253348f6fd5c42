"""Memory of this host: `free_memory` says what is left, `keep_freed_memory` has it used again."""

from __future__ import annotations

import contextlib
import ctypes
import os

import psutil

_CGROUPS = "/sys/fs/cgroup"


def free_memory() -> int:
    """Bytes that may be allocated now, in this machine and in the container that this process is
    in."""
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max", which is no number
        with open("/proc/self/cgroup") as file:
            group = next(line.strip().split("::", 1)[1] for line in file if line.startswith("0::"))
        # The limit may be that of this group or of any around it.
        while True:
            with contextlib.suppress(OSError, ValueError):
                facts = {}
                for name in ("max", "current", "stat"):
                    with open(os.path.join(_CGROUPS, group.lstrip("/"), f"memory.{name}")) as file:
                        facts[name] = file.read()
                # Cached contents of files that nobody used lately count as used, and are given back
                # when needed.
                words = facts["stat"].split()
                cached = int(words[words.index("inactive_file") + 1])
                available = min(available, int(facts["max"]) - int(facts["current"]) + cached)
            if group in ("", "/"):
                break
            group = os.path.dirname(group)
    return max(available, 0)


# Of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Has glibc keep up to 1 GiB that is freed, for what is allocated next. Without it each step
    pays for the pages of its gradients anew. Another allocator is left as it is."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        # Larger blocks are always given back: 32 MiB is the most that glibc takes.
        set_option(_MMAP_THRESHOLD, 32 * 2**20)
        set_option(_TRIM_THRESHOLD, 2**30)

"""Tests in a child process with limits whether a library can read an untrusted file:
`try_in_child`."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable

import psutil

from parallel2d.base.errors import ConfigError

# Limits of a child, in addition to the size of the file. Half a million tensors fit.
MOST_SECONDS, MOST_BYTES = 20, 2**30
_BYTES_A_SECOND = 2**28


def try_in_child(path: str, size: int, use: Callable[[], object]) -> None:
    """Call ``use``, which reads ``size`` bytes at ``path``, in a forked child process.

    A file of a few bytes can make a library use any amount of memory or time, or crash the process.
    If this call returns, the library can safely read the same file in this process.

    Raises:
        ConfigError: if ``use`` raises it, if the child crashes, or if the child exceeds the limit
            of seconds or bytes.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            # Discard standard error, because native code writes to it before it aborts.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            # Some libraries read the complete file into memory.
            memory = psutil.Process().memory_info().vms + size + MOST_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            seconds = MOST_SECONDS + size // _BYTES_A_SECOND
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # The limit of CPU time does not end a child that waits, so an alarm ends it.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10 * seconds)
            use()
            os._exit(0)
        except ConfigError as error:
            os.write(sender, str(error).encode())
        finally:
            # `sys.exit` would run the exit handlers of the parent.
            os._exit(1)
    os.close(sender)
    with open(receiver, encoding="utf-8") as answer:
        problem = answer.read()
    _, status = os.waitpid(child, 0)
    if status:
        limits = f"{MOST_SECONDS} seconds or {MOST_BYTES >> 20} MiB"
        name = os.path.basename(path)
        raise ConfigError(problem or f"{name} is not loaded: it takes above {limits}")

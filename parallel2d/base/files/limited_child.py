"""Trial of a library on an untrusted file in a child process with limits: `try_in_child`."""

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

    A file of a few bytes can make a library use any amount of memory or time, or end the process.
    After this call the library may read the same file in this process.

    Raises:
        ConfigError: if ``use`` raises it, if the child ends in another way, and if the child
            exceeds the limits of seconds or bytes.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            # Native code that aborts writes to standard error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            # Some libraries read the complete file into memory.
            memory = psutil.Process().memory_info().vms + size + MOST_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            seconds = MOST_SECONDS + size // _BYTES_A_SECOND
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # A child that waits uses no CPU time.
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

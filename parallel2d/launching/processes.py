"""Functions for the processes of a node. `workers_per_node` counts the ranks of the node.
`end_with_parent` and `set_process_name` set up a process. `open_standard_streams` and
`keep_others_from_writing` run before a process opens files. `signals_raised` converts signals to
exceptions in a launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from parallel2d.base.config import LaunchConfig
from parallel2d.base.errors import ConfigError

CPU_WORKERS = 4  # value of nproc_per_node=auto on a machine without accelerators

# Signals that a scheduler or a terminal may send to every process of a job.
BATCH_SIGNALS = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}

_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2), from <linux/prctl.h>


class Signalled(BaseException):
    """A launcher has received a signal to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `Signalled` in the main thread for signals that end a launcher or ask it to save."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise Signalled(signal.Signals(number))

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {}
        for n in BATCH_SIGNALS - {signal.SIGUSR2}:
            before[n] = signal.signal(n, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None means that the handler was not installed from Python. This handler cannot be
            # restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def workers_per_node(config: LaunchConfig) -> int:
    """Return ``launch.nproc_per_node``. Raises `ConfigError` if it exceeds the accelerators."""
    from parallel2d.base.device import device_count

    accelerators = device_count()
    if config.nproc_per_node == "auto":
        return accelerators or CPU_WORKERS
    wanted = int(config.nproc_per_node)
    # Any number of workers may share a CPU.
    if 0 < accelerators < wanted:
        raise ConfigError(
            f"launch.nproc_per_node={wanted}: this machine has {accelerators} accelerators, and "
            "two ranks cannot share one"
        )
    return wanted


def end_with_parent(parent: int | None = None) -> None:
    """Make the kernel end this process when its parent ends for any reason (Linux; no effect on
    other systems). ``parent`` is the process id of the parent. Without ``parent``, this function
    does not notice a parent that ended before the call."""
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel sends no signal for a parent that ended before. In this case the parent id has
    # changed.
    if os.getppid() != parent:
        os._exit(1)


def open_standard_streams() -> None:
    """Open the null device in place of missing standard streams, which a service may lack.
    Otherwise the next opened file would get the number of a standard stream, and ranks would
    inherit it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The null device gets the lowest free number, which is the number of this stream.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def keep_others_from_writing() -> None:
    """Set the umask so that other users cannot write to files that this process and its children
    create. The files in a run directory determine the code and the data that a run loads."""
    os.umask(os.umask(0o077) | 0o002)


def set_process_name(name: str) -> None:
    """Set the name that ``ps -o comm`` and ``top`` show (Linux, 15 characters; elsewhere no
    effect)."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)

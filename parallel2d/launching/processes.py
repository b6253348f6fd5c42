"""The processes of a node: `workers_per_node` counts its ranks, `end_with_parent` ends a process
with its parent, `set_process_name` names it; `open_standard_streams` and `keep_others_from_writing`
come before it opens files. `signals_raised`: in a launcher, signals are exceptions."""

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

CPU_WORKERS = 4  # nproc_per_node=auto on a machine without accelerators

# What a scheduler or a terminal may send to every process of a job.
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
    """A launcher got a signal to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Inside, in the main thread, signals that end a launcher or ask it to save are raised as
    `Signalled`."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise Signalled(signal.Signals(number))

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: signal.signal(n, stop) for n in BATCH_SIGNALS - {signal.SIGUSR2}}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was not installed from Python, and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def workers_per_node(config: LaunchConfig) -> int:
    """``launch.nproc_per_node``. Raises `ConfigError` for more workers than accelerators."""
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
    """Has the kernel end this process when its parent dies, however it dies (Linux; elsewhere
    nothing). ``parent``: its id; without it, one that died before this call is not noticed."""
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel sends nothing for one that died before that call: the parent is another by now.
    if os.getppid() != parent:
        os._exit(1)


def open_standard_streams() -> None:
    """Opens the null device in the place of standard streams that this process lacks, as a service
    may. Otherwise the next file takes the number of one, and ranks inherit it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def keep_others_from_writing() -> None:
    """Files of this process and its children are not for everybody to write to, whatever the umask:
    who writes to a run directory decides what the run loads."""
    os.umask(os.umask(0o077) | 0o002)


def set_process_name(name: str) -> None:
    """Sets what ``ps -o comm`` and ``top`` show (Linux, 15 characters; elsewhere nothing)."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)

"""Processes of a node: how many ranks it runs, their names, and that none outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from parallel2d.config import LaunchConfig
from parallel2d.errors import ConfigError

CPU_WORKERS = 4  # nproc_per_node=auto on a machine without accelerators


def workers_per_node(config: LaunchConfig) -> int:
    """``launch.nproc_per_node`` as a number. Raises `ConfigError` for more workers than
    accelerators."""
    import torch

    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if config.nproc_per_node == "auto":
        return accelerators or CPU_WORKERS
    wanted = int(config.nproc_per_node)
    if accelerators and wanted > accelerators:
        raise ConfigError(
            f"launch.nproc_per_node={wanted}: this machine has {accelerators} accelerators, and "
            "two ranks cannot share one"
        )
    return wanted


def end_with_parent() -> None:
    """Has the kernel end this process when the one that started it dies, however it dies (Linux;
    elsewhere nothing)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def set_process_name(name: str) -> None:
    """What ``ps -o comm`` and ``top`` show for this process (Linux, 15 characters; elsewhere
    nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)  # PR_SET_NAME

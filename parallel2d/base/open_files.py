"""The limit of open files (descriptors) of this process, which every connection counts against."""

from __future__ import annotations

import contextlib
import resource
import socket

from parallel2d.base.errors import ConfigError


def raise_limit() -> int:
    """Raise the soft limit to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def needed_by(ranks: int) -> int:
    """Descriptors that one rank of a job of ``ranks`` may need, as measured by
    tools/bench/scale.py: connections to some of its peers, files, and the store."""
    return (ranks - 1) // 2 + 60


def prepare(ranks: int) -> None:
    """Raise the soft limit of this process, a rank or its launcher.

    Raises:
        ConfigError: the hard limit is too low for a job of ``ranks``.
    """
    limit, needed = raise_limit(), needed_by(ranks)
    if limit < needed:
        raise ConfigError(
            f"on {socket.gethostname()} a process may open {limit} files, and a rank of {ranks} "
            f"needs up to {needed}: raise the hard limit to {needed} (ulimit -Hn, LimitNOFILE= of "
            "systemd, --ulimit nofile= of a container)"
        )

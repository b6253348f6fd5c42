"""Checks and raises the limit of open files of this process. Every connection counts as an open
file."""

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


def prepare_rank(ranks: int, *, replicas: int = 1) -> None:
    """Raise the soft limit of this process for a rank of a job with ``ranks`` ranks. A rank opens
    files and connects to some of its peers. ``replicas``: the number of replicas if replicas may
    fail, because a rank then connects to its peer in each replica. Raises `ConfigError` if the hard
    limit is too low."""
    _prepare(int(0.5 * (ranks - 1)) + 5 * (replicas - 1) + 60, f"a rank of {ranks}")


def prepare_launcher(workers: int) -> None:
    """Raise the soft limit of this process for a launcher that starts ``workers`` ranks and serves
    the store to them. Raises `ConfigError` if the hard limit is too low."""
    _prepare(3 * workers + 60, f"the launcher of {workers} ranks")


def _prepare(needed: int, needs: str) -> None:
    """Raise the soft limit. Raises `ConfigError` if it is below ``needed``, which callers compute
    from the measurements of tools/bench/scale.py."""
    limit = raise_limit()
    if limit < needed:
        raise ConfigError(
            f"on {socket.gethostname()} a process may open {limit} files, and {needs} needs up to "
            f"{needed}: raise the hard limit to {needed} (ulimit -Hn, LimitNOFILE= of systemd, "
            "--ulimit nofile= of a container)"
        )

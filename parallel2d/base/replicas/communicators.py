"""The process group of one quorum: `Communicator`, and `Gloo`.

[Note: nothing waits for another replica] A collective with a dead peer may hang for ever, and gives
no error. The host never calls a method that waits for it: it polls `Collective.is_done` next to the
events in the store, and abandons the collective when a replica is lost. This file is the only one
that calls a backend of torch for groups whose members change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo


class Collective:
    """A collective in flight.

    Args:
        work: as torch returns it.
        kept: the group and the tensors that the collective may still write to.
    """

    def __init__(self, work: dist.Work, *kept: object) -> None:
        self._work = work
        self._kept = kept

    def is_done(self) -> bool:
        """True if it has ended, successfully or not."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Block until it has ended. Raises RuntimeError for a failure. Only while no replica may be
        lost."""
        self._work.wait()

    def has_failed(self) -> bool:
        """True if it has no result. Call it after `is_done` only: before, it may block. An aborted
        collective is done, and the error of its group is set before that."""
        try:
            self._work.wait()
        except RuntimeError:
            return True
        return False


class Communicator(Protocol):
    """A process group whose members are those of the current quorum."""

    def connect(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Connect to the other members through ``store``, which no other quorum has used. Blocks
        until all members do so, and is called in a thread that may be abandoned. Returns the
        argument of `use`. Raises RuntimeError."""

    def use(self, connected: Any) -> None:
        """Start the following collectives among the members of ``connected``."""

    def start(self, call: Callable[[Any], dist.Work], *tensors: object) -> Collective:
        """Start the collective ``call(group)`` on ``tensors``. Raises RuntimeError, also without
        members."""

    def abort(self) -> None:
        """Abandon the collectives in flight. Their tensors may be written to until they end."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a collective waits for a late member."""


class Gloo:
    """A new gloo group for each quorum.

    Gloo's ``reconfigure`` would be no help: the threads of a group run its abandoned collectives
    until these time out, before any of the next quorum.
    """

    def __init__(self) -> None:
        self._group: Any = None

    def connect(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return connected_gloo(store, rank, size, timeout)

    def use(self, connected: Any) -> None:
        self._group = connected

    def start(self, call: Callable[[Any], dist.Work], *tensors: object) -> Collective:
        group = self._group
        if group is None:
            raise RuntimeError("no quorum is connected")
        return Collective(call(group), group, tensors)

    def abort(self) -> None:
        # Whoever polls a collective keeps it, and with it the group.
        self._group = None

    def set_timeout(self, timeout: timedelta) -> None:
        if self._group is not None:
            self._group.set_timeout(timeout)


def connected_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group that is connected. Blocks until all ``size`` ranks call it."""
    # A group that connects at the first message can never be freed after an abandoned collective:
    # gloo waits until its sockets hold no data, and data for that collective is never read.
    return _gloo(store, rank, size, timeout, _device())


def lazy_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group of ranks that are lost together. It connects two ranks at their first message,
    which keeps the number of descriptors low."""
    # Groups that share a lazy device do not connect.
    device = ProcessGroupGloo.create_default_device(lazy_init=True)
    return _gloo(store, rank, size, timeout, device)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, device: Any) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._devices = timeout, [device]
    return ProcessGroupGloo(store, rank, size, options)


@functools.cache
def _device() -> Any:
    """The network device of all connected groups: each device has descriptors and a thread."""
    return ProcessGroupGloo.create_default_device(lazy_init=False)

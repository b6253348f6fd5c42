"""The process group of one quorum: `Communicator`, and `Gloo`.

[Note: nothing waits for another replica] A collective with a dead peer may hang for ever, and gives
no error. The host never calls a method that waits for it: it polls `Collective.is_done` next to the
events in the store, and abandons the collective when a replica is lost. This file is the only one
that calls a backend of torch for groups whose members change.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import ReconfigureOptions

from parallel2d.base.device import set_device

_NCCL_CONNECT = timedelta(seconds=60)
_NCCL_CHANNELS = 8
_MOST_MADE = 1000  # groups of one process
_DRAIN_POLL_S = 0.001


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

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta, stop: Callable[[], bool]
    ) -> Any:
        """Connect to the other members through ``store``, which no other quorum has used. Blocks
        until all members do so. Called in a thread, which is abandoned once ``stop()``; then
        nothing may change any more. Returns the argument of `use`. Raises RuntimeError."""

    def use(self, connected: Any) -> None:
        """Start the following collectives among the members of ``connected``."""

    def start(self, name: str, *arguments: Any) -> Collective:
        """Start the collective ``name`` of torch's backend. Raises RuntimeError, also without
        members."""

    def abort(self) -> None:
        """Abandon the collectives in flight. Their tensors may be written to until they end."""

    def drain(self) -> None:
        """Return when no abandoned collective reads or writes memory of another member. After
        `abort` of all communicators."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a collective waits for a late member."""


class Gloo:
    """A new gloo group for each quorum.

    Gloo's ``reconfigure`` would be no help: the threads of a group run its abandoned collectives
    until these time out, before any of the next quorum.
    """

    def __init__(self) -> None:
        self._group: Any = None

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta, stop: Callable[[], bool]
    ) -> Any:
        return connected_gloo(store, rank, size, timeout)

    def use(self, connected: Any) -> None:
        self._group = connected

    def start(self, name: str, *arguments: Any) -> Collective:
        group = self._group
        if group is None:
            raise RuntimeError("no quorum is connected")
        return Collective(getattr(group, name)(*arguments), group, arguments)

    def abort(self) -> None:
        # Whoever polls a collective keeps it, and with it the group.
        self._group = None

    def drain(self) -> None:
        pass  # its abandoned collectives have sockets of their own

    def set_timeout(self, timeout: timedelta) -> None:
        if self._group is not None:
            self._group.set_timeout(timeout)


class _NcclCollective(Collective):
    """A collective of `Nccl`."""

    def has_failed(self) -> bool:
        """The error of the group is set before an aborted collective is done, so that it is read
        after `is_done`. Only then may a stream wait for the collective."""
        group: Any = self._kept[0]
        if group.get_error() != ErrorType.SUCCESS:
            return True
        self._work.wait()
        return False


class Nccl:
    """The group of the backend ``nccl2``, revoked when a replica is lost and reconfigured in the
    next quorum. Its works refer to it, so it is replaced only after a failed connect.

    Args:
        device: of its tensors.
        store: its keys are those of this communicator in all quorums.
        identity: a number that no other process and no earlier start of this one has. Torch makes
            the handle of a member from it.
    """

    def __init__(self, device: torch.device, store: Any, identity: int) -> None:
        self._device, self._store, self._identity = device, store, identity
        self._made = 0
        self._group: Any = None
        self._is_connecting = False  # also after a connect that was abandoned or has failed
        self._connected: Any = None
        self._flying: list[Collective] = []
        self._timeout = timedelta(minutes=10)

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta, stop: Callable[[], bool]
    ) -> Any:
        self._timeout = timeout
        if size == 1:  # a communicator of one rank would take hundreds of MiB
            return connected_gloo(dist.HashStore(), 0, 1, timeout)
        if self._group is None or self._is_connecting:
            self._group = self._new_group(timeout)
        group, self._is_connecting = self._group, True
        set_device(self._device)  # of this thread
        store.set(f"handle/{rank}", group.get_reconfigure_handle())
        options = ReconfigureOptions()
        options.handles = [store.get(f"handle/{each}").decode() for each in range(size)]
        # One uuid for all members, different from those of other quorums.
        own = int.from_bytes(os.urandom(7), "little")
        options.uuid = int(store.compare_set("uuid", "", str(own)).decode())
        options.timeout = _NCCL_CONNECT
        if stop():
            raise RuntimeError("a replica was lost meanwhile")
        group.reconfigure(options).wait()
        return group

    def _new_group(self, timeout: timedelta) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL2

        options: Any = dist.ProcessGroupNCCL.Options()
        options.enable_reconfigure, options._timeout = True, timeout
        # A slow link needs few channels, and each takes memory.
        options.config.max_ctas = _NCCL_CHANNELS
        self._made += 1
        number = self._identity * _MOST_MADE + self._made
        return ProcessGroupNCCL2(self._store, number, 1, options)

    def use(self, connected: Any) -> None:
        self._connected = connected
        self._is_connecting = self._is_connecting and connected is not self._group

    def start(self, name: str, *arguments: Any) -> Collective:
        group = self._connected
        if group is None:
            raise RuntimeError("no quorum is connected")
        work = getattr(group, name)(*arguments)
        kind = _NcclCollective if group is self._group else Collective
        collective = kind(work, group, arguments)
        self._flying = [each for each in self._flying if not each.is_done()]
        self._flying.append(collective)
        return collective

    def abort(self) -> None:
        # NCCL wants no other call meanwhile: the training loop only polls.
        if self._connected is not None and self._connected is self._group:
            self._group.abort()
        self._connected = None

    def drain(self) -> None:
        # Kernels end once they see the flag that the revocation has set.
        while any(not each.is_done() for each in self._flying):
            time.sleep(_DRAIN_POLL_S)
        self._flying = []

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._connected is not None:
            self._connected.set_timeout(timeout)


# By the name of the backend: makes the communicator of a device, with the store of the job and an
# identity, as `Nccl` takes them.
BACKENDS: dict[str, Callable[[torch.device, Any, int], Communicator]] = {
    "gloo": lambda device, store, identity: Gloo(),
    "nccl2": Nccl,
}


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

"""The process groups of one quorum: `Communicator`, `Gloo`, `Tree`, `Nccl`.

[Note: no wait for another replica] A collective with a failed peer may hang without an error.
Therefore the host never calls a method that waits for a collective. The host polls
`Collective.is_done` and the events in the store, and abandons the collective when a replica fails.
Only this file calls the backends of torch for groups with changing members.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import ReconfigureOptions

from parallel2d.base.device import set_device

_NCCL_CONNECT = timedelta(seconds=60)
_NCCL_CHANNELS = 8
_MOST_MADE = 1000  # NCCL groups that one process may create
_DRAIN_POLL_S = 0.001


class Collective:
    """A collective in flight.

    Args:
        work: the ``Work`` of torch.
        kept: objects that must live as long as the collective: its group and its tensors.
    """

    def __init__(self, work: dist.Work, *kept: object) -> None:
        self._work = work
        self._kept = kept

    def is_done(self) -> bool:
        """True if the collective has ended, successfully or not."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Block until the collective has ended. Called only while no replica may fail. Raises
        RuntimeError after a failure."""
        self._work.wait()

    def has_failed(self) -> bool:
        """True if the collective has no result. Must be called only after `is_done` is True,
        because an earlier call may block. `is_done` is True for an aborted collective too."""
        try:
            self._work.wait()
        except RuntimeError:
            return True
        return False


class Communicator(Protocol):
    """A process group of the members of the current quorum."""

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta, stop: Callable[[], bool]
    ) -> Any:
        """Connect to the other members, and return the argument for `use`. Blocks until all members
        call `connect`. Raises RuntimeError if the members cannot connect.

        Runs in a thread, which the caller abandons once ``stop()`` is True; afterwards the thread
        must not change this object.

        Args:
            store: a store that no other quorum has used.
        """

    def use(self, connected: Any) -> None:
        """Use these members for the following collectives."""

    def start(self, name: str, *arguments: Any) -> Collective:
        """Start the collective ``name``, a method of torch's backend. Raises RuntimeError after a
        failure, and if `use` was not called."""

    def abort(self) -> None:
        """Abandon the collectives in flight. These collectives may write to their tensors until
        they end."""

    def drain(self) -> None:
        """Wait until no abandoned collective accesses memory of another member. Called after
        `abort` of all communicators."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of a collective."""


class Gloo:
    """A new gloo group for each quorum.

    Gloo's ``reconfigure`` is not used, because the group would keep its threads. These threads
    would start the collectives of the next quorum only after the abandoned collectives have timed
    out.
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
        # A `Collective` in flight still references the group.
        self._group = None

    def drain(self) -> None:
        pass  # abandoned collectives use sockets of the old group

    def set_timeout(self, timeout: timedelta) -> None:
        if self._group is not None:
            self._group.set_timeout(timeout)


class Tree(Gloo):
    """All-reduces on CPU over a binary tree of the members. Each edge of the tree is a gloo group
    of two ranks. A rank therefore has at most three connections for any number of members."""

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta, stop: Callable[[], bool]
    ) -> Any:
        # Ranks connect from the root downwards. This order cannot deadlock.
        groups: list[Any] = []
        for child in (rank, 2 * rank + 1, 2 * rank + 2):
            if child == 0 or child >= size:
                groups.append(None)
                continue
            if stop():
                raise RuntimeError("a replica failed")
            edge = PrefixStore(str(child), store)
            groups.append(_gloo(edge, int(child == rank), 2, timeout, _device(), threads=1))
        return groups

    def start(self, name: str, *arguments: Any) -> Collective:
        groups = self._group
        if groups is None or name != "allreduce":
            raise RuntimeError(f"{name}: no quorum is connected")
        return Collective(_TreeAllReduce(groups, *arguments))

    def set_timeout(self, timeout: timedelta) -> None:
        for group in self._group or ():
            if group is not None:
                group.set_timeout(timeout)


class _TreeAllReduce(dist.Work):
    """An all-reduce in a thread. Each rank sends the sum of its subtree to its parent; the result
    goes from the root to all ranks. If a member fails, the survivors close their connections, so
    the thread ends with an error.

    Args:
        groups: the group with the parent, and the group with each of two children. None if the
            parent or child does not exist.
    """

    def __init__(
        self, groups: Sequence[Any], tensors: list[torch.Tensor], options: dist.AllreduceOptions
    ) -> None:
        super().__init__()
        self._error: RuntimeError | None = None
        arguments = groups, tensors, options.reduceOp
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="replicas all-reduce", daemon=True
        )
        self._thread.start()

    def _run(
        self, groups: Sequence[Any], tensors: list[torch.Tensor], operation: dist.ReduceOp
    ) -> None:
        parent, *children = groups
        upwards: Any = dist.ReduceOptions()
        upwards.reduceOp = operation  # the root of an edge is its parent, rank 0
        try:
            for group in (*children, parent):
                if group is not None:
                    group.reduce(tensors, upwards).wait()
            for group in (parent, *children):
                if group is not None:
                    group.broadcast(tensors, dist.BroadcastOptions()).wait()
        except RuntimeError as error:
            # The traceback would reference this frame, and the frame the groups: a reference cycle.
            self._error = error.with_traceback(None)

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, *_: Any) -> bool:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True


class _NcclCollective(Collective):
    """A collective of `Nccl`."""

    def has_failed(self) -> bool:
        """True if the group has an error. NCCL sets this error before an aborted collective is
        done. If the group has no error, the current stream waits for the collective."""
        group: Any = self._kept[0]
        if group.get_error() != ErrorType.SUCCESS:
            return True
        self._work.wait()
        return False


class Nccl:
    """A group of the backend ``nccl2``. The group is aborted when a replica fails, and reconfigured
    for the next quorum. The object is replaced only after a failed `connect`.

    Args:
        device: device of the tensors.
        store: the store of this communicator in all quorums.
        identity: a number that differs between processes, and between starts of a process. Torch
            derives the handle of a member from this number.
    """

    def __init__(self, device: torch.device, store: Any, identity: int) -> None:
        self._device, self._store, self._identity = device, store, identity
        self._made = 0
        self._group: Any = None
        self._is_connecting = False  # stays True after an abandoned or failed connect
        self._connected: Any = None
        self._flying: list[Collective] = []
        self._timeout = timedelta(minutes=10)

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta, stop: Callable[[], bool]
    ) -> Any:
        self._timeout = timeout
        if size == 1:  # no group, because an NCCL communicator of one rank takes hundreds of MiB
            return connected_gloo(dist.HashStore(), 0, 1, timeout)
        if self._group is None or self._is_connecting:
            self._group = self._new_group(timeout)
        group, self._is_connecting = self._group, True
        set_device(self._device)  # the current device of this thread
        store.set(f"handle/{rank}", group.get_reconfigure_handle())
        options = ReconfigureOptions()
        options.handles = [store.get(f"handle/{each}").decode() for each in range(size)]
        # The uuid must be equal for all members and different from the uuids of other quorums.
        own = int.from_bytes(os.urandom(7), "little")
        options.uuid = int(store.compare_set("uuid", "", str(own)).decode())
        options.timeout = _NCCL_CONNECT
        if stop():
            raise RuntimeError("a replica failed")
        group.reconfigure(options).wait()
        return group

    def _new_group(self, timeout: timedelta) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL2

        options: Any = dist.ProcessGroupNCCL.Options()
        options.enable_reconfigure, options._timeout = True, timeout
        # Each channel needs memory, and few channels suffice for a slow link.
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
        # During an abort, no other NCCL call is allowed. The training loop only polls.
        if self._connected is not None and self._connected is self._group:
            self._group.abort()
        self._connected = None

    def drain(self) -> None:
        # `abort` has set a flag that ends the kernels.
        while any(not each.is_done() for each in self._flying):
            time.sleep(_DRAIN_POLL_S)
        self._flying = []

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._connected is not None:
            self._connected.set_timeout(timeout)


# Creates a communicator of a backend, from the arguments of `Nccl`.
BACKENDS: dict[str, Callable[[torch.device, Any, int], Communicator]] = {
    "gloo": lambda device, store, identity: Gloo(),
    "nccl2": Nccl,
}


def connected_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a connected gloo group. Blocks until all ``size`` ranks call it."""
    # Not lazy: a lazy group could not be freed after an abandoned collective, because gloo would
    # wait until the sockets are empty, and no rank reads the data of this collective.
    return _gloo(store, rank, size, timeout, _device())


def lazy_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group inside a replica. Two ranks connect at their first message, so the group
    needs few descriptors."""
    # Groups that share a lazy device cannot connect, so each group gets a new device.
    device = ProcessGroupGloo.create_default_device(lazy_init=True)
    return _gloo(store, rank, size, timeout, device)


def _gloo(
    store: Any, rank: int, size: int, timeout: timedelta, device: Any, threads: int = 2
) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._devices, options._threads = timeout, [device], threads
    return ProcessGroupGloo(store, rank, size, options)


@functools.cache
def _device() -> Any:
    """Return the network device that all connected groups share. Each network device has a thread
    and descriptors."""
    return ProcessGroupGloo.create_default_device(lazy_init=False)

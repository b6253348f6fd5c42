"""Collectives across replicas, which end when the quorum ends: `Links`, `Hierarchy`."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.base.replicas.communicators import Collective, Communicator, Gloo, connected_gloo
from parallel2d.base.replicas.events import Events, post

# Seconds between two polls of a collective; the interval grows from the first to the second value.
_FIRST_POLL_S, _LONGEST_POLL_S = 0.00005, 0.001


@dataclass(eq=False)
class Link:
    """A communicator across replicas, which connects again for each quorum."""

    key: str  # prefix of the keys of this link in the store, equal on all ranks of the link
    communicator: Communicator
    timeout: timedelta  # time limit of a collective

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.communicator.set_timeout(timeout)


class Links:
    """All links of this rank. Their collectives belong to the current quorum."""

    def __init__(self, store: Any, events: Events) -> None:
        self._store, self._events = store, events
        self.epoch = -1  # number of the current quorum; -1 before the first
        self.may_fail = False  # while this is False, a failed rank ends all ranks
        self._links: list[Link] = []
        # kept, because they may still write to their tensors
        self._abandoned: list[Collective] = []
        self._lost = threading.Event()

    @property
    def lost(self) -> bool:
        """True once the current quorum has ended."""
        return self._lost.is_set()

    def add(self, link: Link) -> None:
        self._links.append(link)

    def give_up(self) -> None:
        """Mark the current quorum as ended: all its collectives end without a result."""
        self._lost.set()

    def enter(self, epoch: int) -> None:
        """Accept collectives of quorum ``epoch`` from now on."""
        self.epoch = epoch
        self._lost.clear()

    def is_over(self, epoch: int) -> bool:
        """True if quorum ``epoch`` has ended. A background thread may pass the number of an earlier
        quorum."""
        return self._lost.is_set() or self.epoch != epoch

    def fail(self, epoch: int) -> None:
        """Announce to all ranks that quorum ``epoch`` has ended."""
        if not self.is_over(epoch):
            self.give_up()
            post(self._store, "break", epoch, self._events.count)

    # Collectives

    def begin(self, link: Link, epoch: int, name: str, *arguments: Any) -> Collective | None:
        """Start the collective ``name`` of quorum ``epoch``. None if this quorum has ended."""
        if not self.may_fail:
            return link.communicator.start(name, *arguments)
        if not self.is_over(epoch):
            try:
                return link.communicator.start(name, *arguments)
            except RuntimeError:
                self.fail(epoch)
        return None

    def finish(self, collective: Collective | None, epoch: int) -> bool:
        """Poll ``collective`` until it is done. False if quorum ``epoch`` ends first."""
        if collective is None:
            return False
        if not self.may_fail:
            collective.wait()
            return True
        if not self._poll(collective.is_done, epoch):
            self._abandoned.append(collective)
            return False
        # After `is_done`: an aborted collective is done, and `has_failed` shows that it failed.
        if collective.has_failed():
            self.fail(epoch)
            return False
        return True

    def _poll(self, is_done: Callable[[], bool], epoch: int) -> bool:
        """Return True once ``is_done()``, or False if quorum ``epoch`` ends first."""
        pause = _FIRST_POLL_S
        while not is_done():
            if self.is_over(epoch):
                return is_done()
            # `Event.wait` would poll in longer intervals.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        return True

    # Connections

    def abort(self) -> None:
        """End all collectives in flight. Afterwards no collective accesses the memory of a peer."""
        for link in self._links:
            link.communicator.abort()
        for link in self._links:
            link.communicator.drain()
        self._abandoned = [each for each in self._abandoned if not each.is_done()]

    def connect(self, connect_one: Callable[[Link], Any]) -> bool:
        """Connect all links in the current quorum. False if this quorum ends first."""
        connected = self.in_thread(lambda: list(map(connect_one, self._links)), self.epoch)
        if connected is None:
            return False
        for link, members in zip(self._links, connected, strict=True):
            link.communicator.use(members)
        return True

    def in_thread(self, connect: Callable[[], Any], epoch: int) -> Any:
        """Return the result of ``connect()``, which blocks until other replicas call it too. None
        if quorum ``epoch`` ends first, or after an exception."""
        found: list[Any] = []

        def run() -> None:
            with contextlib.suppress(Exception):  # after an exception `in_thread` returns None
                found.append(connect())

        thread = threading.Thread(target=run, name="replicas connect", daemon=True)
        thread.start()
        has_ended = self._poll(lambda: not thread.is_alive(), epoch)
        return found[0] if has_ended and found else None

    def pair(self, store: Any, rank: int, timeout: timedelta, epoch: int) -> Callable[..., bool]:
        """Connect two ranks, 0 and 1. Return a function ``send(tensor, root=0)``, which sends a
        tensor from rank ``root`` to the other rank and returns False if quorum ``epoch`` loses a
        replica first."""
        gloo = Gloo()
        connect = functools.partial(connected_gloo, store, rank, 2, timeout)
        connected = self.in_thread(connect, epoch) if self.may_fail else connect()
        if connected is None:
            return lambda *_: False
        gloo.use(connected)
        link = Link("", gloo, timeout)

        def send(tensor: Tensor, root: int = 0) -> bool:
            options = dist.BroadcastOptions()
            options.rootRank = root
            collective = self.begin(link, epoch, "broadcast", [tensor], options)
            return self.finish(collective, epoch)

        return send


@dataclass(eq=False)
class Hierarchy:
    """All-reduces over all live ranks, in three stages: an all-reduce inside each replica, an
    all-reduce across the first ranks of the replicas, and a broadcast inside each replica. All
    ranks of a replica get the same result."""

    _links: Links
    _inside: Any  # group of the ranks of this replica
    _across: Link | None  # link of the first ranks of the replicas; None on all other ranks

    def set_timeout(self, timeout: timedelta) -> None:
        self._inside.set_timeout(timeout)
        if self._across is not None:
            self._across.set_timeout(timeout)

    def reduce(self, tensor: Tensor, operation: Any, epoch: int) -> bool:
        """Reduce ``tensor`` in place. False if quorum ``epoch`` ended before the result."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        self._inside.allreduce([tensor], options).wait()
        has_result = torch.ones(1)
        if self._across is not None:
            collective = self._links.begin(self._across, epoch, "allreduce", [tensor], options)
            has_result.fill_(float(self._links.finish(collective, epoch)))
        for each in (has_result, tensor):
            self._inside.broadcast([each], dist.BroadcastOptions()).wait()
        return bool(has_result.item())

    def least(self, value: float) -> float:
        """Return the least ``value`` of the ranks of this replica. Collective over these ranks."""
        least = torch.tensor([value], dtype=torch.float64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._inside.allreduce([least], options).wait()
        return least.item()

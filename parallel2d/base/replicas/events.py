"""Events about replicas, which ranks and launchers exchange through the store: `Events`."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

# Keys in the store
ON, RANKS, LATEST = "replicas/on", "replicas/ranks", "replicas/latest"
RECORD = "replicas/quorum/{}"
_EVENT = "replicas/event/{}"

Member = tuple[int, int]  # the number of a replica and its incarnation


def post(store: Any, kind: str, subject: Any, begin: int = 0) -> None:
    """Append an event to the events in the store. All ranks and launchers read the events in the
    same order. The numbers of the events have no gaps, even if a sender is killed.

    Args:
        kind: ``dead``: a replica has failed. ``join``: a replica waits to join. ``break``: a quorum
            has ended. ``stop``: the next quorum waits for no further replica. ``restart``: all
            ranks restart. ``end``: the job has ended.
        subject: the `Member`, or the number of the quorum that has ended.
        begin: lower bound of the number of the next event.
    """
    text = json.dumps([kind, subject, os.urandom(4).hex()])
    while store.compare_set(_EVENT.format(begin), "", text).decode() != text:
        begin += 1


class Events:
    """The events that this process has read.

    Attributes:
        count: number of these events.
        dead: the failed replicas.
        joining: the replicas that have asked to join.
        broken: number of the last quorum that has ended; -1 for none.
        stopped: number of the last quorum after which no survivor waits for further replicas; -1
            for none.
        ended: True after the end of the job.
        restarts: True if all ranks restart.
    """

    def __init__(self, store: Any) -> None:
        self.store, self.count, self.broken, self.stopped = store, 0, -1, -1
        self.dead: set[Member] = set()
        self.joining: set[Member] = set()
        self.ended = self.restarts = False

    def read_all(self) -> None:
        """Read all events up to now."""
        while self.read(0.0):
            pass

    def read(self, wait_s: float) -> bool:
        """Read the next event. False if no event arrives within ``wait_s`` seconds."""
        key = _EVENT.format(self.count)
        if wait_s:
            try:
                self.store.wait([key], timedelta(seconds=wait_s))
            except DistStoreError:
                return False
        elif not self.store.check([key]):
            return False
        kind, subject, _ = json.loads(self.store.get(key))
        self.count += 1
        if kind == "dead":
            self.dead.add(tuple(subject))
        elif kind == "join":
            self.joining.add(tuple(subject))
        elif kind == "break":
            self.broken = max(self.broken, subject)
        elif kind == "stop":
            self.stopped = max(self.stopped, subject)
        elif kind == "end":
            self.ended = True
        elif kind == "restart":
            self.restarts = True
        return True

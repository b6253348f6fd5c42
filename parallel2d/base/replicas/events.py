"""What ranks and launchers tell each other of replicas, in the store: `Events`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistStoreError

# Keys in the store
ON, RANKS, LATEST = "replicas/on", "replicas/ranks", "replicas/latest"
RECORD = "replicas/quorum/{}"
_EVENT = "replicas/event/{}"

Member = tuple[int, int]  # a replica and its life


def post(store: Any, kind: str, what: Any, begin: int = 0) -> None:
    """Appends an event, which all ranks and launchers read in one order: ``dead`` and ``join`` of a
    `Member`, ``break`` of a quorum, ``stop`` of a wait after it, ``restart`` of all. A sender
    that is killed leaves no hole."""
    text = json.dumps([kind, what, os.urandom(4).hex()])
    while store.compare_set(_EVENT.format(begin), "", text).decode() != text:
        begin += 1


class Events:
    """What was posted so far, read one after the other."""

    def __init__(self, store: Any) -> None:
        self.store, self.count, self.broken, self.stopped = store, 0, -1, -1
        self.dead: set[Member] = set()
        self.joining: set[Member] = set()
        self.ended = self.restarts = False

    def read(self, wait_s: float) -> bool:
        """Takes the next event; false where none has come within ``wait_s`` seconds."""
        key = _EVENT.format(self.count)
        if wait_s:
            try:
                self.store.wait([key], timedelta(seconds=wait_s))
            except DistStoreError:
                return False
        elif not self.store.check([key]):
            return False
        kind, what, _ = json.loads(self.store.get(key))
        self.count += 1
        if kind == "dead":
            self.dead.add(tuple(what))
        elif kind == "join":
            self.joining.add(tuple(what))
        elif kind == "break":
            self.broken = max(self.broken, what)
        elif kind == "stop":
            self.stopped = max(self.stopped, what)
        elif kind == "end":
            self.ended = True
        elif kind == "restart":
            self.restarts = True
        return True


def as_text(values: Tensor) -> str:
    """The bytes of a tensor."""
    data = values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return base64.b64encode(data).decode()


def from_text(text: str) -> Tensor:
    """A tensor of the bytes that `as_text` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def next_record(
    told: Mapping[Member, Mapping[str, Any]], joining: set[Member], needs_all: bool
) -> dict[str, Any] | None:
    """The record of the next quorum; None if no survivor has the state.

    Args:
        told: how far each survivor is, the eldest first.
        joining: the replicas that wait to join.
        needs_all: a replica needs no state of its own to be a member.
    """
    have = [each for each in told if needs_all or told[each]["has_state"]]
    if not have:
        return None
    joiners: list[Member] = []
    if all(told[each]["admit"] for each in have):
        joiners = sorted(joining.difference(have))
    furthest = max(map(told.__getitem__, have), key=lambda at: at["agreed"])
    return {
        "members": [*have, *joiners],
        "joiners": joiners,
        "agreed": furthest["agreed"],
        "result": furthest["result"],
    }

"""Writes the record of each quorum to the store: `Records`."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel2d.base.replicas.events import LATEST, RECORD, Events, Member, post

_STATUS = "replicas/at/{}/{}.{}"  # key of the status of a member at the end of a quorum


@dataclass
class Records:
    """Writes the records of quorums. A record lists the members of a quorum. When a quorum ends,
    its survivors publish their status. The next record is written by one survivor: among those with
    the state, the replica that has been a member for the longest time."""

    _store: Any
    _events: Events

    def write_first(self, members: Sequence[Member]) -> None:
        record = {"members": members, "joiners": []}
        self._store.compare_set(RECORD.format(0), "", json.dumps(record))

    def publish_status(self, epoch: int, own: Member, status: Mapping[str, Any]) -> None:
        """Publish the status of this replica, ``own``, at the end of quorum ``epoch``."""
        if self._events.broken < epoch:
            post(self._store, "break", epoch, self._events.count)
        self._store.set(_STATUS.format(epoch, *own), json.dumps(status))

    def write(
        self, epoch: int, own: Member, members: Sequence[Member], least: int, needs_all: bool
    ) -> bool:
        """Write the record of the next quorum, if this replica is the writer and the record is
        complete. The record is complete if all survivors have published their status and the quorum
        has at least ``least`` replicas. Returns False if no survivor has the state.

        Args:
            epoch: number of the quorum that has ended.
            own: this replica.
            members: the members of this quorum.
            least: required number of replicas.
            needs_all: see `next_record`.
        """
        left = []
        for each in members:
            if each not in self._events.dead:
                left.append(each)
        keys = []
        for each in left:
            keys.append(_STATUS.format(epoch, *each))
        if not self._store.check(keys):
            return True
        published = list(map(json.loads, map(self._store.get, keys)))
        waiting = self._events.joining - self._events.dead
        record = next_record(dict(zip(left, published, strict=True)), waiting, needs_all)
        if record is None:
            return False
        is_enough = len(record["members"]) >= least or self._events.stopped >= epoch
        if record["members"][0] == own and is_enough:
            self._store.compare_set(RECORD.format(epoch + 1), "", json.dumps(record))
            self._store.set(LATEST, str(epoch + 1))
        return True


def next_record(
    survivors: Mapping[Member, Mapping[str, Any]], joining: set[Member], needs_all: bool
) -> dict[str, Any] | None:
    """Return the record of the next quorum, or None if no survivor has the state.

    Args:
        survivors: the status of each survivor, from the oldest to the newest member.
        joining: the replicas that wait to join.
        needs_all: True if survivors without the state remain members, because all members load a
            checkpoint.
    """
    members = []
    for each in survivors:
        if needs_all or survivors[each]["has_state"]:
            members.append(each)
    if not members:
        return None
    receiving = set()
    for each in survivors:
        if survivors[each]["receives"]:
            receiving.add(each)
    if all(survivors[each]["admit"] for each in members):
        receiving |= joining
    joiners: list[Member] = sorted(receiving.difference(members))
    furthest = max(map(survivors.__getitem__, members), key=lambda status: status["agreed"])
    return {
        "members": [*members, *joiners],
        "joiners": joiners,
        "agreed": furthest["agreed"],
        "result": furthest["result"],
    }


def as_text(values: Tensor) -> str:
    """Return the bytes of a tensor as text."""
    data = values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return base64.b64encode(data).decode()


def from_text(text: str) -> Tensor:
    """Return the bytes of a tensor from the text of `as_text`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

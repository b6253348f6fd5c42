"""Replicas that come and go while the others train: `World`, the default process group of such a
job, and `Presence`, which of them are there.

[Note: replicas that never stop] The ranks of one shard (and tensor) group are a replica, the unit
that fails: its own groups are never touched, and when it loses a rank it ends and comes back whole.
What crosses replicas goes over groups of a *generation*, those that are there at a time. Torch lets
the default group make all others (its ``new_group``), so `World` makes groups inside the replica as
they are and gives `Across` for the replicate axis: lasting objects, whose inside is a group of the
generation. Nothing that is built needs another replica.

[Note: nothing is half applied] No rank blocks where another replica could hold it. As soon as one
is lost, whatever crosses replicas in a step returns at once and without a result; the rank finishes
its backward pass with its own replica, and the agreement of the step fails. A step is applied where
the agreement has come back to all ranks of a replica: then every replica that was there holds all
reduced gradients, and one that has not heard of it learns the outcome in the next generation and
applies its own. Otherwise nobody has applied it, and those who are there compute that global batch
again, whole.

A node that is not there when a job starts counts as lost: the world has its ranks, the members of
the first generation are the replicas that are there, and it joins as one that comes back does.

Outside of a step a collective over the world is repeated by those who are there until all of them
have its result, the same on all. What else crosses replicas there, such as the outer steps of
``sync=diloco``, is begun again until all who are there have it whole (`arrive`).

Where replicas split the state (`Presence.needs_all`), the others wait for one that is lost, and all
load copies: nothing that they have done since, half applied or not, is used.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from parallel2d.base.replicas.events import Applied as Applied
from parallel2d.base.replicas.generations import Presence as Presence
from parallel2d.base.replicas.lasting_groups import ReplicaLost as ReplicaLost

_current: list[Presence] = []


def current() -> Presence | None:
    """Those of this process's default group, where replicas may come and go."""
    return _current[0] if _current else None


def first_rank() -> int:
    """The rank that speaks for all: 0, or the first of those that are there."""
    return _current[0].first_rank if _current else 0


def is_present(rank: int) -> bool:
    """Whether this rank is there."""
    return not _current or rank in _current[0].present


def absent_ranks() -> int:
    """How many ranks of the world are not there."""
    return sum(map(len, _current[0].ranks)) - len(_current[0].present) if _current else 0


def present_ranks() -> int:
    """How many ranks are there: the size of the world, less those of lost replicas."""
    return len(_current[0].present) if _current else dist.get_world_size()


def agreed(name: str, value: str) -> str:
    """``value``; in a replica that joins others, what they gave under this ``name``."""
    if not _current:
        return value
    return _current[0].store.compare_set(f"replicas/agreed/{name}", "", value).decode()


def arrive(finish: Callable[[], object]) -> bool:
    """Whether ``finish``, which waits for collectives over the replicate axis outside of a step,
    has ended well on all ranks that are there: else they begin these again. Collective."""
    if not _current or not _current[0].on:
        finish()
        return True
    failures = torch.zeros(1)
    try:
        finish()
    except ReplicaLost:
        failures += 1
    dist.all_reduce(failures)
    return not failures.item()


def is_joining() -> bool:
    """Whether this rank's replica is a member and has no state yet."""
    return bool(_current) and _current[0].own in _current[0].joined


def crossings() -> int:
    """How many collectives of steps this process has started across replicas that may be lost."""
    return _current[0].begun if _current else 0


def init_world(
    store: Any, rank: int, size: int, together: int, life: int, timeout: timedelta
) -> Presence:
    """Makes `World`, of ``size`` ranks, the default process group. Collective over the ranks that
    start together: in the first life of all replicas the first ``together``."""
    replicas = Presence(store, rank, together, life, timeout)
    if "replicas" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "replicas",
            lambda given, rank, size, timeout: _current[0].world(given, rank, size, timeout),
            devices=["cpu"],
        )
    _current[:] = [replicas]
    dist.init_process_group(
        "replicas", store=replicas.own_store, rank=rank, world_size=size, timeout=timeout
    )
    return replicas


def init_plain_world(replicas: Presence) -> None:
    """Makes gloo's own the default process group in the place of `World`. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    forget()
    store = PrefixStore("plain", replicas.own_store)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=replicas.timeout
    )


def forget() -> None:
    """The default group was destroyed."""
    _current.clear()

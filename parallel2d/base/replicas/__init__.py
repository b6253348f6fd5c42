"""Replicas that are lost and rejoin while the others train: `World`, the default process group of
such a job, and `Quorum`, the live replicas.

[Note: replicas that never stop] The ranks of one shard (and tensor) group are a replica, the unit
that fails: its own groups are never touched, and when it loses a rank it ends and rejoins whole.
The live replicas are the *quorum*. Collectives across replicas use its communicators, which are
connected anew for each quorum. Torch sees ordinary process groups around backends of ours, which
last: the default group (`World`), and one for the replicate axis (`Across`). A replica builds them
without the others.

[Note: nothing is half applied] No rank blocks where another replica could hold it. As soon as one
is lost, whatever crosses replicas in a step returns at once and without a result; the rank finishes
its backward pass with its own replica, and the agreement of the step fails. A step is applied where
the agreement has come back to all ranks of a replica: then every replica that was there holds all
reduced gradients, and one that has not heard of it learns the outcome in the next quorum and
applies its own. Otherwise nobody has applied it, and those who are there compute that global batch
again, whole.

A node that is not there when a job starts counts as lost: the world has its ranks, the members of
the first quorum are the replicas that are there, and it joins as one that rejoins does.

Outside of a step a collective over the world is repeated by those who are there until all of them
have its result, the same on all. What else crosses replicas there, such as the outer steps of
``sync=diloco``, is begun again until all who are there have it whole (`arrive`).

Where replicas split the state (`Quorum.needs_all`), the others wait for one that is lost, and all
load copies: nothing that they have done since, half applied or not, is used.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from parallel2d.base.replicas.quorum import Quorum as Quorum
from parallel2d.base.replicas.quorum import ReplicaLost as ReplicaLost
from parallel2d.base.replicas.world import NAME, AxisOptions, Everyone, create

_current: list[Quorum] = []


def current() -> Quorum | None:
    """The quorum of this process's default group, if replicas may be lost."""
    return _current[0] if _current else None


def first_rank() -> int:
    """The rank that speaks for all: 0, or the first of those that are there."""
    return _current[0].first_rank if _current else 0


def is_present(rank: int) -> bool:
    """Whether this rank is there."""
    return not _current or rank in _current[0].live_ranks


def absent_ranks() -> int:
    """How many ranks of the world are not there."""
    return sum(map(len, _current[0].ranks)) - len(_current[0].live_ranks) if _current else 0


def present_ranks() -> int:
    """How many ranks are there: the size of the world, less those of lost replicas."""
    return len(_current[0].live_ranks) if _current else dist.get_world_size()


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


def position_over_replicas(group: dist.ProcessGroup) -> tuple[int, int]:
    """This rank's position among the live ranks of ``group``, over the replicate axis, and their
    number."""
    if not _current or not _current[0].is_divided:
        return group.rank(), group.size()
    live = _current[0].live_replicas
    return live.index(_current[0].replica), len(live)


def stay_in_quorum(group: dist.ProcessGroup | None) -> None:
    """From now on collectives of ``group``, of all ranks, raise `ReplicaLost` once a replica of the
    present quorum is lost."""
    if not _current or group is None:
        return
    backend = group._get_backend(torch.device("cpu"))
    if isinstance(backend, Everyone):
        backend.epoch = backend.quorum.synchronized


def axis_options() -> AxisOptions | None:
    """The ``pg_options`` with which ``new_group`` makes a group over the replicate axis."""
    return AxisOptions() if _current else None


def init_world(
    store: Any,
    rank: int,
    size: int,
    together: int,
    life: int,
    timeout: timedelta,
    device: torch.device,
    backend: str,
) -> Quorum:
    """Make `World`, of ``size`` ranks, the default process group. Collective over the ranks that
    start together: in the first life of all replicas the first ``together``. ``backend``: of
    tensors on ``device`` across replicas, gloo or nccl2."""
    quorum = Quorum(store, rank, together, life, timeout, device, backend)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME,
            lambda given, options: create(_current[0], given, options),
            extended_api=True,
            devices=sorted({"cpu", device.type}),
        )
    _current[:] = [quorum]
    dist.init_process_group(
        NAME, store=quorum.own_store, rank=rank, world_size=size, timeout=timeout
    )
    return quorum


def init_plain_world(replicas: Quorum, backend: str, bound: torch.device | None) -> None:
    """Make a group of torch's own ``backend`` the default process group in the place of `World`.
    ``bound``: its ``device_id``. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    forget()
    store = PrefixStore("plain", replicas.own_store)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=replicas.timeout,
        device_id=bound,
    )


def forget() -> None:
    """The default group was destroyed."""
    _current.clear()

"""Replicas that fail and join while other replicas train. A `Quorum` has the live replicas. `World`
is the default process group of a job with replicas that may fail.

[Note: replicas that never stop] The ranks that together have one copy of the model are a replica:
all ranks of one coordinate of the replicate axis. If one rank fails, its complete replica counts as
failed: all ranks of the replica end, restart and join again. The groups inside a replica never
change. The live replicas are the *quorum*. If a replica fails, leaves or joins, the quorum ends and
the live replicas form the next quorum. Each quorum has a number, and its collectives across
replicas use new communicators. For torch, two process groups across replicas exist until the job
ends: the default group (`World`) and the group of the replicate axis (`Across`). Both process
groups have a custom backend. A replica creates its process groups without the other replicas.

[Note: a step is committed everywhere or nowhere] No rank blocks in a call that another replica
could delay. After a failure all collectives across replicas end immediately, without a result. Each
rank finishes its backward pass, and the last all-reduce of the step fails. A rank commits a step if
all ranks of its replica have the result of this all-reduce. The result exists only if every member
of the quorum had all reduced gradients. If only some replicas have the result, the other replicas
receive it when the next quorum forms, and commit too. If no replica has the result, no replica
commits, and the survivors recompute the complete global batch.

A node that is missing at the start of a job counts as failed. Its ranks are in the world but not in
the first quorum, and the node joins later.

Outside of steps, the survivors repeat a collective of the default group until all survivors have
the same result. Other traffic between replicas, such as the outer steps of ``sync=diloco``, is
repeated until all live ranks have completed this traffic (`finished_everywhere`).

If replicas split the optimizer state (`Quorum.needs_all`), the survivors wait for a failed replica,
and all replicas roll back to a checkpoint. They discard all changes after this checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from parallel2d.base.replicas.quorum import Quorum as Quorum
from parallel2d.base.replicas.states import Phase, ReplicaState
from parallel2d.base.replicas.states import ReplicaLost as ReplicaLost
from parallel2d.base.replicas.world import NAME, AxisOptions, Everyone, create

_current: list[Quorum] = []


def current() -> Quorum | None:
    """Return the quorum of the default group, or None if no replica may fail."""
    return _current[0] if _current else None


def first_rank() -> int:
    """Return the leader, which logs and writes files: rank 0, or the first live rank."""
    return _current[0].first_rank if _current else 0


def is_present(rank: int) -> bool:
    """True if ``rank`` is live."""
    return not _current or rank in _current[0].live_ranks


def ranks_with_state() -> list[int] | None:
    """Return the live ranks with the complete state; None if no replica may fail."""
    if not _current:
        return None
    found: list[int] = []
    for number in _current[0].complete_replicas:
        found += _current[0].ranks[number]
    return found


def absent_ranks() -> int:
    """Return the number of ranks of failed replicas."""
    return sum(map(len, _current[0].ranks)) - len(_current[0].live_ranks) if _current else 0


def present_ranks() -> int:
    """Return the number of live ranks: the size of the world without failed replicas."""
    return len(_current[0].live_ranks) if _current else dist.get_world_size()


def agreed(name: str, value: str) -> str:
    """Return the value that the earliest caller has passed for ``name``. All replicas get this
    value."""
    if not _current:
        return value
    return _current[0].store.compare_set(f"replicas/agreed/{name}", "", value).decode()


def finished_everywhere(finish: Callable[[], object]) -> bool:
    """Call ``finish``, which waits for collectives over the replicate axis outside of a step. True
    if ``finish`` succeeded on all live ranks; otherwise all live ranks must repeat these
    collectives. Collective."""
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
    """True while this replica is a member and receives the state."""
    return bool(_current) and _current[0].state is ReplicaState.RECEIVING


def crossings() -> int:
    """Return the number of collectives that this process has started across replicas."""
    return _current[0].begun if _current else 0


def position_over_replicas(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the position of this rank among the live ranks of ``group``, and the number of these
    ranks. ``group``: a group of the replicate axis."""
    if not _current or _current[0].phase is Phase.STARTING:
        return group.rank(), group.size()
    live = _current[0].live_replicas
    return live.index(_current[0].replica), len(live)


def stay_in_quorum(group: dist.ProcessGroup | None) -> None:
    """Bind ``group``, a group of all ranks, to the current quorum. When this quorum has ended, the
    collectives of the group raise `ReplicaLost`."""
    if not _current or group is None:
        return
    backend = group._get_backend(torch.device("cpu"))
    if isinstance(backend, Everyone):
        backend.epoch = backend.quorum.synchronized


def axis_options() -> AxisOptions | None:
    """Return the ``pg_options`` that ``new_group`` needs for a group over the replicate axis; None
    if no replica may fail."""
    return AxisOptions() if _current else None


def init_world(quorum: Quorum, size: int, device_type: str) -> None:
    """Make `World` the default process group. Collective over the ranks that start together.
    ``size``: number of ranks of all replicas."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME,
            lambda given, options: create(_current[0], given, options),
            extended_api=True,
            devices=sorted({"cpu", device_type}),
        )
    _current[:] = [quorum]
    store, rank, timeout = quorum.own_store, quorum.rank, quorum.timeout
    dist.init_process_group(NAME, store=store, rank=rank, world_size=size, timeout=timeout)


def init_plain_world(replicas: Quorum, backend: str, bound: torch.device | None) -> None:
    """Replace `World` by a default process group of torch with this ``backend``. ``bound``: the
    ``device_id`` of the group. Collective."""
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
    """Discard the quorum. Called after the default group was destroyed."""
    _current.clear()

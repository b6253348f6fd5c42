"""Process groups across replicas that may fail: `World`, `Across`, `Everyone`.

Each of these classes is a `torch.distributed.Backend`. Its process group stays the same object
while the live members change. `create` returns the backend of a new group; the backend of a group
inside one replica is torch's gloo backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from parallel2d.base.replicas.communicators import Collective, lazy_gloo
from parallel2d.base.replicas.links import Link
from parallel2d.base.replicas.quorum import Quorum
from parallel2d.base.replicas.states import Phase, ReplicaLost

NAME = "replicas"  # name of the backend; torch registers it in upper case too


class AxisOptions(Backend.Options):
    """``pg_options`` of a group over the replicate axis. If each replica has a single rank, this
    group contains all ranks, and only these options distinguish it from `World`."""

    def __init__(self) -> None:
        super().__init__(NAME)


class _Ended(dist.Work):
    """The work of a finished collective."""

    def wait(self, *_: Any) -> bool:
        return True

    is_completed = is_success = wait


class _PolledWork(dist.Work):
    """A collective across replicas.

    Args:
        collective: the collective in flight; None if the quorum ended before the collective
            started.
        epoch: number of the quorum of the collective.
        required: the name of the collective, if `wait` must raise `ReplicaLost` after a failure.
            Empty if `wait` must return False after a failure; the tensors are then undefined.
    """

    def __init__(
        self, quorum: Quorum, collective: Collective | None, epoch: int, required: str
    ) -> None:
        super().__init__()
        self._quorum, self._collective = quorum, collective
        self._epoch, self._required = epoch, required

    def wait(self, *_: Any) -> bool:
        has_result = self._quorum.links.finish(self._collective, self._epoch)
        if self._required and not has_result:
            name = self._required
            raise ReplicaLost(f"a replica failed during {name} over the replicate axis")
        return has_result

    def is_completed(self) -> bool:
        return self._collective is None or self._collective.is_done()


class _LastingBackend(Backend):
    """A backend with changing members. ``rank`` and ``size`` count failed replicas too.
    ``groups``: the object that communicates."""

    def __init__(
        self, quorum: Quorum, groups: Any, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self.quorum, self.timeout, self._groups = quorum, timeout, groups

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._groups.set_timeout(timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "replicas"

    @property
    def options(self) -> Any:
        return SimpleNamespace(_timeout=self.timeout)

    def shutdown(self) -> None:
        pass


class Across(_LastingBackend):
    """The replicate axis: the ranks with the same position in each replica."""

    def __init__(
        self, quorum: Quorum, link: Link, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(quorum, link, rank, size, timeout)
        self.link = link

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._start("allreduce", tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """All-gather of the live replicas. The output rows of failed replicas are not changed."""
        live = [outputs[0][number] for number in self.quorum.live_replicas]
        return self._start("allgather", [live], inputs, opts)

    def all_gather_single(self, output: Any, own: Any, opts: Any) -> Any:
        """All-gather into one tensor, with the rows of the live replicas only."""
        return self._start("all_gather_single", output, own, opts)

    def all_to_all_single(self, output: Any, own: Any, *more: Any) -> Any:
        """All-to-all in which the tensors have one block of rows for each live replica."""
        return self._start("all_to_all_single", output, own, *more)

    def barrier(self, opts: Any) -> Any:
        return self._start("barrier", opts)

    def _start(self, name: str, *arguments: Any) -> Any:
        """Start a collective. A failure has three effects:

        * Inside a step, ``wait`` returns False, and the step is repeated.
        * Outside of steps, ``wait`` raises `ReplicaLost`, because callers ignore its result.
        * With `Quorum.needs_all`, ``wait`` returns False, because all replicas roll back.
        """
        quorum = self.quorum
        if quorum.on:
            quorum.begun += 1
        is_optional = quorum.phase is Phase.IN_STEP or quorum.needs_all
        collective = quorum.links.begin(self.link, quorum.epoch, name, *arguments)
        return _PolledWork(quorum, collective, quorum.epoch, "" if is_optional else name)


class World(_LastingBackend):
    """The default group: collectives of the live ranks. In a gather, the output rows of failed
    ranks are not changed.

    Each collective is one all-reduce on CPU. A gather is a sum in which each row is zero on all
    ranks except one. Therefore a failure has the same effect on every collective; see
    `Quorum.agree`.
    """

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        (tensor,) = tensors
        operation, is_mean = opts.reduceOp, opts.reduceOp == dist.ReduceOp.AVG
        if is_mean:
            operation = dist.ReduceOp.SUM
        count = len(self.quorum.live_ranks)
        summed = self._reduce(lambda: _copy(tensor), operation)
        if summed is not None:
            summed = summed.view(tensor.dtype).view(tensor.shape)
            tensor.copy_(summed / count if is_mean else summed)
        return _Ended()

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (own,) = inputs
        rows = outputs[0]
        live = self.quorum.live_ranks

        def own_row() -> Tensor:
            data = torch.zeros(len(rows), own.numel() * own.element_size(), dtype=torch.uint8)
            data[self.rank()] = _bytes_of(own)
            return data

        gathered = self._reduce(own_row)
        if gathered is not None:
            gathered = gathered.view(torch.uint8).view(len(rows), -1)
            for rank in live:
                _fill(rows[rank], gathered[rank])
        return _Ended()

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        # All ranks receive all rows, because after a failure `Quorum.regroup` may have to copy the
        # result to other survivors.
        (own,) = inputs
        rows = outputs[0] if outputs else [torch.empty_like(own) for _ in range(self.size())]
        return self.allgather([rows], [own], opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        (tensor,) = tensors
        root = opts.rootRank

        def contribution() -> Tensor:
            self._check_root(root)
            data = _bytes_of(tensor)
            return data if self.rank() == root else torch.zeros_like(data)

        sent = self._reduce(contribution)
        if sent is not None and self.rank() != root:
            _fill(tensor, sent)
        return _Ended()

    def barrier(self, opts: Any) -> Any:
        self._reduce(lambda: torch.zeros(1))
        return _Ended()

    def _check_root(self, root: int) -> None:
        if root not in self.quorum.live_ranks:
            raise ReplicaLost(f"broadcast from rank {root}: its replica has failed")

    def _reduce(
        self, contribution: Callable[[], Tensor], operation: Any = dist.ReduceOp.SUM
    ) -> Tensor | None:
        """Return the reduced contributions. None if a replica has failed in this step."""
        if self.quorum.phase is Phase.IN_STEP:
            reduced = contribution()
            return reduced if self.quorum.agree(reduced, operation) else None
        return self.quorum.agree_until_done(contribution, operation)


class Everyone(World):
    """A group of all ranks for a background thread. After a failure, each collective raises
    `ReplicaLost` on all ranks of a replica.

    Attributes:
        epoch: number of the quorum of the collectives; None for the current quorum.
    """

    def __init__(self, quorum: Quorum, rank: int, size: int, timeout: timedelta) -> None:
        key = quorum.new_key()
        hierarchy = quorum.new_hierarchy(key, timeout)
        super().__init__(quorum, hierarchy, rank, size, timeout)
        self._key, self._hierarchy = key, hierarchy
        self.epoch: int | None = None
        # For keys in the store: the quorum number of the last all-to-all, and the number of
        # all-to-alls in this quorum
        self._exchanges = (-1, 0)

    def all_to_all_single(
        self, received: Any, sent: Any, incoming: Any, outgoing: Any, opts: Any
    ) -> Any:
        """All-to-all as messages between pairs of ranks, because most pairs have no data."""
        quorum, epoch = self.quorum, self._own_epoch()
        counted, number = self._exchanges
        number = number + 1 if counted == epoch else 1
        self._exchanges = epoch, number
        key = f"{self._key}/{number}"
        live = quorum.live_ranks
        has_failed = len(live) != len(incoming)
        messages: dict[tuple[int, int], Tensor] = {}
        if not has_failed:
            messages = _messages(quorum.rank, live, received.split(incoming), sent.split(outgoing))
        # The order is the same on all ranks, so they cannot deadlock.
        for source, target in sorted(messages):
            if not has_failed:
                send = quorum.pair(f"{key}/{source}-{target}", source, target, epoch)
                has_failed = not send(messages[source, target])
        # All ranks of a replica must fail together.
        if self._reduce(lambda: torch.tensor([float(has_failed)])).item():
            raise ReplicaLost("a replica failed")
        return _Ended()

    def _check_root(self, root: int) -> None:
        # Whether the root is live is not checked, because the training loop may form the next
        # quorum at the same time. Without its root, the collective fails on all ranks of the
        # replica.
        pass

    def _own_epoch(self) -> int:
        return self.quorum.epoch if self.epoch is None else self.epoch

    def _reduce(
        self, contribution: Callable[[], Tensor], operation: Any = dist.ReduceOp.SUM
    ) -> Tensor:
        reduced = contribution()
        if not self._hierarchy.reduce(reduced, operation, self._own_epoch()):
            raise ReplicaLost("a replica failed")
        return reduced


def create(quorum: Quorum, given: Any, options: Any) -> Any:
    """Return the backend of a process group. ``given``: the arguments of torch; ``options``: the
    ``pg_options`` of the group."""
    ranks, rank = list(given.global_ranks_in_group), given.group_rank
    if not ranks:  # the default group
        return World(quorum, quorum, rank, given.group_size, quorum.timeout)
    own = quorum.ranks[quorum.replica]
    if not quorum.is_divided or set(ranks) <= set(own):
        return lazy_gloo(given.store, rank, len(ranks), quorum.timeout)
    in_position = sorted(each[quorum.place] for each in quorum.ranks)
    is_of_all = len(ranks) == sum(map(len, quorum.ranks))
    if sorted(ranks) == in_position and (isinstance(options, AxisOptions) or not is_of_all):
        key = f"{quorum.new_key()}/{quorum.place}"
        link = quorum.new_link(key, quorum.timeout)
        return Across(quorum, link, rank, len(ranks), quorum.timeout)
    if is_of_all:
        return Everyone(quorum, rank, len(ranks), given.timeout)
    raise RuntimeError(
        f"new_group({ranks}): if replicas may fail, a group must contain ranks of one replica, the "
        "ranks at the same position of each replica, or all ranks"
    )


def _messages(
    own: int, live: Sequence[int], received: Sequence[Tensor], sent: Sequence[Tensor]
) -> dict[tuple[int, int], Tensor]:
    """Return the data that this rank, ``own``, sends and receives, by source and target."""
    found: dict[tuple[int, int], Tensor] = {}
    for rank, incoming, outgoing in zip(live, received, sent, strict=True):
        if rank == own:
            incoming.copy_(outgoing)
            continue
        if incoming.numel():
            found[rank, own] = incoming
        if outgoing.numel():
            found[own, rank] = outgoing
    return found


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on CPU. The collective uses the copy, because it may still write to its tensor
    after it is abandoned."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _bytes_of(tensor: Tensor) -> Tensor:
    return _copy(tensor).view(-1).view(torch.uint8)


def _fill(tensor: Tensor, data: Tensor) -> None:
    """Write the bytes ``data`` to ``tensor``."""
    tensor.copy_(data.view(torch.uint8).clone().view(tensor.dtype).view(tensor.shape))

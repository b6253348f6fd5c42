"""Process groups of torch over replicas that may be lost: `World`, `Across`, `Everyone`.

Each is a `torch.distributed.Backend` in an ordinary process group, which lasts while its members
change. `create` makes the backend of a group; groups of ranks of one replica get gloo's own.
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
from parallel2d.base.replicas.quorum import Hierarchy, Link, Quorum, ReplicaLost

NAME = "replicas"  # of the backend, which torch registers in upper case too


class AxisOptions(Backend.Options):
    """``pg_options`` of a group over the replicate axis. Where each replica is one rank, the ranks
    do not distinguish such a group from one of all ranks."""

    def __init__(self) -> None:
        super().__init__(NAME)


class _Ended(dist.Work):
    """The work of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    is_completed = is_success = wait


class _PolledWork(dist.Work):
    """A collective across replicas.

    Args:
        collective: None if a replica was lost before it could start.
        epoch: the quorum that it belongs to.
        required: its name if `wait` raises `ReplicaLost` for a lost replica; without, it returns
            False, and the tensors hold no result.
    """

    def __init__(
        self, quorum: Quorum, collective: Collective | None, epoch: int, required: str
    ) -> None:
        super().__init__()
        self._quorum, self._collective = quorum, collective
        self._epoch, self._required = epoch, required

    def wait(self, *_: Any) -> bool:
        has_arrived = self._quorum.finish(self._collective, self._epoch)
        if self._required and not has_arrived:
            name = self._required
            raise ReplicaLost(f"a replica was lost during {name} over the replicate axis")
        return has_arrived

    def is_completed(self) -> bool:
        return self._collective is None or self._collective.is_done()


class _LastingBackend(Backend):
    """A backend whose members change. ``rank`` and ``size`` are those with all replicas."""

    def __init__(self, quorum: Quorum, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.quorum, self.timeout = quorum, timeout

    def getBackendName(self) -> str:  # noqa: N802
        return "of groups across replicas that may be lost"

    @property
    def options(self) -> Any:
        return SimpleNamespace(_timeout=self.timeout)

    def shutdown(self) -> None:
        pass


class Across(_LastingBackend):
    """The replicate axis: the ranks in the position of this one in each replica."""

    def __init__(
        self, quorum: Quorum, link: Link, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(quorum, rank, size, timeout)
        self.link = link

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.link.set_timeout(timeout)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._start("allreduce", tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """The rows of lost replicas keep their values."""
        live = [outputs[0][number] for number in self.quorum.live_replicas]
        return self._start("allgather", [live], inputs, opts)

    def all_gather_single(self, output: Any, own: Any, opts: Any) -> Any:
        """``output`` has the size of the live replicas."""
        return self._start("all_gather_single", output, own, opts)

    def all_to_all_single(self, output: Any, own: Any, *more: Any) -> Any:
        """``output`` and ``own`` have the size of the live replicas."""
        return self._start("all_to_all_single", output, own, *more)

    def barrier(self, opts: Any) -> Any:
        return self._start("barrier", opts)

    def _start(self, name: str, *arguments: Any) -> Any:
        """Start a collective. In a step its failure fails the step. Elsewhere nothing would show
        that it has no result, unless each replica needs all others."""
        quorum = self.quorum
        if quorum.on:
            quorum.begun += 1
        required = "" if quorum.in_step or quorum.needs_all else name
        collective = quorum.begin(self.link, quorum.epoch, name, *arguments)
        return _PolledWork(quorum, collective, quorum.epoch, required)


class World(_LastingBackend):
    """The default group: collectives among the live ranks. The rows of lost ranks in a gather keep
    their values.

    Each collective is one all-reduce of a tensor on CPU: a gather adds rows that are zero on all
    ranks but one. A lost replica then has one meaning for all of them; see `Quorum.agree`.
    """

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.quorum.set_timeout(timeout)

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
        # All ranks get the rows, so that any of them can tell the others after a loss.
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
            raise ReplicaLost(f"rank {root}, which was to send to all, is lost")

    def _reduce(
        self, contribution: Callable[[], Tensor], operation: Any = dist.ReduceOp.SUM
    ) -> Tensor | None:
        """The reduced contributions; None in a step that has lost a replica."""
        quorum = self.quorum
        if quorum.in_step:
            reduced = contribution()
            quorum.committed = quorum.agree(reduced, operation)
            return reduced if quorum.committed else None
        return quorum.agree_until_done(contribution, operation)


class Everyone(World):
    """As `World`, for a thread beside the training loop. After the loss of a replica of its quorum
    each collective raises `ReplicaLost`, on all ranks of a replica.

    Attributes:
        epoch: the quorum; None: the current one.
    """

    def __init__(self, quorum: Quorum, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(quorum, rank, size, timeout)
        self.epoch: int | None = None
        self._hierarchy = Hierarchy(quorum, quorum.new_key(), timeout)
        # The all-to-alls of one quorum, counted for their keys in the store
        self._exchanges = (-1, 0)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._hierarchy.set_timeout(timeout)

    def all_to_all_single(
        self, received: Any, sent: Any, incoming: Any, outgoing: Any, opts: Any
    ) -> Any:
        """By messages between two ranks, since only few ranks have something to send."""
        quorum, epoch = self.quorum, self._own_epoch()
        counted, number = self._exchanges
        self._exchanges = epoch, number + 1 if counted == epoch else 1
        key = f"{self._hierarchy.key}/{self._exchanges[1]}"
        live = quorum.live_ranks
        failures = torch.ones(1)
        if len(live) == len(incoming):
            messages = _messages(quorum.rank, live, received.split(incoming), sent.split(outgoing))
            # All ranks take the messages in one order, and so none waits in a circle.
            has_all = all(
                quorum.send(f"{key}/{source}-{target}", source, target, data, epoch)
                for (source, target), data in sorted(messages.items())
            )
            failures.fill_(float(not has_all))
        # The ranks of a replica must fail together.
        if self._reduce(lambda: failures).item():
            raise ReplicaLost("a replica was lost")
        return _Ended()

    def _check_root(self, root: int) -> None:
        # The training loop may form the next quorum meanwhile. The collective then fails on all
        # ranks of the replica.
        pass

    def _own_epoch(self) -> int:
        return self.quorum.epoch if self.epoch is None else self.epoch

    def _reduce(
        self, contribution: Callable[[], Tensor], operation: Any = dist.ReduceOp.SUM
    ) -> Tensor:
        reduced = contribution()
        if not self._hierarchy.reduce(reduced, operation, self._own_epoch()):
            raise ReplicaLost("a replica was lost")
        return reduced


def create(quorum: Quorum, given: Any, options: Any) -> Any:
    """The backend of a process group, for torch. ``given``: the arguments of torch. ``options``:
    the ``pg_options`` of the group."""
    ranks, rank = list(given.global_ranks_in_group), given.group_rank
    if not ranks:  # the default group
        return World(quorum, rank, given.group_size, quorum.timeout)
    own = quorum.ranks[quorum.replica]
    if not quorum.is_divided or set(ranks) <= set(own):
        return lazy_gloo(given.store, rank, len(ranks), quorum.timeout)
    in_position = sorted(each[quorum.place] for each in quorum.ranks)
    is_of_all = len(ranks) == sum(map(len, quorum.ranks))
    if sorted(ranks) == in_position and (isinstance(options, AxisOptions) or not is_of_all):
        key = f"{quorum.new_key()}/{quorum.place}"
        link = quorum.new_link(key, quorum.timeout, on_device=True)
        return Across(quorum, link, rank, len(ranks), quorum.timeout)
    if is_of_all:
        return Everyone(quorum, rank, len(ranks), given.timeout)
    raise RuntimeError(
        f"new_group({ranks}): replicas may be lost, so a group has ranks of one replica, the ranks "
        "in one position of each replica, or all ranks"
    )


def _messages(
    own: int, live: Sequence[int], received: Sequence[Tensor], sent: Sequence[Tensor]
) -> dict[tuple[int, int], Tensor]:
    """By source and target the data that rank ``own`` sends and receives."""
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
    """A copy on CPU, which an abandoned collective may write to."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _bytes_of(tensor: Tensor) -> Tensor:
    return _copy(tensor).view(-1).view(torch.uint8)


def _fill(tensor: Tensor, data: Tensor) -> None:
    """Write the bytes ``data`` to ``tensor``."""
    tensor.copy_(data.view(torch.uint8).clone().view(tensor.dtype).view(tensor.shape))

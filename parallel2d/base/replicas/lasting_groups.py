"""Process groups whose inside is exchanged with every generation: `World`, `Across`, `Everyone`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d


class ReplicaLost(RuntimeError):  # noqa: N818 (named after what happened)
    """What was sent to other replicas did not arrive: one of them is gone."""


class Ended(dist.Work):
    """There is nothing to wait for."""

    def wait(self, *_: Any) -> bool:
        return True

    is_completed = is_success = wait


class PolledWork(dist.Work):
    """A collective across replicas; ``work`` is None where one was lost before. `wait` returns
    without a result once one of them is lost, or raises `ReplicaLost` where the collective's name
    is ``required``."""

    required = ""

    def __init__(self, replicas: Any, generation: int, group: Any, work: Any, kept: Any) -> None:
        super().__init__()
        self._parts = replicas, generation, group, work, kept

    def wait(self, *_: Any) -> bool:
        replicas, *parts = self._parts
        has_arrived = bool(replicas.finish(*parts))
        if self.required and not has_arrived:
            raise ReplicaLost(f"a replica was lost during {self.required} over the replicate axis")
        return has_arrived

    def is_completed(self) -> bool:
        return self._parts[3] is None or bool(self._parts[3].is_completed())


# Names of torch's hooks of a process group
_Operation = Enum("_Operation", ["ALLREDUCE", "ALLGATHER", "ALLTOALL"])


class _Lasting(ProcessGroup):
    """A group whose inside is exchanged. Torch keeps names in a backend, which this has not."""

    label = about = ""

    def __init__(self, replicas: Any, key: str, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.replicas, self.key = replicas, key
        self.inner: Any = None

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.label = str(name)

    def getGroupName(self) -> str:  # noqa: N802
        return self.label

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self.about = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.about

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner

    def shutdown(self) -> None:
        self.inner = None

    def members(self) -> list[int]:
        """The ranks in it that are there, in their order inside."""
        return self.replicas.present

    def connect(self, store: Any, timeout: timedelta) -> Any:
        """A group of those that are there. Blocks until all of them do so."""
        ranks = self.members()
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        # Connected at once: a group that connects at the first message can never be freed after a
        # collective was given up in it. Gloo then waits until its sockets hold no data, and data
        # for that collective is never read.
        options._devices = [ProcessGroupGloo.create_default_device(lazy_init=False)]
        return ProcessGroupGloo(store, ranks.index(self.replicas.rank), len(ranks), options)

    def run(self, name: str, *arguments: Any) -> Any:
        """Starts the collective ``name`` of the group inside. Its ``wait`` raises `ReplicaLost`
        outside of a step, where nothing would show that it has no result; where all replicas are
        needed, whatever follows shows it."""
        if not self.replicas.on:
            return getattr(self.inner, name)(*arguments)
        self.replicas.begun += 1
        work = self.replicas.begin(self.inner, name, arguments)
        if not (self.replicas.in_step or self.replicas.needs_all):
            work.required = name
        return work


def _refuse(name: str) -> None:
    def refuse(self: _Lasting, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{name.strip('_')} is not for groups across replicas, which come and go: use "
            "all_reduce, all_gather, gather, broadcast or barrier, or a group inside the replica"
        )

    setattr(_Lasting, name, refuse)


_COLLECTIVE = re.compile(r"(?!__)\w*(reduce|gather|scatter|all_?to_?all|send|recv)")
for _name in filter(_COLLECTIVE.match, dir(ProcessGroup)):
    _refuse(_name)


class Across(_Lasting):
    """The replicate axis: the ranks in this place of each replica."""

    def __init__(self, replicas: Any, key: str, rank: int, size: int) -> None:
        super().__init__(replicas, key, rank, size)
        # torch calls the hooks of a group in its own collectives, which these replace.
        self._before: dict[Any, Callable[[Any], None]] = {}
        self._after: dict[Any, Callable[[Any], None]] = {}
        self.register_pre_hook = self._before.__setitem__  # type: ignore[method-assign, assignment]
        self.unregister_pre_hook = self._before.pop  # type: ignore[method-assign, assignment]
        self.register_post_hook = self._after.__setitem__  # type: ignore[method-assign, assignment]
        self.unregister_post_hook = self._after.pop  # type: ignore[method-assign, assignment]
        self._numbers = itertools.count()

    def members(self) -> list[int]:
        replicas = self.replicas
        return [replicas.ranks[number][replicas.place] for number, _ in sorted(replicas.members)]

    def size(self) -> int:
        return len(self.members())

    def rank(self) -> int:
        return self.members().index(self.replicas.rank)

    def _hooked(self, kind: _Operation, sent: Any, received: Any, *call: Any) -> Any:
        """As `run` of ``call``, between the hooks."""
        given = SimpleNamespace(name=kind, input_tensors=sent, output_tensors=received)
        given.async_op, given.op_id = getattr(call[-1], "asyncOp", False), next(self._numbers)
        for hook in self._before.values():
            hook(given)
        given.work = self.run(*call)
        for hook in self._after.values():
            hook(given)
        return given.work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._hooked(_Operation.ALLREDUCE, tensors, [], "allreduce", tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._hooked(
            _Operation.ALLGATHER, inputs, outputs[0], "allgather", outputs, inputs, opts
        )

    def _allgather_base(self, output: Any, own: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._hooked(
            _Operation.ALLGATHER, [own], [output], "_allgather_base", output, own, opts
        )

    def alltoall_base(self, output: Any, own: Any, *sizes: Any) -> Any:
        return self._hooked(
            _Operation.ALLTOALL, [own], [output], "alltoall_base", output, own, *sizes
        )

    # Torch's functions call one or the other, by their version.
    all_gather_single: Any = _allgather_base
    all_to_all_single: Any = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        return self.run("barrier")


class Attempt(NamedTuple):
    """One try of a collective whose replicas may be lost."""

    buffers: Sequence[Tensor]  # of its own, which late messages may still write to
    targets: Sequence[Tensor]  # what they are copied to when all have the result
    start: Callable[[Any], Any]

    def succeed(self) -> None:
        for target, buffer in zip(self.targets, self.buffers, strict=True):
            target.copy_(buffer)


class World(_Lasting):
    """The default group: in the name of the whole job, among those ranks that are there. Results by
    rank, of a gather, keep what they held of those that are not."""

    of_steps = True  # reductions may be part of a step

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        if self.replicas.in_step and self.of_steps:
            self.replicas.met = self.replicas.generation
            self.replicas.arrived = self.replicas.reduce_in_step(tensors, opts)
            return Ended()

        def attempt() -> Attempt:
            buffers = [each.clone() for each in tensors]
            return Attempt(buffers, tensors, lambda group: group.allreduce(buffers, opts))

        return self.settle(attempt)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts, (own,) = opts or c10d.AllgatherOptions(), inputs

        def attempt() -> Attempt:
            targets = [outputs[0][rank] for rank in self.members()]
            buffers = [torch.empty_like(each) for each in targets]
            return Attempt(buffers, targets, lambda group: group.allgather([buffers], [own], opts))

        return self.settle(attempt)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:  # type: ignore[override]
        (own,) = inputs
        # All get what one asks for, so that whoever is left can tell.
        held = outputs[0] if outputs else [torch.empty_like(own) for _ in range(self.size())]
        return self.allgather([held], [own])

    def broadcast(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        inside = dist.BroadcastOptions()

        def attempt() -> Attempt:
            if opts.rootRank not in self.members():
                raise ReplicaLost(f"rank {opts.rootRank}, which was to send to all, is lost")
            inside.rootRank = self.members().index(opts.rootRank)
            buffers = [each.clone() for each in tensors]
            return Attempt(buffers, tensors, lambda group: group.broadcast(buffers, inside))

        return self.settle(attempt)

    def barrier(self, opts: Any = None) -> Any:
        return self.settle(lambda: Attempt([], [], lambda group: group.barrier()))

    def settle(self, attempt: Callable[[], Attempt]) -> Any:
        """Runs a collective until all who are there have its result."""
        self.replicas.settle(self, attempt)
        return Ended()

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        group_name: Any = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> Any:
        """Torch calls this for every group, so for each row of a mesh too."""
        if self.rank() not in ranks:
            return None
        group = _make_group(self.replicas, list(ranks), str(group_name), group_desc or "", timeout)
        # Torch registers the name and leaves this to us.
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or "group")
        return group


class Everyone(World):
    """As `World`, for a thread beside the loop: what loses a replica raises `ReplicaLost`, and so
    does all that follows in this thread's work, which belongs to one ``generation``; None: any."""

    of_steps = False
    generation: int | None = None

    def settle(self, attempt: Callable[[], Attempt]) -> Any:
        inner, tried, replicas = self.inner, attempt(), self.replicas
        if not replicas.on:
            tried.start(inner).wait()
        elif not replicas.begin(inner, tried.start, tried, self.generation).wait():
            raise ReplicaLost("a replica was lost")
        tried.succeed()
        return Ended()

    def alltoall_base(self, *arguments: Any) -> Any:
        return self.settle(lambda: Attempt([], [], lambda group: group.alltoall_base(*arguments)))

    all_to_all_single: Any = alltoall_base


def _make_group(
    replicas: Any, ranks: list[int], name: str, about: str, timeout: timedelta | None
) -> ProcessGroup:
    """Inside the replica as it is; a lasting one across replicas, once they are divided."""
    own, place = replicas.ranks[replicas.replica], ranks.index(replicas.rank)
    timeout = timeout or replicas.timeout
    if not replicas.is_divided or set(ranks) <= set(own):
        store = PrefixStore(f"{name}/{ranks}", replicas.own_store)
        plain = ProcessGroup(store, place, len(ranks))
        gloo = ProcessGroup.BackendType.GLOO
        plain._set_default_backend(gloo)
        backend = ProcessGroupGloo(store, place, len(ranks), timeout)
        plain._register_backend(torch.device("cpu"), gloo, backend)
        return plain
    in_place = [each[replicas.place] for each in replicas.ranks]
    # With replicas of one rank both are the same ranks. A group of an axis has its name.
    is_axis = sorted(ranks) == sorted(in_place) and "replica" in about
    kind: Any = Across if is_axis else Everyone
    if kind is Everyone and len(ranks) != sum(map(len, replicas.ranks)):
        raise RuntimeError(
            f"new_group({ranks}): neither inside a replica, nor in one place of all, nor "
            "everybody; replicas come and go"
        )
    group = kind(replicas, f"{kind.__name__}{len(replicas.groups)}", place, len(ranks))
    store = PrefixStore(group.key, replicas.own_store)
    if is_axis:
        store = PrefixStore(str(replicas.place), store)
    group.inner = group.connect(store, timeout)
    replicas.groups.append(group)
    return group

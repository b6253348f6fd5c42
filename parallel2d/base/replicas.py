"""Replicas that come and go while the others train: `World`, the default process group of such a
job, and `Replicas`, which of them are there.

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

Outside of a step a collective over the world is repeated by those who are there until all of them
have its result, the same on all.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

# Keys in the store
ON, RANKS, LATEST = "replicas/on", "replicas/ranks", "replicas/latest"
_EVENT, RECORD, _AT = "replicas/event/{}", "replicas/generation/{}", "replicas/at/{}/{}.{}"
LEFT_OUT = 76  # the exit code of a rank whose replica the others have given up
_TICK_S = 0.5  # between two looks at a flag that a thread sets too

Member = tuple[int, int]  # a replica and its life


class ReplicaLost(RuntimeError):  # noqa: N818 (named after what happened)
    """What was sent to other replicas did not arrive: one of them is gone."""


def post(store: Any, kind: str, what: Any, begin: int = 0) -> None:
    """Appends an event, which all ranks and launchers read in one order: ``dead`` and ``join`` of a
    `Member`, ``break`` of a generation. A sender that is killed leaves no hole."""
    text = json.dumps([kind, what, os.urandom(4).hex()])
    while store.compare_set(_EVENT.format(begin), "", text).decode() != text:
        begin += 1


class Events:
    """What was posted so far, read one after the other."""

    def __init__(self, store: Any) -> None:
        self.store, self.count, self.broken = store, 0, -1
        self.dead: set[Member] = set()
        self.joining: set[Member] = set()
        self.ended = False

    def read(self, wait_s: float) -> bool:
        """Takes the next event; false where none has come within ``wait_s`` seconds."""
        key = _EVENT.format(self.count)
        if wait_s:
            try:
                self.store.wait([key], timedelta(seconds=wait_s))
            except dist.DistStoreError:
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
        elif kind == "end":
            self.ended = True
        return True


class _Ended(dist.Work):
    def wait(self, *_: Any) -> bool:
        return True

    is_completed = is_success = wait


class PolledWork(dist.Work):
    """A collective across replicas. `wait` returns without a result once one of them is lost."""

    def __init__(self, replicas: Replicas, group: Any, work: Any, kept: Any) -> None:
        super().__init__()
        self._parts = replicas, group, work, kept

    def wait(self, *_: Any) -> bool:
        replicas, *parts = self._parts
        return replicas.finish(*parts)

    def is_completed(self) -> bool:
        return bool(self._parts[2].is_completed())


class _Lasting(ProcessGroup):
    """A group whose inside is exchanged. Torch keeps names in a backend, which this has not."""

    label = about = ""

    def __init__(self, replicas: Replicas, key: str, rank: int, size: int) -> None:
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
        return ProcessGroupGloo(store, ranks.index(self.replicas.rank), len(ranks), timeout)

    def run(self, name: str, *arguments: Any) -> Any:
        """Starts the collective ``name`` of the group inside."""
        if not self.replicas.on:
            return getattr(self.inner, name)(*arguments)
        return self.replicas.begin(self.inner, name, arguments)


class Across(_Lasting):
    """The replicate axis: the ranks in this place of each replica."""

    def members(self) -> list[int]:
        replicas = self.replicas
        return [replicas.ranks[number][replicas.place] for number, _ in replicas.members]

    def size(self) -> int:
        return len(self.members())

    def rank(self) -> int:
        return self.members().index(self.replicas.rank)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self.run("allreduce", tensors, opts or dist.AllreduceOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.run("allgather", outputs, inputs, opts or c10d.AllgatherOptions())

    def _allgather_base(self, output: Any, own: Any, opts: Any = None) -> Any:
        return self.run("_allgather_base", output, own, opts or c10d.AllgatherOptions())

    def alltoall_base(self, output: Any, own: Any, *sizes: Any) -> Any:
        return self.run("alltoall_base", output, own, *sizes)

    def barrier(self, opts: Any = None) -> Any:
        return self.run("barrier")


class World(_Lasting):
    """The default group: in the name of the whole job, among those ranks that are there. Results by
    rank, of a gather, keep what they held of those that are not."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        if self.replicas.in_step:
            work = self.run("allreduce", tensors, opts)
            self.replicas.arrived = work.wait()
            return _Ended()
        return self._settle(tensors, lambda group: group.allreduce(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts, (own,) = opts or c10d.AllgatherOptions(), inputs

        def gather(group: Any) -> Any:
            return group.allgather([[outputs[0][rank] for rank in self.members()]], [own], opts)

        return self._settle(outputs[0], gather)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:  # type: ignore[override]
        (own,) = inputs
        # All get what one asks for, so that whoever is left can tell.
        held = outputs[0] if outputs else [torch.empty_like(own) for _ in range(self.size())]
        return self.allgather([held], [own])

    def broadcast(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        root = opts.rootRank
        inside = dist.BroadcastOptions()

        def send(group: Any) -> Any:
            inside.rootRank = self.members().index(root)
            return group.broadcast(tensors, inside)

        return self._settle(tensors, send)

    def barrier(self, opts: Any = None) -> Any:
        return self._settle([], lambda group: group.barrier())

    def _settle(self, results: Sequence[Tensor], start: Callable[[Any], Any]) -> Any:
        self.replicas.settle(self, results, start)
        return _Ended()

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
        group = self.replicas.new_group(list(ranks), str(group_name), timeout)
        # Torch registers the name and leaves this to us.
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or "group")
        return group


class Everyone(World):
    """As `World`, for a thread beside the loop: what loses a replica raises `ReplicaLost`."""

    def _settle(self, results: Sequence[Tensor], start: Callable[[Any], Any]) -> Any:
        replicas, group = self.replicas, self.inner
        if not replicas.on:
            start(group).wait()
        elif not replicas.begin(group, start, (results,)).wait():
            raise ReplicaLost("a replica was lost")
        return _Ended()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._settle(tensors, lambda group: group.allreduce(tensors, opts))


class Applied(NamedTuple):
    """The last step that this rank has applied, and the sums that all ranks agreed on in it. None:
    it has no state yet."""

    step: int | None
    sums: list[float]


class Replicas:
    """Which replicas are there, as this rank knows it. Every rank makes the same calls.

    Attributes:
        on: replicas may come and go; before `start` a lost rank is an error of all.
        ranks: of each replica; one alone until `divide`.
        members: those that are there, the eldest first; ``present``: their ranks.
        in_step: what crosses replicas belongs to a step, which may be repeated.
        arrived: whether the last agreement of a step came back.
        lost: whether a replica of this generation is lost.
    """

    def __init__(self, store: Any, rank: int, size: int, life: int, timeout: timedelta) -> None:
        self.store, self.rank, self.life, self.timeout = store, rank, life, timeout
        self.on = self.in_step = self.arrived = self.lost = False
        self.ranks: list[list[int]] = [list(range(size))]
        self.hosts: list[str] = []
        if life:
            found = json.loads(store.get(RANKS))
            self.hosts = found["hosts"]
            self.ranks = [next(each for each in found["ranks"] if rank in each)]
        self.replica, self.place = 0, self.ranks[0].index(rank)
        self.members: list[Member] = [(0, life)]
        self.generation = -1
        self.joined: list[Member] = []
        self.donor = 0
        self.applied = Applied(0, [])
        self.calls = 0  # collectives of the world outside of steps
        self._last: list[Tensor] = []  # results of the last one
        self.own_store = PrefixStore(f"replicas/life/{self.ranks[0][0]}.{life}", store)
        self._groups: list[_Lasting] = []
        self._inside: Any = None  # of this replica, for its votes
        self._buried: list[Any] = []  # works of lost generations, until they end
        self._woken: set[threading.Event] = set()
        self._lock = threading.Lock()
        self._events = Events(store)

    # What is there

    @property
    def present(self) -> list[int]:
        found: list[int] = []
        for number, _ in self.members:
            found += self.ranks[number]
        return found

    @property
    def first_rank(self) -> int:
        """The rank that speaks for all."""
        return self.ranks[self.members[0][0]][0]

    @property
    def own(self) -> Member:
        return self.replica, self.life

    def world(self, store: Any, rank: int, size: int, timeout: timedelta) -> World:
        """The default group of this rank. Collective over the ranks that start together."""
        made = World(self, "world", rank, size)
        made.inner = made.connect(PrefixStore("world", self.own_store), timeout)
        self._groups.append(made)
        return made

    def divide(self, ranks: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        """From now on groups across these replicas may lose some. No communication."""
        found = [list(map(int, each)) for each in ranks]
        self.hosts = list(hosts)
        own = next(number for number, each in enumerate(found) if self.rank in each)
        if self.rank == 0 and not self.life:
            self.store.set(RANKS, json.dumps({"ranks": found, "hosts": self.hosts}))
        self.ranks, self.replica = found, own
        self.place = found[own].index(self.rank)
        self.members = (
            [(own, self.life)] if self.life else [(each, 0) for each in range(len(found))]
        )
        store = PrefixStore(f"inside/{own}", self.own_store)
        self._inside = ProcessGroupGloo(store, self.place, len(found[own]), self.timeout)

    def new_group(self, ranks: list[int], name: str, timeout: timedelta | None) -> ProcessGroup:
        """Of `World.new_group`. Collective over those of ``ranks`` that start together."""
        is_divided = self._inside is not None
        own = self.ranks[self.replica]
        timeout = timeout or self.timeout
        if is_divided and not set(ranks) <= set(own):
            in_place = [each[self.place] for each in self.ranks]
            kind: Any = Across if sorted(ranks) == sorted(in_place) else Everyone
            if kind is Everyone and len(ranks) != sum(map(len, self.ranks)):
                raise RuntimeError(
                    f"new_group({ranks}): neither inside a replica, nor in one place of all, nor "
                    "everybody; replicas come and go"
                )
            group = kind(
                self, f"{kind.__name__}{len(self._groups)}", ranks.index(self.rank), len(ranks)
            )
            if len(group.members()) > 1 or not self.life:
                store = PrefixStore(group.key, self.own_store)
                if kind is Across:
                    store = PrefixStore(str(self.place), store)
                group.inner = group.connect(store, timeout)
            self._groups.append(group)
            return group
        store = PrefixStore(f"{name}/{ranks}", self.own_store)
        group = ProcessGroup(store, ranks.index(self.rank), len(ranks))
        gloo = ProcessGroup.BackendType.GLOO
        group._set_default_backend(gloo)
        backend = ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timeout)
        group._register_backend(torch.device("cpu"), gloo, backend)
        return group

    # Coming and going

    def start(self, step: int) -> None:
        """Everything is built, and ``step`` steps are done. From now on replicas may be lost; one
        that comes back becomes a member in its first `regroup`, and has no state before."""
        self.applied = Applied(None if self.life else step, [])
        if not self.life:
            record = {"members": self.members, "joiners": [], "first": step + 1}
            self.store.compare_set(RECORD.format(0), "", json.dumps(record))
            self.generation = 0
            dist.barrier()
        self.on = True
        threading.Thread(target=self._follow, name="replicas", daemon=True).start()
        if not self.life and self.store.add("replicas/started", 1) == len(self.present):
            self.store.set(LATEST, "0")
            self.store.set(ON, "1")

    def _follow(self) -> None:
        events = self._events
        try:
            while True:
                if events.read(3600.0):
                    if self.own in events.dead:
                        os._exit(LEFT_OUT)
                    self._look()
        except Exception:  # the store is gone, which the next generation would need
            self.give_up()

    def _look(self) -> None:
        gone = any(each in self._events.dead for each in self.members)
        if gone or self._events.broken >= self.generation >= 0:
            self.give_up()

    def give_up(self) -> None:
        """Whatever crosses replicas in this generation returns now."""
        with self._lock:
            self.lost = True
            woken = list(self._woken)
        for each in woken:
            each.set()

    @property
    def joins(self) -> bool:
        """Whether a replica waits to become a member."""
        return bool(self._events.joining - self._events.dead - set(self.members))

    # Collectives that may be given up

    def begin(self, group: Any, how: Any, arguments: Any) -> Any:
        """Starts a collective of ``group``: its method ``how``, or ``how(group)``."""
        if self.lost or group is None:
            return _Lost()
        try:
            work = how(group) if callable(how) else getattr(group, how)(*arguments)
        except RuntimeError:
            self._fail()
            return _Lost()
        return PolledWork(self, group, work, arguments)

    def finish(self, group: Any, work: Any, kept: Any) -> bool:
        """Waits for ``work``; false once a replica is lost. What it writes to stays alive."""
        done = threading.Event()
        with self._lock:
            self._woken.add(done)
        work.get_future().add_done_callback(lambda _: done.set())
        try:
            while not (done.wait(_TICK_S) and work.is_completed()):
                if self.lost:
                    self._buried.append((group, work, kept))
                    return False
        finally:
            with self._lock:
                self._woken.discard(done)
        try:
            work.wait()
        except RuntimeError:
            self._fail()
            return False
        return True

    def _fail(self) -> None:
        """A connection to another replica has broken: all hear of it."""
        if not self.lost:
            self.give_up()
            post(self.store, "break", self.generation, self._events.count)

    def settle(self, world: World, results: Sequence[Tensor], start: Callable[[Any], Any]) -> None:
        """Runs a collective over those who are there, again and again until all of them have its
        ``results``, the same on all."""
        if not self.on:
            start(world.inner).wait()
            return
        number = self.calls + 1
        while True:
            arrived = self.begin(world.inner, start, (results,)).wait()
            if self.vote(arrived):
                break
            self.regroup(admit=False)
            if self.calls == number:  # others have it, and have told
                for result, values in zip(results, self._last, strict=True):
                    result.copy_(values.view(result.dtype).view_as(result))
                return
        self.calls, self._last = number, [each.clone() for each in results]

    def vote(self, is_well: bool) -> bool:
        """Whether it is so on all ranks of this replica. Collective over them."""
        if len(self.ranks[self.replica]) == 1:
            return is_well
        vote = torch.tensor([float(is_well)])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._inside.allreduce([vote], options).wait()
        return bool(vote.item())

    # A generation

    def regroup(self, *, admit: bool, least: int = 1) -> list[float] | None:
        """Forms the next generation of those who are there; with ``admit``, and where all do so,
        those too that wait to join, once there are ``least`` replicas. Returns the sums of the
        step after the last one applied here where other replicas have applied it. Collective over
        the ranks of this replica."""
        while True:
            old = self.generation
            record = self._next_record(old, admit, least)
            self.members = [tuple(each) for each in record["members"]]
            self.joined = [tuple(each) for each in record["joiners"]]
            self.generation = record["number"]
            self.lost = False
            self._look()
            if self.vote(self._form()):
                break
            self._fail()
        self.donor = self.members[0][0]
        late = None
        if self.applied.step is not None and self.applied.step == record["first"] - 2:
            late = record["sums"]
        if self.own in self.joined:
            self.calls = record["calls"]
        elif self.calls < record["calls"]:
            self.calls, self._last = record["calls"], list(map(_tensor, record["last"]))
        return late

    def _next_record(self, old: int, admit: bool, least: int) -> dict[str, Any]:
        """Waits for the record of the next generation with this replica in it."""
        for group in self._groups:
            group.inner = None
        self._buried = [each for each in self._buried if not each[1].is_completed()]
        number = old + 1
        if self.place == 0 and old >= 0:
            if self._events.broken < old:
                post(self.store, "break", old, self._events.count)
            at = {
                "step": self.applied.step,
                "sums": self.applied.sums,
                "calls": self.calls,
                "last": list(map(_text, self._last)),
                "admit": admit,
            }
            self.store.set(_AT.format(old, *self.own), json.dumps(at))
        while True:
            try:
                self.store.wait([RECORD.format(number)], timedelta(seconds=0.02))
            except dist.DistStoreError:
                if self._events.ended:
                    os._exit(0)  # the others have finished meanwhile
                if self.place == 0 and old >= 0:
                    self._lead(old, least)
                continue
            record = json.loads(self.store.get(RECORD.format(number)))
            if list(self.own) in record["members"]:
                return {**record, "number": number}
            if self.applied.step is not None:
                os._exit(LEFT_OUT)
            number += 1

    def _lead(self, old: int, least: int) -> None:
        """Writes the next generation's record, once all who are left have said where they are, if
        this replica is the eldest of them that has the state."""
        left = [each for each in self.members if each not in self._events.dead]
        keys = [_AT.format(old, *each) for each in left]
        if not self.store.check(keys):
            return
        at = {each: json.loads(self.store.get(key)) for each, key in zip(left, keys, strict=True)}
        have = [each for each in left if at[each]["step"] is not None]
        if not have:
            os._exit(LEFT_OUT)  # nobody has the state: all start again from a checkpoint
        if have[0] != self.own:
            return
        furthest = max((at[each] for each in have), key=lambda each: (each["step"], each["calls"]))
        joiners: list[Member] = []
        if all(at[each]["admit"] for each in have):
            joiners = sorted(self._events.joining - self._events.dead - set(have))
        if len(have) + len(joiners) < least:
            return
        record = {
            "members": [*have, *joiners],
            "joiners": joiners,
            "first": furthest["step"] + 1,
            "sums": furthest["sums"],
            "calls": furthest["calls"],
            "last": furthest["last"],
        }
        self.store.compare_set(RECORD.format(old + 1), "", json.dumps(record))
        self.store.set(LATEST, str(old + 1))

    def _form(self) -> bool:
        """Connects the groups of this generation; false where somebody is lost meanwhile."""
        made: list[Any] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def connect() -> None:
            try:
                for group in self._groups:
                    key = f"replicas/{self.generation}/{group.key}"
                    if isinstance(group, Across):
                        key = f"{key}/{self.place}"
                    made.append(group.connect(PrefixStore(key, self.store), self.timeout))
            except Exception as error:
                errors.append(error)
            done.set()

        with self._lock:
            self._woken.add(done)
        thread = threading.Thread(target=connect, name="replicas connect", daemon=True)
        thread.start()
        while not self.lost and thread.is_alive():
            done.wait(_TICK_S)
            thread.join(0.001 if self.lost else 1.0)
        with self._lock:
            self._woken.discard(done)
        if self.lost or errors or len(made) < len(self._groups):
            self._buried.append((made, _Ended(), None))
            return False
        for group, inner in zip(self._groups, made, strict=True):
            group.inner = inner
        return True

    @contextlib.contextmanager
    def link(self, joiner: Member) -> Iterator[Any]:
        """Between the donor's rank in this place and the joiner's: a function that sends a tensor
        from the first to the second, and returns whether it has arrived."""
        ranks = [self.ranks[self.donor][self.place], self.ranks[joiner[0]][self.place]]
        key = f"replicas/{self.generation}/state/{joiner[0]}/{self.place}"
        group = ProcessGroupGloo(
            PrefixStore(key, self.store), ranks.index(self.rank), 2, self.timeout
        )
        yield lambda tensor: self.begin(
            group, "broadcast", ([tensor], dist.BroadcastOptions())
        ).wait()

    def holds(self, lost: float) -> bool:
        """Whether the step may be applied: its agreement came back to all ranks of this replica,
        and nobody had lost anything before (``lost``, summed in it). Collective over them."""
        return self.vote(self.arrived and not lost)

    def leave(self, exit_code: int) -> NoReturn:
        """Ends this rank, and lets the others go on without its replica."""
        if self.place == 0 and self.own not in self._events.dead:
            post(self.store, "dead", self.own, self._events.count)
        os._exit(exit_code)

    def end(self) -> None:
        """The job has ended well: who waits to join ends too. Collective."""
        dist.barrier()
        self.on = False
        if self.rank == self.first_rank:
            post(self.store, "end", None, self._events.count)


class _Lost(_Ended):
    def wait(self, *_: Any) -> bool:
        return False


def _text(values: Tensor) -> str:
    data = values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return base64.b64encode(data).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


_current: list[Replicas] = []


def current() -> Replicas | None:
    """Those of this process's default group, where replicas may come and go."""
    return _current[0] if _current else None


def first_rank() -> int:
    """The rank that speaks for all: 0, or the first of those that are there."""
    return _current[0].first_rank if _current else 0


def is_present(rank: int) -> bool:
    """Whether this rank is there."""
    return not _current or rank in _current[0].present


def present_ranks() -> int:
    """How many ranks are there: the size of the world, less those of lost replicas."""
    return len(_current[0].present) if _current else dist.get_world_size()


def init_world(store: Any, rank: int, size: int, life: int, timeout: timedelta) -> Replicas:
    """Makes `World` the default process group. Collective over the ranks that start together."""
    replicas = Replicas(store, rank, size, life, timeout)
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


def forget() -> None:
    """The default group was destroyed."""
    _current.clear()

"""Which replicas are there, and how they go on when that changes: `Presence`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, ProcessGroupGloo

from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas.events import (
    LATEST,
    ON,
    RANKS,
    RECORD,
    Applied,
    Events,
    Member,
    as_text,
    from_text,
    next_record,
    post,
)
from parallel2d.base.replicas.lasting_groups import (
    Across,
    Attempt,
    Ended,
    PolledWork,
    ReplicaLost,
    World,
)

_AT = "replicas/at/{}/{}.{}"  # where a member is when a generation ends, in the store
LEFT_OUT = 76  # the exit code of a rank whose replica the others have given up
_TICK_S = 0.5  # between two looks at a flag that a thread sets too


class Presence:
    """Which replicas are there, as this rank knows it. Every rank makes the same calls.

    Attributes:
        on: replicas may come and go; before `start` a lost rank is an error of all.
        needs_all: none goes on without the others: outside of steps a loss is `ReplicaLost`.
        ranks: of each replica; one alone until `divide`.
        members: those that are there, the eldest first; ``present``: their ranks.
        in_step: what crosses replicas belongs to a step, which may be repeated.
        arrived: whether the last agreement of a step came back.
        met: the generation in which the last collective of the world was begun that all have done.
        lost: whether a replica of this generation is lost.
        joined: members of this generation that have no state yet.
        groups: those whose inside is exchanged.
        begun: collectives of steps across replicas that were started.
        exit_code: with which this rank ends once its replica does not go on.
    """

    def __init__(self, store: Any, rank: int, together: int, life: int, timeout: timedelta) -> None:
        self.store, self.rank, self.life, self.timeout = store, rank, life, timeout
        self.on = self.needs_all = self.is_divided = False
        self.in_step = self.arrived = self.lost = self._ends = False
        self.exit_code = LEFT_OUT
        self.ranks: list[list[int]] = [list(range(together))]
        self.hosts: list[str] = []
        if life:
            found = json.loads(store.get(RANKS))
            self.hosts = found["hosts"]
            self.ranks = [next(each for each in found["ranks"] if rank in each)]
        self.replica, self.place = 0, self.ranks[0].index(rank)
        self.members: list[Member] = [(0, life)]
        self.generation = self.met = -1
        self.joined: list[Member] = []
        self.applied = Applied(0, [])
        self.donor = self.begun = 0
        self.calls = 0  # collectives of the world outside of steps
        self.stop_requested: Callable[[], bool] = lambda: False  # of this rank
        self._last: list[Tensor] = []  # results of the last one
        self.own_store = PrefixStore(f"replicas/life/{self.ranks[0][0]}.{life}", store)
        self.groups: list[Any] = []
        # For votes and sums, of this replica and of this place in each
        self._inside: Any = None
        self._across: Any = None
        self._buried: list[Any] = []  # works of lost generations, until they end
        self._woken: set[threading.Event] = set()
        self._lock = threading.Lock()
        self._events = Events(store)

    # What is there

    @property
    def present(self) -> list[int]:
        found: list[int] = []
        for number, _ in sorted(self.members):  # as when none is lost
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
        self.groups.append(made)
        return made

    def divide(self, ranks: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        """From now on groups across these replicas may lose some; those whose ranks have not
        started with this one are not there. Once; others must be the same. Collective."""
        if self.is_divided:
            if self.ranks != ranks:
                raise ConfigError(
                    "meshes with other replicas: while these may be lost, all are one"
                )
            return
        found = [list(map(int, each)) for each in ranks]
        self.is_divided = True
        together = set(self.present)
        self.hosts = list(hosts)
        own = next(number for number, each in enumerate(found) if self.rank in each)
        if self.rank == 0 and not self.life:
            self.store.set(RANKS, json.dumps({"ranks": found, "hosts": self.hosts}))
        self.ranks, self.replica = found, own
        self.place = found[own].index(self.rank)
        there = [number for number, each in enumerate(found) if together.issuperset(each)]
        self.members = [(number, self.life) for number in there]
        store = PrefixStore(f"inside/{own}", self.own_store)
        self._inside = ProcessGroupGloo(store, self.place, len(found[own]), self.timeout)
        self._across = Across(self, "sums", own, len(found))
        store = PrefixStore(f"sums/{self.place}", self.own_store)
        self._across.inner = self._across.connect(store, self.timeout)
        self.groups.append(self._across)

    # Coming and going

    def start(self, step: int) -> None:
        """Everything is built, and ``step`` steps are done. From now on replicas may be lost; one
        that comes back becomes a member in its first `regroup`, and has no state before."""
        self.applied = Applied(None if self.life else step, [])
        if not self.life:
            record = {"members": self.members, "joiners": [], "first": step + 1}
            self.store.compare_set(RECORD.format(0), "", json.dumps(record))
            self.generation = 0
            if self.rank == self.first_rank:
                for number in set(range(len(self.ranks))) - dict(self.members).keys():
                    post(self.store, "dead", (number, 0))
            dist.barrier()
        self.on = True
        threading.Thread(target=self._follow, name="replicas", daemon=True).start()
        if not self.life and self.store.add("replicas/started", 1) == len(self.present):
            self.store.set(LATEST, "0")
            self.store.set(ON, "all" if self.needs_all else "any")

    def _follow(self) -> None:
        events = self._events
        try:
            while True:
                if events.read(3600.0):
                    if self.own in events.dead or events.restarts:
                        os._exit(self.exit_code)
                    self._look()
        except Exception:  # the store is gone, which the next generation would need
            if not self._ends:
                self.give_up()

    def _look(self) -> None:
        is_broken = self._events.broken >= self.generation >= 0
        if is_broken or self._events.dead.intersection(self.members):
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

    def begin(self, group: Any, how: Any, arguments: Any, generation: int | None = None) -> Any:
        """Starts a collective of ``group``: its method ``how``, or ``how(group)``.
        ``generation``: that ``group`` belongs to; None: this one."""
        generation = self.generation if generation is None else generation
        work = None
        if group is not None and not self._is_over(generation):
            try:
                work = how(group) if callable(how) else getattr(group, how)(*arguments)
            except RuntimeError:
                self._fail(generation)
        return PolledWork(self, generation, group, work, arguments)

    def _is_over(self, generation: int) -> bool:
        """Whether it has lost a replica. A thread beside the loop may see the next one already."""
        return self.lost or self.generation != generation

    def finish(self, generation: int, group: Any, work: Any, kept: Any) -> bool:
        """Waits for ``work``; false once a replica is lost. What it writes to stays alive."""
        if work is None:
            return False
        if not work.is_completed():
            done = threading.Event()
            work.get_future().add_done_callback(lambda _: done.set())
            with self._woken_by_loss(done):
                while not (self._is_over(generation) or done.wait(_TICK_S)):
                    pass
            # The future is done a moment before the work is.
            if self._is_over(generation) and not work.is_completed():
                self._buried.append((group, work, kept))
                return False
        try:
            work.wait()
        except RuntimeError:
            self._fail(generation)
            return False
        return True

    @contextlib.contextmanager
    def _woken_by_loss(self, event: threading.Event) -> Iterator[None]:
        """Inside, ``event`` is set when a replica is lost."""
        with self._lock:
            self._woken.add(event)
        try:
            yield
        finally:
            with self._lock:
                self._woken.discard(event)

    def _fail(self, generation: int) -> None:
        """A connection to another replica has broken: all hear of it."""
        if not self._is_over(generation):
            self.give_up()
            post(self.store, "break", generation, self._events.count)

    def settle(self, world: World, attempt: Callable[[], Attempt]) -> None:
        """Runs a collective of ``world`` among those who are there, again and again until all of
        them have its result, the same on all."""
        if not self.on:
            (tried := attempt()).start(world.inner).wait()
            tried.succeed()
            return
        number = self.calls + 1
        while True:
            tried = attempt()
            self.met = self.generation
            if self.vote(self.begin(world.inner, tried.start, tried).wait()):
                break
            if self.needs_all:
                raise ReplicaLost("a replica was lost")
            self.regroup(admit=False)
            if self.calls == number:  # others have it, and have told
                for buffer, values in zip(tried.buffers, self._last, strict=True):
                    buffer.copy_(values.view(buffer.dtype).view_as(buffer))
                break
        tried.succeed()
        self.calls, self._last = number, list(tried.buffers)

    def reduce_in_step(self, tensors: Any, options: Any) -> bool:
        """Reduces over the world: in each replica, across them at the first place, and back.
        Returns whether it has arrived, the same on all ranks of a replica."""
        has_arrived, inside = torch.ones(1), self._inside
        inside.allreduce(tensors, options).wait()
        if self.place == 0:
            has_arrived.fill_(self._across.run("allreduce", tensors, options).wait())
        back = dist.BroadcastOptions()
        for work in (inside.broadcast([has_arrived], back), inside.broadcast(tensors, back)):
            work.wait()
        return bool(has_arrived.item())

    def vote(self, is_well: bool) -> bool:
        """Whether it is so on all ranks of this replica. Collective over them."""
        vote = torch.tensor([float(is_well)])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._inside.allreduce([vote], options).wait()
        return bool(vote.item())

    # A generation

    def regroup(self, *, admit: bool, least: int = 1) -> list[float] | None:
        """Forms the next generation of those who are there; with ``admit``, and where all do so,
        those too that wait to join, once there are ``least`` replicas or a rank was asked to stop.
        Returns the sums of the step after the last one applied here where others have applied it.
        Collective over the ranks of this replica."""
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
            self._fail(self.generation)
        self.donor = self.members[0][0]
        late = None
        if self.applied.step is not None and self.applied.step == record["first"] - 2:
            late = record["sums"]
        if self.own in self.joined:
            self.calls = record["calls"]
        elif self.calls < record["calls"]:
            self.calls, self._last = record["calls"], list(map(from_text, record["last"]))
        return late

    def _next_record(self, old: int, admit: bool, least: int) -> dict[str, Any]:
        """Waits for the record of the next generation with this replica in it."""
        for group in self.groups:
            group.inner = None
        self._buried = [each for each in self._buried if not each[1].is_completed()]
        number = old + 1
        self._tell(old, admit)
        while True:
            self._lead(old, least)
            try:
                self.store.wait([RECORD.format(number)], timedelta(seconds=0.02))
            except DistStoreError:
                if self._events.ended:
                    os._exit(0)  # the others have finished meanwhile
                if least > 1 and self._events.stopped < old and self.stop_requested():
                    post(self.store, "stop", old, self._events.count)
                continue
            record = json.loads(self.store.get(RECORD.format(number)))
            if list(self.own) in record["members"]:
                return {**record, "number": number}
            if self.applied.step is not None:
                os._exit(LEFT_OUT)
            number += 1

    def _tell(self, old: int, admit: bool) -> None:
        """Says where this replica is at the end of generation ``old``, if it was in that."""
        if self.place or old < 0:
            return
        if self._events.broken < old:
            post(self.store, "break", old, self._events.count)
        at = {
            **self.applied._asdict(),
            "calls": self.calls,
            "last": list(map(as_text, self._last)),
            "admit": admit,
        }
        self.store.set(_AT.format(old, *self.own), json.dumps(at))

    def _lead(self, old: int, least: int) -> None:
        """Writes the next generation's record, once all who are left have said where they are, if
        this replica is the eldest of them that has the state."""
        if self.place or old < 0:
            return
        left = [each for each in self.members if each not in self._events.dead]
        keys = [_AT.format(old, *each) for each in left]
        if not self.store.check(keys):
            return
        told = dict(zip(left, map(json.loads, map(self.store.get, keys)), strict=True))
        record = next_record(told, self._events.joining - self._events.dead, self.needs_all)
        if record is None:
            os._exit(LEFT_OUT)  # nobody has the state: all start again from a checkpoint
        is_enough = len(record["members"]) >= least or self._events.stopped >= old
        if record["members"][0] != self.own or not is_enough:
            return
        self.store.compare_set(RECORD.format(old + 1), "", json.dumps(record))
        self.store.set(LATEST, str(old + 1))

    def _form(self) -> bool:
        """Connects the groups of this generation; false where somebody is lost meanwhile."""

        def connect(group: Any) -> Any:
            key = f"replicas/{self.generation}/{group.key}"
            if isinstance(group, Across):
                key = f"{key}/{self.place}"
            return group.connect(PrefixStore(key, self.store), self.timeout)

        made = self._connect([functools.partial(connect, each) for each in self.groups])
        if made is None:
            return False
        for group, inner in zip(self.groups, made, strict=True):
            group.inner = inner
        return True

    def _connect(self, makers: Sequence[Callable[[], Any]]) -> list[Any] | None:
        """Makes groups, one after the other; None where somebody is lost meanwhile."""
        made: list[Any] = []
        done = threading.Event()

        def connect() -> None:
            with contextlib.suppress(Exception):  # then not all are made
                for make in makers:
                    made.append(make())
            done.set()

        with self._woken_by_loss(done):
            threading.Thread(target=connect, name="replicas connect", daemon=True).start()
            while not (self.lost or done.wait(_TICK_S)):
                pass
        if self.lost or len(made) < len(makers):
            self._buried.append((made, Ended(), None))
            return None
        return made

    def link(self, joiner: Member) -> Callable[[Tensor], bool]:
        """A function that sends a tensor from the donor's rank in this place to the joiner's and
        returns whether it has arrived: false once one is lost."""
        ranks = [self.ranks[self.donor][self.place], self.ranks[joiner[0]][self.place]]
        key = f"replicas/{self.generation}/state/{joiner[0]}/{self.place}"
        store = PrefixStore(key, self.store)
        number = ranks.index(self.rank)
        made = self._connect([lambda: ProcessGroupGloo(store, number, 2, self.timeout)])
        if made is None:
            return lambda _: False
        (group,) = made
        return lambda tensor: self.begin(
            group, "broadcast", ([tensor], dist.BroadcastOptions())
        ).wait()

    def holds(self, lost: float) -> bool:
        """Whether the step may be applied: its agreement came back to all ranks of this replica,
        and nobody had lost anything before (``lost``, summed in it)."""
        return self.arrived and not lost

    def leave(self) -> NoReturn:
        """Ends this rank, and lets the others go on without its replica."""
        if self.place == 0 and self.own not in self._events.dead:
            post(self.store, "dead", self.own, self._events.count)
        os._exit(self.exit_code)

    def end(self) -> None:
        """The job has ended well: who waits to join ends too. Collective."""
        self._ends = True  # from now on the store may end, with a node that is done before
        dist.barrier()
        self.on = False
        if self.rank == self.first_rank:
            with contextlib.suppress(DistNetworkError, DistStoreError):
                post(self.store, "end", None, self._events.count)

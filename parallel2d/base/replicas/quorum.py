"""The live replicas, and how they continue when one is lost or rejoins: `Quorum`."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas.communicators import (
    BACKENDS,
    Collective,
    Communicator,
    Gloo,
    connected_gloo,
    lazy_gloo,
)
from parallel2d.base.replicas.events import (
    LATEST,
    ON,
    RANKS,
    RECORD,
    Events,
    Member,
    as_text,
    from_text,
    next_record,
    post,
)

_AT = "replicas/at/{}/{}.{}"  # in the store: where a member is when a quorum ends
LEFT_OUT = 76  # the exit code of a rank whose replica the others have given up
# Seconds between two polls of a collective, which grow while it takes long
_FIRST_POLL_S, _LONGEST_POLL_S = 0.00005, 0.001


class ReplicaLost(RuntimeError):  # noqa: N818 (named after what happened)
    """A collective over the replicas has no result: one of them is lost."""


class Link:
    """A communicator over the replicas, connected anew in each quorum.

    Args:
        key: names it in the store, equal on its ranks and different from others.
        communicator: of its ranks.
        timeout: of its collectives.
    """

    def __init__(self, key: str, communicator: Communicator, timeout: timedelta) -> None:
        self.key, self.communicator, self.timeout = key, communicator, timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.communicator.set_timeout(timeout)


class Quorum:
    """The replicas that are live, as this rank knows them. Every rank makes the same calls.

    Attributes:
        on: replicas may be lost; before `start` a lost rank is an error of all.
        needs_all: no replica continues without the others; a loss outside of steps raises
            `ReplicaLost`.
        ranks: the ranks of each replica; one replica until `divide`.
        members: the live replicas, the eldest first.
        epoch: the number of this quorum.
        in_step: collectives across replicas belong to a step, which may be repeated.
        committed: the last agreement in a step has come back to all ranks of this replica.
        synchronized: the epoch in which the last collective of the world was started.
        joined: members of this quorum that have no state yet.
        has_state: false in a replica that has rejoined and has not received the state.
        committed_step: the last step that a custom loop has committed here, for its errors.
        donor: the replica that sends the state to those that have joined.
        begun: the number of collectives that were started across replicas.
        has_left: this rank ends by SystemExit; the others continue without its replica.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        together: int,
        life: int,
        timeout: timedelta,
        device: torch.device,
        backend: str,
    ) -> None:
        self.store, self.rank, self.life, self.timeout = store, rank, life, timeout
        self._device, self._backend = device, backend
        self.on = self.needs_all = self.is_divided = self._ends = False
        self.in_step = self.committed = False
        self.has_state = not life
        self.committed_step: int | None = None
        self.has_left = False
        self.ranks: list[list[int]] = [list(range(together))]
        self.hosts: list[str] = []
        if life:
            found = json.loads(store.get(RANKS))
            self.hosts = found["hosts"]
            self.ranks = [next(each for each in found["ranks"] if rank in each)]
        self.replica, self.place = 0, self.ranks[0].index(rank)
        self.members: list[Member] = [(0, life)]
        self.epoch = self.synchronized = -1
        self.joined: list[Member] = []
        self.donor = self.begun = 0
        self.stop_requested: Callable[[], bool] = lambda: False  # of this rank
        self.own_store = PrefixStore(f"replicas/life/{self.ranks[0][0]}.{life}", store)
        # Agreements: those that were started and those that came back here, counted since the
        # start of the job, and the result of the last one. See `agree`.
        self._started = self._agreed = 0
        self._result = torch.zeros(0, dtype=torch.uint8)
        # Until `divide`: the ranks that start together, none of which may be lost
        self._starting: Any = lazy_gloo(
            PrefixStore("start", self.own_store), self.place, len(self.ranks[0]), timeout
        )
        self._hierarchy: Hierarchy | None = None
        self._links: list[Link] = []
        self._keys = itertools.count()
        self._abandoned: list[Collective] = []  # kept until they end
        self._lost = threading.Event()
        self._lock = threading.Lock()  # of the current epoch and its loss
        self._events = Events(store)

    # Live replicas and ranks

    @property
    def live_replicas(self) -> list[int]:
        """The numbers of the live replicas, ascending."""
        return sorted(number for number, _ in self.members)

    @property
    def live_ranks(self) -> list[int]:
        """The ranks of the live replicas."""
        found: list[int] = []
        for number in self.live_replicas:
            found += self.ranks[number]
        return found

    @property
    def first_rank(self) -> int:
        """The leader, which logs and writes for all ranks."""
        return self.ranks[self.members[0][0]][0]

    @property
    def own(self) -> Member:
        return self.replica, self.life

    @property
    def lost(self) -> bool:
        """True once a replica of this quorum is lost."""
        return self._lost.is_set()

    @property
    def joins(self) -> bool:
        """True if a replica waits to become a member."""
        return bool(self._events.joining - self._events.dead - set(self.members))

    # Groups

    def divide(self, ranks: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        """From now on groups across these replicas may lose some; replicas whose ranks have not
        started with this one are lost. Once; later calls must give the same. Collective."""
        if self.is_divided:
            if self.ranks != ranks:
                raise ConfigError(
                    "meshes with other replicas: while these may be lost, all are one"
                )
            return
        found = [list(map(int, each)) for each in ranks]
        together = set(self.live_ranks)
        self.hosts = list(hosts)
        own = next(number for number, each in enumerate(found) if self.rank in each)
        if self.rank == 0 and not self.life:
            self.store.set(RANKS, json.dumps({"ranks": found, "hosts": self.hosts}))
        self.ranks, self.replica, self.is_divided = found, own, True
        self.place = found[own].index(self.rank)
        live = [number for number, each in enumerate(found) if together.issuperset(each)]
        self.members = [(number, self.life) for number in live]
        self._hierarchy = Hierarchy(self, self.new_key(), self.timeout)
        # Nobody leaves the group before all have ended their collectives in it.
        dist.barrier()
        self._starting = None

    def new_key(self) -> str:
        """A name for the next group, equal on all ranks."""
        return f"group/{next(self._keys)}"

    def group_inside(self, key: str, timeout: timedelta) -> Any:
        """A gloo group of the ranks of this replica, which are lost together."""
        store = PrefixStore(f"{key}/inside/{self.replica}", self.own_store)
        return lazy_gloo(store, self.place, len(self.ranks[self.replica]), timeout)

    def new_link(self, key: str, timeout: timedelta, *, on_device: bool = False) -> Link:
        """A communicator of the ranks in this position of each live replica, for tensors on CPU or
        on the device. Collective over them."""
        make = BACKENDS[self._backend if on_device else "gloo"]
        identity = self.life * len(self.ranks) + self.replica
        store = PrefixStore(f"replicas/communicator/{key}", self.store)
        link = Link(key, make(self._device, store, identity), timeout)
        link.communicator.use(self._connected(link, PrefixStore(key, self.own_store)))
        self._links.append(link)
        return link

    def _connected(self, link: Link, store: Any) -> Any:
        live = self.live_replicas
        number = live.index(self.replica)
        epoch = self.epoch

        def stop() -> bool:
            return self.on and self._is_over(epoch)

        return link.communicator.connect(store, number, len(live), link.timeout, stop)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long the ranks of this replica wait for each other in collectives of the
        world."""
        self.timeout = timeout
        if self._hierarchy is not None:
            self._hierarchy.set_timeout(timeout)

    # Start, and events of the store

    def start(self) -> None:
        """Everything is built. From now on replicas may be lost; one that rejoins becomes a member
        in its first `regroup`."""
        if not self.life:
            record = {"members": self.members, "joiners": []}
            self.store.compare_set(RECORD.format(0), "", json.dumps(record))
            self.epoch = 0
            if self.rank == self.first_rank:
                for number in set(range(len(self.ranks))) - set(self.live_replicas):
                    post(self.store, "dead", (number, 0))
            dist.barrier()
        self.on = True
        threading.Thread(target=self._follow, name="replicas", daemon=True).start()
        if not self.life and self.store.add("replicas/started", 1) == len(self.live_ranks):
            self.store.set(LATEST, "0")
            self.store.set(ON, "all" if self.needs_all else "any")

    def _follow(self) -> None:
        events = self._events
        try:
            while True:
                if events.read(3600.0):
                    self._check_members()
        except Exception:  # the store is lost, which the next quorum would need
            if not self._ends:
                self.give_up()

    def _check_members(self) -> None:
        with self._lock:
            is_broken = self._events.broken >= self.epoch >= 0
            if is_broken or self._is_left_out or self._events.dead.intersection(self.members):
                self.give_up()

    @property
    def _is_left_out(self) -> bool:
        """True if the others continue without this replica, or if all ranks restart."""
        return self.own in self._events.dead or self._events.restarts

    def give_up(self) -> None:
        """Abandon all collectives of this quorum."""
        self._lost.set()

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Run a step of which nothing is sent to other replicas or received from them."""
        self.give_up()
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False
            self._lost.clear()
            self._check_members()

    # Collectives that may be abandoned

    def begin(self, link: Link, epoch: int, name: str, *arguments: Any) -> Collective | None:
        """Start the collective ``name`` of quorum ``epoch``; None if that has lost a replica."""
        if not self.on:
            return link.communicator.start(name, *arguments)
        if not self._is_over(epoch):
            try:
                return link.communicator.start(name, *arguments)
            except RuntimeError:
                self._fail(epoch)
        return None

    def finish(self, collective: Collective | None, epoch: int) -> bool:
        """Poll ``collective`` until it is done; False if a replica of quorum ``epoch`` is lost
        before."""
        if collective is None:
            return False
        if not self.on:
            collective.wait()
            return True
        if not self._poll(collective.is_done, epoch):
            self._abandoned.append(collective)
            return False
        # In this order: an aborted collective is done too.
        if collective.has_failed():
            self._fail(epoch)
            return False
        return True

    def _poll(self, is_done: Callable[[], bool], epoch: int) -> bool:
        """Return when ``is_done()``; False if a replica of quorum ``epoch`` is lost before."""
        pause = _FIRST_POLL_S
        while not is_done():
            if self._is_over(epoch):
                return is_done()
            # Not a wait for the event: that of Python polls in longer intervals.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        return True

    def _is_over(self, epoch: int) -> bool:
        """True if quorum ``epoch`` has lost a replica. For a thread beside the training loop it may
        be an earlier quorum."""
        return self._lost.is_set() or self.epoch != epoch

    def _fail(self, epoch: int) -> None:
        """A collective has failed: all ranks hear that quorum ``epoch`` has ended."""
        if not self._is_over(epoch):
            self.give_up()
            post(self.store, "break", epoch, self._events.count)

    # Agreements

    def agree(self, tensor: Tensor, operation: Any) -> bool:
        """Reduce ``tensor`` over all live ranks, in place. True if the result has come back to all
        ranks of this replica.

        Agreements are numbered. When some replicas have the result of the last one and others lost
        a replica before, the next quorum has the result in its record: `regroup` returns it to
        those that lack it. So either all live replicas have it in the end, or none.
        """
        if self._hierarchy is None:
            options: Any = dist.AllreduceOptions()
            options.reduceOp = operation
            self._starting.allreduce([tensor], options).wait()
            return True
        self._started += 1
        self.synchronized = self.epoch
        if not self._hierarchy.reduce(tensor, operation, self.epoch):
            return False
        self._agreed, self._result = self._started, tensor
        return True

    def agree_until_done(self, contribution: Callable[[], Tensor], operation: Any) -> Tensor:
        """The reduced ``contribution()`` of all live ranks, the same on all of them. Repeated by
        the survivors after a loss. Outside of steps."""
        while True:
            tensor = contribution()
            if self.agree(tensor, operation):
                return tensor
            if self.needs_all:
                raise ReplicaLost("a replica was lost")
            result = self.regroup(admit=False)
            if result is not None:
                return result

    def vote(self, is_well: bool) -> bool:
        """True if ``is_well`` on all ranks of this replica. Collective over them."""
        assert self._hierarchy is not None, "after divide"
        return self._hierarchy.vote(is_well)

    # The next quorum

    def regroup(self, *, admit: bool, least: int = 1) -> Tensor | None:
        """Form the next quorum of the survivors; with ``admit``, and if all of them do so, also of
        the replicas that wait to join, once there are ``least`` replicas or a rank was asked to
        stop. Return the result, as bytes, of the last agreement started here if it has come back
        only to others. Collective over the ranks of this replica."""
        started, agreed, had_state = self._started, self._agreed, self.has_state
        while True:
            record = self._next_record(self.epoch, admit, least)
            with self._lock:
                self.members = [tuple(each) for each in record["members"]]
                self.joined = [tuple(each) for each in record["joiners"]]
                self.epoch = record["number"]
                self._lost.clear()
            self._check_members()
            self._started = self._agreed = record["agreed"]
            self._result = from_text(record["result"])
            if self.vote(self._connect_links()):
                break
            self._fail(self.epoch)
        self.donor = self.members[0][0]
        is_result_of_last = had_state and agreed < started == self._agreed
        return self._result.clone() if is_result_of_last else None

    def _next_record(self, old: int, admit: bool, least: int) -> dict[str, Any]:
        """Wait for the record of the next quorum with this replica."""
        self._abort()
        # Nobody hears that this replica is ready for the next quorum before all of its ranks are:
        # others may still read memory of a peer that a reconfiguration frees.
        if self.epoch >= 0:
            self.vote(True)
        self._abandoned = [each for each in self._abandoned if not each.is_done()]
        number = old + 1
        self._tell(old, admit)
        while True:
            self._lead(old, least)
            try:
                self.store.wait([RECORD.format(number)], timedelta(seconds=0.02))
            except DistStoreError:
                if self._events.ended:
                    self._end_rank(0)  # the others have finished meanwhile
                if self._is_left_out:
                    self._end_rank(LEFT_OUT)
                if least > 1 and self._events.stopped < old and self.stop_requested():
                    post(self.store, "stop", old, self._events.count)
                continue
            record = json.loads(self.store.get(RECORD.format(number)))
            if list(self.own) in record["members"]:
                return {**record, "number": number}
            if self.has_state:
                self._end_rank(LEFT_OUT)
            number += 1

    def _tell(self, old: int, admit: bool) -> None:
        """Publish how far this replica is at the end of quorum ``old``, if it was a member."""
        if self.place or old < 0:
            return
        if self._events.broken < old:
            post(self.store, "break", old, self._events.count)
        at = {
            "has_state": self.has_state,
            "agreed": self._agreed,
            "result": as_text(self._result),
            "admit": admit,
        }
        self.store.set(_AT.format(old, *self.own), json.dumps(at))

    def _lead(self, old: int, least: int) -> None:
        """Write the next record once all survivors have published how far they are, if this
        replica is the eldest survivor that has the state."""
        if self.place or old < 0:
            return
        left = [each for each in self.members if each not in self._events.dead]
        keys = [_AT.format(old, *each) for each in left]
        if not self.store.check(keys):
            return
        told: Mapping[Member, Any] = dict(
            zip(left, map(json.loads, map(self.store.get, keys)), strict=True)
        )
        record = next_record(told, self._events.joining - self._events.dead, self.needs_all)
        if record is None:
            self._end_rank(LEFT_OUT)  # no replica has the state: all restart from a checkpoint
        is_enough = len(record["members"]) >= least or self._events.stopped >= old
        if record["members"][0] != self.own or not is_enough:
            return
        self.store.compare_set(RECORD.format(old + 1), "", json.dumps(record))
        self.store.set(LATEST, str(old + 1))

    def _connect_links(self) -> bool:
        """Connect the communicators of this quorum; False if a replica is lost meanwhile."""

        def connect() -> list[Any]:
            made = []
            for link in self._links:
                key = f"replicas/quorum/{self.epoch}/{link.key}"
                made.append(self._connected(link, PrefixStore(key, self.store)))
            return made

        made = self._in_thread(connect, self.epoch)
        if made is None:
            return False
        for link, connected in zip(self._links, made, strict=True):
            link.communicator.use(connected)
        return True

    def _in_thread(self, connect: Callable[[], Any], epoch: int) -> Any:
        """The result of ``connect()``, which blocks until other replicas do the same; None if one
        of quorum ``epoch`` is lost meanwhile."""
        found: list[Any] = []
        done = threading.Event()

        def run() -> None:
            with contextlib.suppress(Exception):  # the result is missing then
                found.append(connect())
            done.set()

        threading.Thread(target=run, name="replicas connect", daemon=True).start()
        if not self._poll(done.is_set, epoch) or not found:
            return None
        return found[0]

    # Messages between two ranks

    def link(self, joiner: Member) -> Callable[[Tensor], bool]:
        """A function that sends a tensor from the donor's rank in this position to the joiner's,
        and returns False if one of them is lost before it has arrived."""
        source, target = self.ranks[self.donor][self.place], self.ranks[joiner[0]][self.place]
        key = f"state/{joiner[0]}/{self.place}"
        return self._connected_pair(key, source, target, self.epoch)

    def send(self, key: str, source: int, target: int, data: Tensor, epoch: int) -> bool:
        """Send ``data`` from rank ``source`` to rank ``target``. Both call it. False if a replica
        of quorum ``epoch`` is lost before it has arrived."""
        return self._connected_pair(key, source, target, epoch)(data)

    def _connected_pair(
        self, key: str, source: int, target: int, epoch: int
    ) -> Callable[[Tensor], bool]:
        store = PrefixStore(f"replicas/quorum/{epoch}/{key}", self.store)
        number = int(self.rank == target)
        timeout, pair = self.timeout, Gloo()

        def connect() -> Any:
            return connected_gloo(store, number, 2, timeout)

        made = self._in_thread(connect, epoch) if self.on else connect()
        if made is None:
            return lambda _: False
        pair.use(made)
        link = Link(key, pair, timeout)

        def send(tensor: Tensor) -> bool:
            options = dist.BroadcastOptions()
            collective = self.begin(link, epoch, "broadcast", [tensor], options)
            return self.finish(collective, epoch)

        return send

    # The end

    def leave(self, exit_code: int = LEFT_OUT) -> NoReturn:
        """End this rank with ``exit_code``. The others continue without its replica. Collective
        over the ranks of this replica."""
        self.vote(True)  # until all of them are here
        if self.place == 0 and self.own not in self._events.dead:
            post(self.store, "dead", self.own, self._events.count)
        self._end_rank(exit_code)

    def _end_rank(self, exit_code: int) -> NoReturn:
        """End this rank as a Python process ends. No thread of this rank waits for another replica
        then, because all collectives across replicas have ended. The launcher kills a rank that
        does not end, such as one whose peer in the replica hangs."""
        self.give_up()
        self._abort()
        self.has_left = True
        raise SystemExit(exit_code)

    def _abort(self) -> None:
        """End all collectives in flight across replicas."""
        for link in self._links:
            link.communicator.abort()
        for link in self._links:
            link.communicator.drain()

    def end(self) -> None:
        """The job has ended well: replicas that wait to join end too. Collective."""
        self._ends = True  # from now on the store may end, with a node that is done before
        dist.barrier()
        self.on = False
        if self.rank == self.first_rank:
            with contextlib.suppress(DistNetworkError, DistStoreError):
                post(self.store, "end", None, self._events.count)


class Hierarchy:
    """All-reduces over all live ranks: inside each replica, across their first ranks, and back to
    the others. The outcome is the same on all ranks of a replica."""

    def __init__(self, quorum: Quorum, key: str, timeout: timedelta) -> None:
        self._quorum, self.key = quorum, key
        self._inside = quorum.group_inside(key, timeout)
        self._link = quorum.new_link(f"{key}/first", timeout) if quorum.place == 0 else None

    def set_timeout(self, timeout: timedelta) -> None:
        self._inside.set_timeout(timeout)
        if self._link is not None:
            self._link.set_timeout(timeout)

    def reduce(self, tensor: Tensor, operation: Any, epoch: int) -> bool:
        """Reduce ``tensor`` in place. False, without a result, if a replica was lost."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        self._inside.allreduce([tensor], options).wait()
        has_arrived = torch.ones(1)
        if self._link is not None:
            collective = self._quorum.begin(self._link, epoch, "allreduce", [tensor], options)
            has_arrived.fill_(float(self._quorum.finish(collective, epoch)))
        back = dist.BroadcastOptions()
        for each in (has_arrived, tensor):
            self._inside.broadcast([each], back).wait()
        return bool(has_arrived.item())

    def vote(self, is_well: bool) -> bool:
        """True if ``is_well`` on all ranks of this replica. Collective over them."""
        vote = torch.tensor([float(is_well)])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._inside.allreduce([vote], options).wait()
        return bool(vote.item())

"""The live replicas of a job, and the all-reduces between them: `Quorum`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from parallel2d.base.errors import ConfigError
from parallel2d.base.exit_codes import LEFT_OUT
from parallel2d.base.replicas.communicators import BACKENDS, Communicator, Tree, lazy_gloo
from parallel2d.base.replicas.events import LATEST, ON, RANKS, RECORD, Events, Member, post
from parallel2d.base.replicas.links import Hierarchy, Link, Links
from parallel2d.base.replicas.records import Records, as_text, from_text
from parallel2d.base.replicas.states import Phase, ReplicaLost, ReplicaState

_RECORD_POLL_S = 0.02


class Quorum:
    """The live replicas, as far as this rank has read the events. All ranks of a replica must make
    the same calls.

    Args:
        together: number of ranks that start together.
        timeout: time limit of a collective.
        device: device of the tensors that cross replicas.
        backend: name of their backend in `BACKENDS`.

    Attributes:
        incarnation: restart count of this replica.
        needs_all: True if every replica needs all replicas to train.
        ranks: the ranks of each replica; a single replica until `divide`.
        replica: number of the replica of this rank.
        place: position of this rank in its replica.
        members: the live replicas, beginning with the replica that has been a member for the
            longest time.
        joined: members of this quorum without the complete state.
        donor: the replica that sends the state to the replicas in ``joined``.
        synchronized: number of the quorum of the last collective of the default group.
        committed_step: the last step that a custom loop has committed, for error messages.
        begun: number of collectives across replicas that this process has started.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        together: int,
        incarnation: int,
        timeout: timedelta,
        device: torch.device,
        backend: str,
    ) -> None:
        self.store, self.rank, self.incarnation, self.timeout = store, rank, incarnation, timeout
        self._device, self._backend = device, backend
        self.phase = Phase.STARTING
        self.state = ReplicaState.MISSING if incarnation else ReplicaState.COMPLETE
        self.needs_all = False
        self.committed_step: int | None = None
        self.ranks: list[list[int]] = [list(range(together))]
        self.hosts: list[str] = []
        if incarnation:
            found = json.loads(store.get(RANKS))
            self.hosts = found["hosts"]
            self.ranks = [next(each for each in found["ranks"] if rank in each)]
        self.replica, self.place = 0, self.ranks[0].index(rank)
        self.members: list[Member] = [(0, incarnation)]
        self.joined: list[Member] = []
        self.synchronized = -1
        self.donor = self.begun = 0
        self.own_store = PrefixStore(f"replicas/life/{self.ranks[0][0]}.{incarnation}", store)
        # The number of all-reduces that `agree` has started since the start of the job, the number
        # of the last all-reduce with a result on this rank, and this result
        self._started = self._agreed = 0
        self._result = torch.zeros(0, dtype=torch.uint8)
        self._has_committed = False
        # The group of the ranks that start together, used until `divide`
        self._starting: Any = lazy_gloo(
            PrefixStore("start", self.own_store), self.place, len(self.ranks[0]), timeout
        )
        self._hierarchy: Hierarchy | None = None
        self._keys = itertools.count()
        self._lock = threading.Lock()  # protects the current quorum and its end
        self._events = Events(store)
        self._records = Records(store, self._events)
        self.links = Links(store, self._events)
        self._stop_requested: Callable[[], bool] = lambda: False

    # Live replicas and ranks

    @property
    def epoch(self) -> int:
        """Number of this quorum."""
        return self.links.epoch

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
    def complete_replicas(self) -> list[int]:
        """The numbers of the live replicas with the state, ascending."""
        joined = {number for number, _ in self.joined}
        return [number for number in self.live_replicas if number not in joined]

    @property
    def first_rank(self) -> int:
        """The leader, which logs and writes for all ranks."""
        return self.ranks[self.members[0][0]][0]

    @property
    def own(self) -> Member:
        return self.replica, self.incarnation

    @property
    def is_divided(self) -> bool:
        """True after `divide`."""
        return self.phase is not Phase.STARTING

    @property
    def on(self) -> bool:
        """True once replicas may fail."""
        return self.links.may_fail

    @property
    def lost(self) -> bool:
        """True once this quorum has ended."""
        return self.links.lost

    @property
    def has_state(self) -> bool:
        return self.state is ReplicaState.COMPLETE

    @property
    def joins(self) -> bool:
        """True if a replica waits to become a member."""
        return bool(self._events.joining - self._events.dead - set(self.members))

    # Groups

    def divide(self, ranks: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        """Divide the ranks into replicas. Replicas whose ranks have not started together with this
        rank count as failed. Later calls must pass the same replicas. Collective."""
        if self.is_divided:
            if self.ranks != ranks:
                raise ConfigError(
                    "this mesh divides the ranks into other replicas than the first mesh of this "
                    "job; use equal mesh sizes"
                )
            return
        found = []
        for each in ranks:
            found.append(list(map(int, each)))
        together = set(self.live_ranks)
        self.hosts = list(hosts)
        if self.rank == 0 and not self.incarnation:
            self.store.set(RANKS, json.dumps({"ranks": found, "hosts": self.hosts}))
        self.ranks, self.phase = found, Phase.BUILDING
        self.replica = next(number for number, each in enumerate(found) if self.rank in each)
        self.place = found[self.replica].index(self.rank)
        live = []
        for number, each in enumerate(found):
            if together.issuperset(each):
                live.append(number)
        self.members = [(number, self.incarnation) for number in live]
        self._hierarchy = self.new_hierarchy(self.new_key(), self.timeout)
        # All ranks have finished their collectives in this group before a rank destroys it.
        dist.barrier()
        self._starting = None

    def new_key(self) -> str:
        """Return a new name for a group, equal on all ranks."""
        return f"group/{next(self._keys)}"

    def new_hierarchy(self, key: str, timeout: timedelta) -> Hierarchy:
        """Create the groups of a `Hierarchy`. Collective."""
        store = PrefixStore(f"{key}/inside/{self.replica}", self.own_store)
        inside = lazy_gloo(store, self.place, len(self.ranks[self.replica]), timeout)
        across = self._new_link(f"{key}/first", Tree(), timeout) if self.place == 0 else None
        return Hierarchy(self.links, inside, across)

    def new_link(self, key: str, timeout: timedelta) -> Link:
        """Connect the ranks at this position of each live replica, for tensors on the device.
        Collective over these ranks."""
        identity = self.incarnation * len(self.ranks) + self.replica
        store = PrefixStore(f"replicas/communicator/{key}", self.store)
        communicator = BACKENDS[self._backend](self._device, store, identity)
        return self._new_link(key, communicator, timeout)

    def _new_link(self, key: str, communicator: Communicator, timeout: timedelta) -> Link:
        link = Link(key, communicator, timeout)
        link.communicator.use(self._connect(link, self.own_store))
        self.links.add(link)
        return link

    def _connect(self, link: Link, store: Any) -> Any:
        live, epoch = self.live_replicas, self.epoch

        def stop() -> bool:
            return self.on and self.links.is_over(epoch)

        number = live.index(self.replica)
        own = PrefixStore(link.key, store)
        return link.communicator.connect(own, number, len(live), link.timeout, stop)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of the collectives of the default group."""
        self.timeout = timeout
        if self._hierarchy is not None:
            self._hierarchy.set_timeout(timeout)

    # Start, and the events in the store

    def start(self, stop_requested: Callable[[], bool] = lambda: False) -> None:
        """Allow replicas to fail from now on. A restarted replica becomes a member in its first
        `regroup`. Collective over the ranks that start together. ``stop_requested``: returns True
        if this rank was asked to save and stop."""
        self._stop_requested = stop_requested
        if not self.incarnation:
            self._records.write_first(self.members)
            self.links.enter(0)
            if self.rank == self.first_rank:
                for number in set(range(len(self.ranks))) - set(self.live_replicas):
                    post(self.store, "dead", (number, 0))
            dist.barrier()
        self.links.may_fail, self.phase = True, Phase.BETWEEN_STEPS
        threading.Thread(target=self._follow, name="replicas", daemon=True).start()
        if self.incarnation:
            return
        if self.store.add("replicas/started", 1) == len(self.live_ranks):
            self.store.set(LATEST, "0")
            self.store.set(ON, "all" if self.needs_all else "any")

    def _follow(self) -> None:
        """Read events until this process ends. Runs in a thread."""
        try:
            while True:
                if self._events.read(3600.0):
                    self._check_members()
        except Exception:  # without the store no further quorum can form
            if self.phase is not Phase.ENDING:
                self.give_up()

    def _check_members(self) -> None:
        with self._lock:
            is_broken = self._events.broken >= self.epoch >= 0
            is_lost = self._events.dead.intersection(self.members)
            if is_broken or is_lost or self._is_left_out:
                self.give_up()

    @property
    def _is_left_out(self) -> bool:
        """True if the other replicas continue without this replica, or if all ranks restart."""
        return self.own in self._events.dead or self._events.restarts

    def give_up(self) -> None:
        """Mark this quorum as ended on this rank: its collectives end without a result."""
        self.links.give_up()

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Context for a step without traffic between replicas: its collectives across replicas have
        no result."""
        self.give_up()
        self.phase = Phase.IN_STEP
        try:
            yield
        finally:
            self.phase = Phase.BETWEEN_STEPS
            self.links.enter(self.epoch)
            self._check_members()

    # Steps

    def start_step(self) -> None:
        """Start a step. Until `should_commit`, collectives may have no result."""
        self.phase, self._has_committed = Phase.IN_STEP, False

    def is_complete(self, status: Tensor) -> bool:
        """True if the last all-reduce of the step has a result on all ranks of this replica, and no
        rank had noticed a failure before this all-reduce. ``status``: the result. Its first value
        is the number of ranks that had noticed a failure."""
        return self._has_committed and not status[0].item()

    def should_commit(self, status: Tensor) -> bool:
        """True if all live replicas commit the step. Otherwise all live replicas must repeat the
        step in the next quorum, which this call has formed. If only other replicas have the result
        of the last all-reduce, this call copies the result to ``status``; see `is_complete`.
        Collective over this replica."""
        if not self.is_complete(status):
            result = self.regroup(admit=False)
            if result is None:
                return False
            status.copy_(result.view(status.dtype))
            if status[0].item():  # a rank had noticed a failure before the all-reduce
                return False
        self.phase = Phase.BETWEEN_STEPS
        return True

    def lose_state(self) -> None:
        """Leave the step and discard the state of this replica, which must receive the state
        again."""
        self.give_up()
        self.phase, self.state = Phase.BETWEEN_STEPS, ReplicaState.MISSING

    def complete_join(self, members: Collection[Member]) -> None:
        """Mark ``members`` as replicas with the complete state. ``members`` may contain this
        replica."""
        self.joined = [each for each in self.joined if each not in members]
        if self.own in members:
            self.state = ReplicaState.COMPLETE

    # All-reduces over the live ranks

    def agree(self, tensor: Tensor, operation: Any) -> bool:
        """All-reduce ``tensor`` over all live ranks, in place. True if all ranks of this replica
        have the result.

        These all-reduces are numbered. If only some replicas have the last result, the record of
        the next quorum contains this result, and `regroup` returns it on the other replicas.
        Therefore, after `regroup`, either all live replicas have the result or none has it.
        """
        if self._hierarchy is None:
            options: Any = dist.AllreduceOptions()
            options.reduceOp = operation
            self._starting.allreduce([tensor], options).wait()
            return True
        self._started += 1
        self.synchronized = self.epoch
        has_result = self._hierarchy.reduce(tensor, operation, self.epoch)
        if has_result:
            self._agreed, self._result = self._started, tensor
        self._has_committed = has_result
        return has_result

    def agree_until_done(self, contribution: Callable[[], Tensor], operation: Any) -> Tensor:
        """Return the reduced ``contribution()`` of all live ranks. After a failure the survivors
        repeat the all-reduce. Called outside of steps."""
        while True:
            tensor = contribution()
            if self.agree(tensor, operation):
                return tensor
            if self.needs_all:
                raise ReplicaLost("a replica failed")
            result = self.regroup(admit=False)
            if result is not None:
                return result

    def vote(self, is_well: bool) -> bool:
        """True if ``is_well`` on all ranks of this replica. Collective over these ranks."""
        return bool(self.least(is_well))

    def least(self, value: float) -> float:
        """Return the least ``value`` of the ranks of this replica. Collective over these ranks."""
        assert self._hierarchy is not None, "after divide"
        return self._hierarchy.least(value)

    # The next quorum

    def regroup(self, *, admit: bool, least: int = 1) -> Tensor | None:
        """Form the next quorum. If only other replicas have the last result of `agree`, return this
        result as bytes, otherwise None. Collective over the ranks of this replica.

        Args:
            admit: True to accept waiting replicas. They join if all survivors pass True.
            least: number of replicas to wait for, unless a rank is asked to stop.
        """
        started, agreed = self._started, self._agreed
        was_member = self.state is not ReplicaState.MISSING
        while True:
            record = self._next_record(self.epoch, admit, least)
            with self._lock:
                self.members = list(map(tuple, record["members"]))
                self.joined = list(map(tuple, record["joiners"]))
                self.links.enter(record["number"])
            self._check_members()
            self._started = self._agreed = record["agreed"]
            self._result = from_text(record["result"])
            store = PrefixStore(f"replicas/quorum/{self.epoch}", self.store)
            if self.vote(self.links.connect(functools.partial(self._connect, store=store))):
                break
            self.links.fail(self.epoch)
        self.donor = self.members[0][0]
        if self.own in self.joined:
            self.state = ReplicaState.RECEIVING
        has_missed_result = was_member and agreed < started == self._agreed
        return self._result.clone() if has_missed_result else None

    def regroup_all(self, least: int) -> None:
        """Form a quorum of at least ``least`` replicas. All its replicas must then load a
        checkpoint."""
        self.regroup(admit=True, least=least)
        self.synchronized = self.epoch

    def _next_record(self, old: int, admit: bool, least: int) -> dict[str, Any]:
        """Wait for the record of the next quorum that contains this replica. Return the record."""
        self.links.abort()
        # When a rank reconfigures its communicators, it frees memory that its peers in other
        # replicas may still read. Therefore all ranks of this replica abort their collectives
        # before the replica publishes its status. No replica reconfigures before all survivors have
        # published their status.
        if self.epoch >= 0:
            self.vote(True)
        records, number = self._records, old + 1
        is_writer = self.place == 0 and old >= 0
        if is_writer:
            status: dict[str, Any] = {"has_state": self.has_state, "admit": admit}
            status["receives"] = self.state is ReplicaState.RECEIVING
            status |= {"agreed": self._agreed, "result": as_text(self._result)}
            records.publish_status(old, self.own, status)
        while True:
            if is_writer and not records.write(old, self.own, self.members, least, self.needs_all):
                self._end_rank(LEFT_OUT)  # all ranks restart, because no replica has the state
            try:
                self.store.wait([RECORD.format(number)], timedelta(seconds=_RECORD_POLL_S))
            except DistStoreError:
                if self._events.ended:
                    self._end_rank(0)
                if self._is_left_out:
                    self._end_rank(LEFT_OUT)
                if least > 1 and self._events.stopped < old and self._stop_requested():
                    post(self.store, "stop", old, self._events.count)
                continue
            record = json.loads(self.store.get(RECORD.format(number)))
            if list(self.own) in record["members"]:
                return {**record, "number": number}
            if self.state is not ReplicaState.MISSING:
                self._end_rank(LEFT_OUT)  # the other replicas continue without this replica
            number += 1

    # Messages between two ranks

    def link(self, joiner: Member) -> Callable[..., bool]:
        """Return a function that sends a tensor between two ranks at this position: the rank of the
        donor (root 0) and the rank of ``joiner`` (root 1). The function returns False if the quorum
        ends before the tensor has arrived."""
        source, target = self.ranks[self.donor][self.place], self.ranks[joiner[0]][self.place]
        return self.pair(f"state/{joiner[0]}/{self.place}", source, target, self.epoch)

    def pair(self, key: str, source: int, target: int, epoch: int) -> Callable[..., bool]:
        """Connect rank ``source`` and rank ``target``; see `Links.pair`. Both ranks must call this
        method."""
        store = PrefixStore(f"replicas/quorum/{epoch}/{key}", self.store)
        return self.links.pair(store, int(self.rank == target), self.timeout, epoch)

    # The end

    def leave(self, exit_code: int = LEFT_OUT) -> NoReturn:
        """End this rank with ``exit_code``. The other replicas continue without this replica.
        Collective over the ranks of this replica."""
        self.vote(True)  # afterwards no rank waits for another rank of this replica
        if self.place == 0 and self.own not in self._events.dead:
            post(self.store, "dead", self.own, self._events.count)
        self._end_rank(exit_code)

    def _end_rank(self, exit_code: int) -> NoReturn:
        """Abort all collectives across replicas, and end this rank by `SystemExit`. If the rank
        does not end, for example because another rank of its replica hangs, the launcher kills
        it."""
        self.phase = Phase.ENDING
        self.give_up()
        self.links.abort()
        raise SystemExit(exit_code)

    def end(self) -> None:
        """End the job. Replicas that wait to join end too. Collective."""
        self.phase = Phase.ENDING  # from now on, a store that has ended is not an error
        dist.barrier()
        self.links.may_fail = False
        if self.rank == self.first_rank:
            with contextlib.suppress(DistNetworkError, DistStoreError):
                post(self.store, "end", None, self._events.count)

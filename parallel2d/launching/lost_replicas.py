"""Replaces replicas that are lost while the others train: `LostReplicas`. `Latecomer`: a launcher
that comes meanwhile.

See [Note: replicas that never stop] in `parallel2d.base.replicas`. Launchers say in the store who
is lost, which all ranks hear, and each starts the ranks of such a replica that are its own again.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas.events import LATEST, ON, RANKS, RECORD, Events, Member, post
from parallel2d.base.replicas.quorum import LEFT_OUT
from parallel2d.base.topology import INCARNATION
from parallel2d.launching.failures import RankFailure
from parallel2d.launching.node_ranks import GRACE_AFTER_FAILURE_S, NodeRanks
from parallel2d.launching.round import Launcher, Round, State
from parallel2d.launching.shared_job import PUBLISHED
from parallel2d.training.run_directory.start import has_owner

_LONGEST_PAUSE_S = 60.0  # before a replica starts again


class Latecomer:
    """What a launcher does that comes while a round goes on without it."""

    def __init__(self, current: Round, store: Any, say: Callable[[str], None]) -> None:
        self._round, self._store, self._say = current, store, say
        self._has_said = False

    def wanted(self) -> State:
        """The state with this launcher in the place of one that is lost, or was never there, in a
        job that goes on without it; the next round where all are to start again with it; else the
        state as it is, to wait. Raises `ConfigError` for a node that does not fit."""
        state = self._round.state
        if not all(self._round.is_heard(each.name) for each in state.members):
            return state  # until it has spoken, or is lost
        lost = [each for each in state.members if self._round.is_silent(each.name)]
        if len(lost) == len(state.members):
            return self._round.next(after_failure=True)
        store = PrefixStore(state.prefix, self._store)
        job, has_begun = _published(store), store.check([ON, LATEST])
        place = self._free_place(job, lost, store) if has_begun else None
        if place is not None:
            return self._round.with_place(place)
        has_room = bool(lost) or len(state.members) < self._round.largest
        if has_room and _starts_again(job, has_begun, bool(lost)):
            return self._round.next(after_failure=bool(lost))
        if not self._has_said:
            self._say("waiting until the job has started, or has a place for this node")
            self._has_said = True
        return state

    def _free_place(self, job: dict[str, Any], lost: Sequence[Launcher], store: Any) -> int | None:
        if _all_events(store).restarts:
            return None  # the others open a round for that
        own, members, nodes = self._round.own, self._round.state.members, self._round.largest
        may_lack_nodes = bool(job.get("sizes"))
        if may_lack_nodes:
            _check_fit(job, own.size, nodes)
        for each in lost:
            if each.size == own.size:
                return members.index(each)
        return len(members) if may_lack_nodes and len(members) < nodes else None


def _all_events(store: Any) -> Events:
    """What has happened so far."""
    events = Events(store)
    while events.read(0.0):
        pass
    return events


def _published(store: Any) -> dict[str, Any]:
    found = json.loads(store.get(PUBLISHED)) if store.check([PUBLISHED]) else None
    return found or {}


def _starts_again(job: dict[str, Any], has_begun: bool, has_lost: bool) -> bool:
    """Whether all ranks of ``job``, which has no place for another node as it is, have to start
    again for that one: it may lack nodes only once it has begun."""
    if job.get("sizes"):
        return has_lost and not has_begun
    return has_lost or has_begun or bool(job)


def _check_fit(job: dict[str, Any], size: int, nodes: int) -> None:
    ranks = math.prod(job["sizes"].values())
    if ranks != size * nodes:
        raise ConfigError(
            f"the running job has {ranks} ranks on {nodes} nodes, and this node would start "
            f"{size}; give it launch.nproc_per_node={ranks // nodes}"
        )
    if not has_owner(job["run_dir"]):
        raise ConfigError(
            f"run directory {job['run_dir']} is not the one that the other nodes see: it must be "
            "shared"
        )


@dataclass(eq=False)
class LostReplicas:
    """Starts the lost replicas of this launcher again. ``ends_job``: the program or a sample is at
    fault; ``is_late``: the others have started before; ``needs_all``: they wait for a lost one."""

    _round: Round
    _store: Any  # of the ranks
    _ranks: NodeRanks
    _may_go_on: Callable[[RankFailure], bool]  # false: the failure ends or restarts all ranks
    _told_to_stop: int  # exit code of preempted ranks

    def __post_init__(self) -> None:
        self._events = Events(self._store)
        self._replicas: list[list[int]] = []
        self._lives: dict[int, int] = {}
        self.ends_job = self.needs_all = False
        self._silent: set[str] = set()
        # By local rank, the seconds that it was seen stopped, which only count while this launcher
        # polls: it may have been stopped together with its ranks.
        self._stopped: dict[int, float] = {}
        self._polled_at = time.monotonic()
        self._since_poll_s = 0.0
        self._starts: dict[int, list[float]] = {}  # of each replica, in the last minute
        # By replica, until when its ranks may end by themselves after it was left out
        self._ends_by: dict[int, float] = {}
        self._restarts_by: float | None = None  # until when all ranks may end by themselves
        self.is_late = self._has_begun()

    def enter(self) -> dict[int, int]:
        """Lets the replicas of this launcher, which comes late, begin a new life. Returns the lives
        of all ranks."""
        self._read()
        own, lives = set(self._round.ranks_of(self._round.own)), {}
        for number, ranks in enumerate(self._replicas):
            dead = [life for replica, life in self._events.dead if replica == number]
            self._lives[number] = max(dead, default=-1) + 1
            # Whoever counts in its life is lost, though nobody may have noticed yet.
            if own & set(ranks):
                self._say_dead((number, self._lives[number]))
                self._lives[number] += 1
            lives.update(dict.fromkeys(ranks, self._lives[number]))
        return lives

    def replace(self) -> bool:
        """Replaces what is lost. Returns whether the job goes on: not before replicas may be lost,
        when nobody has the state any more, or when a failure is one of the whole job."""
        if not self._has_begun():
            return False
        self._read()
        now = time.monotonic()
        self._since_poll_s = min(now - self._polled_at, self._round.heartbeat_interval_s)
        self._polled_at = now
        self._give_up_silent_nodes()
        if not all(map(self._is_no_end, self._ranks.processes)):
            return False
        self._read()
        if self._events.restarts or not self._store.check([LATEST]):
            return False  # all have started again without these ranks
        members = json.loads(self._store.get(RECORD.format(self._store.get(LATEST).decode())))
        if all(self._is_dead(tuple(each)) for each in members["members"]):
            return False
        for member in list(self._lives.items()):
            if self._is_dead(member):
                self._start_again(member[0])
        return True

    def _has_begun(self) -> bool:
        """Whether replicas may be lost: all are built, and not to start again together."""
        if not self._replicas and self._store.check([ON]):
            self._replicas = json.loads(self._store.get(RANKS))["ranks"]
            self._lives = dict.fromkeys(range(len(self._replicas)), 0)
            self.needs_all = self._store.get(ON) == b"all"
        return bool(self._replicas) and not self._events.restarts

    def _is_no_end(self, local: int) -> bool:
        """Looks at one process, and says that its replica is lost if so. False where its failure
        is one of the whole job."""
        code = self._ranks.processes[local].poll()
        if code is None:
            self._end_if_stopped(local)
        elif code == self._told_to_stop:
            return False
        elif code == LEFT_OUT:  # no failure of its own
            self._say_dead(self._member(local))
        elif code and not self._is_dead(self._member(local)):
            failure = self._ranks.failure(local)
            self.ends_job = self._is_of_the_job(failure)
            if self.ends_job or not self._may_go_on(failure):
                return False
            self._say_dead(self._member(local))
        return True

    def all_must_end(self) -> bool:
        """True if all ranks restart, and have had the time to end by themselves."""
        now = time.monotonic()
        if self._events.restarts and self._restarts_by is None:
            self._restarts_by = now + GRACE_AFTER_FAILURE_S
        return self._restarts_by is not None and now > self._restarts_by

    @property
    def has_lost(self) -> bool:
        """Whether any replica was lost since all have started."""
        return bool(self._events.dead)

    def has_left(self) -> bool:
        """Whether all replicas of this launcher have told the others to go on without them."""
        with contextlib.suppress(DistNetworkError, DistStoreError):  # it ended with another node
            self._read()
        own = [self._member(local) for local in self._ranks.numbers] if self._replicas else []
        return bool(own) and all(map(self._is_dead, own))

    def _read(self) -> None:
        while self._events.read(0.0):
            pass

    def _is_of_the_job(self, failure: RankFailure) -> bool:
        """Whether another replica has failed in the same step by an error of its own: the sample
        or the program is at fault, and no replica would come further."""
        error = failure.error
        if error is None or error.step is None or failure.lost_a_peer:
            return False
        if "ReplicaLost" in error.text:  # a hook, say, has awaited something of the lost one
            return False
        number = next(n for n, ranks in enumerate(self._replicas) if failure.rank in ranks)
        key = f"replicas/raised/{error.step}"
        self._store.append(key, f"{number} ")
        return len(set(self._store.get(key).split())) > 1

    def _give_up_silent_nodes(self) -> None:
        """Says once which replicas are lost with a node whose launcher is silent."""
        for each in self._round.state.members:
            if not self._round.is_silent(each.name):
                self._silent.discard(each.name)
            elif each.name not in self._silent:
                self._silent.add(each.name)
                ranks = set(self._round.ranks_of(each))
                for number, of_replica in enumerate(self._replicas):
                    if ranks & set(of_replica):
                        self._say_dead((number, self._lives[number]))
                # No replica goes on without them, and nobody here can start them again.
                if self.needs_all:
                    post(self._store, "restart", None, self._events.count)

    def _member(self, local: int) -> Member:
        rank = self._ranks.numbers[local]
        number = next(n for n, ranks in enumerate(self._replicas) if rank in ranks)
        return number, self._lives[number]

    def _is_dead(self, member: Member) -> bool:
        return member in self._events.dead

    def _say_dead(self, member: Member) -> None:
        if not self._is_dead(member):
            post(self._store, "dead", member, self._events.count)
            self._events.dead.add(member)
            # Its other ranks may wait for the failed one.
            self._ends_by[member[0]] = 0.0

    def _end_if_stopped(self, local: int) -> None:
        process, state = self._ranks.processes[local], ""
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "T":
            self._stopped.pop(local, None)
            return
        stopped_s = self._stopped.get(local, 0.0) + self._since_poll_s
        self._stopped[local] = stopped_s
        if stopped_s > self._round.heartbeat_timeout_s:
            self._stopped.pop(local)
            process.close(signal.SIGKILL)

    def _start_again(self, number: int) -> None:
        """Ends what is left of the replica here, and starts it again once its pause is over: none
        at first, longer and longer where it is lost again within a minute."""
        numbers = self._ranks.numbers
        mine = [local for local, rank in numbers.items() if rank in self._replicas[number]]
        now = time.monotonic()
        ends_by = self._ends_by.setdefault(number, now + GRACE_AFTER_FAILURE_S)
        if now < ends_by and any(self._ranks.processes[each].poll() is None for each in mine):
            return
        for local in mine:
            self._ranks.processes[local].close(signal.SIGKILL)
        started = [at for at in self._starts.get(number, ()) if at > now - _LONGEST_PAUSE_S]
        if mine and len(started) > 2 and now < started[-1] + 2.0 ** (len(started) - 2):
            return
        self._starts[number] = [*started, now]
        self._ends_by.pop(number)
        self._lives[number] += 1
        for local in mine:
            self._ranks.processes[local].wait(10.0)
            self._ranks.start_one(local, {INCARNATION: str(self._lives[number])})

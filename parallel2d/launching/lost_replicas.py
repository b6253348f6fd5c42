"""Replaces replicas that are lost while the others train: `LostReplicas`.

See [Note: replicas that never stop] in `parallel2d.base.replicas`. Launchers say in the store who
is lost, which all ranks hear, and each starts the ranks of such a replica that are its own again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore

from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas.events import LATEST, ON, RANKS, RECORD, Events, Member, post
from parallel2d.base.replicas.generations import LEFT_OUT
from parallel2d.base.topology import LIFE
from parallel2d.launching.agreement import PUBLISHED
from parallel2d.launching.failures import RankFailure, read_error_file
from parallel2d.training.run_directory import has_owner

# Of a launcher, by node: its ranks, the time, and how many have started together
_BEAT, _BEAT_S = "replicas/beat/{}", 0.5
_SILENT_S = 3.0  # after which a node counts as lost
_LONGEST_PAUSE_S = 60.0  # before a replica starts again
_STOPPED_S = 1.0  # after which a rank that is stopped counts as lost


@dataclass(frozen=True)
class Vacancy:
    """The place of a node that is not there, in a job that goes on without it. ``ranks``: those of
    it; ``lives``: of all ``replicas``, as they start next."""

    prefix: str  # of the ranks' keys in the store
    node: int
    nodes: int
    ranks: list[int]
    replicas: list[list[int]]
    lives: dict[int, int]

    def life_of(self, rank: int) -> int:
        """The life in which this rank starts."""
        return self.lives[next(n for n, ranks in enumerate(self.replicas) if rank in ranks)]


def find_vacancy(
    store: Any, latest: str, size: int, nodes: int, say: Callable[[str], None]
) -> Vacancy | None:
    """Takes the place of a node of ``size`` ranks that is lost or was never there, in a job of
    ``nodes`` that goes on without it; None where this node is to start with others. Waits until a
    node that seems silent counts as lost, and where nodes may come later until the job has started
    and a place is free. ``latest``: the key of the ranks' prefix. Raises `ConfigError` for a node
    that does not fit."""
    launchers, has_said = _Launchers(nodes), False
    while store.check([latest]):
        prefix = store.get(latest).decode()
        ranks_store = PrefixStore(prefix, store)
        launchers.listen(ranks_store)
        job = json.loads(_value(ranks_store, PUBLISHED) or "null") or {}
        may_lack_nodes = bool(job.get("ranks"))
        has_begun = ranks_store.check([ON, LATEST])
        if job and not (may_lack_nodes or has_begun):
            return None
        if has_begun:
            if may_lack_nodes and launchers.are_heard:
                _check_fit(job, size, nodes)
            place = launchers.free_place(ranks_store, size, may_lack_nodes)
            if place is not None:
                return _take_place(ranks_store, prefix, place, nodes, size, launchers.beats[place])
        if launchers.have_had_time:
            if not launchers.go_on(has_begun) or (has_begun and not may_lack_nodes):
                return None
            if not has_said:
                say("waiting until the job has started, or has a place for this node")
            has_said = True
        time.sleep(_BEAT_S / 2)
    return None


class _Launchers:
    """The other launchers, as one that comes hears them. ``beats``: the last one of each node."""

    def __init__(self, nodes: int) -> None:
        self.beats: dict[int, str] = dict.fromkeys(range(nodes), "")
        self._begin = self._now = 0.0
        self._heard: dict[int, float] = {}  # when each has sent its last beat

    def listen(self, store: Any) -> None:
        self._now = time.monotonic()
        self._begin = self._begin or self._now
        for node, known in self.beats.items():
            beat = _value(store, _BEAT.format(node))
            if beat != known:
                self.beats[node], self._heard[node] = beat, self._now
            if not beat:
                self._heard.pop(node, None)

    @property
    def are_heard(self) -> bool:
        """Whether any is alive for sure: a beat that was there before may be of an ended job."""
        return max(self._heard.values(), default=0.0) > self._begin

    @property
    def have_had_time(self) -> bool:
        """Whether those that were silent so far are lost."""
        return self._now > self._begin + _SILENT_S

    def _alive(self) -> list[int]:
        return [node for node, at in self._heard.items() if self._now - at <= _SILENT_S]

    def go_on(self, has_begun: bool) -> bool:
        """Whether the job does: before it has begun, it needs all that start together."""
        together = [json.loads(self.beats[node])[2] for node in self._alive()]
        return bool(together) and (has_begun or len(together) == together[0])

    def free_place(self, store: Any, size: int, may_lack_nodes: bool) -> int | None:
        """The node whose place this one has taken: the first to ask gets it."""
        alive = self._alive()
        if not alive:
            return None
        free = [node for node in self._heard if node not in alive]
        if may_lack_nodes and self.are_heard:
            begun = _ranks_at_begin(store)
            free += [n for n, beat in self.beats.items() if not beat and n * size not in begun]
        for node in free:
            beat = self.beats[node]
            has_size = not beat or len(json.loads(beat)[0]) == size
            claim = f"{_BEAT.format(node)}/{hashlib.sha256(beat.encode()).hexdigest()}"
            if has_size and store.add(claim, 1) == 1:
                return node
        return None


def _value(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _check_fit(job: dict[str, Any], size: int, nodes: int) -> None:
    if job["ranks"] != size * nodes:
        raise ConfigError(
            f"the job that runs has {job['ranks']} ranks on {nodes} nodes, and this node would "
            f"start {size}; give it launch.nproc_per_node={job['ranks'] // nodes}"
        )
    if not has_owner(job["run_dir"]):
        raise ConfigError(
            f"run directory {job['run_dir']} is not the one that the other nodes see: it must be "
            "shared"
        )


def _ranks_at_begin(store: Any) -> set[int]:
    """The ranks that were there when the job began."""
    replicas = json.loads(store.get(RANKS))["ranks"]
    members = json.loads(store.get(RECORD.format(0)))["members"]
    return set(itertools.chain.from_iterable(replicas[number] for number, _ in members))


def _take_place(
    store: Any, prefix: str, node: int, nodes: int, size: int, beat: str
) -> Vacancy | None:
    """None where all start again. ``beat``: the last one of the node that is lost; empty where
    there was none."""
    ranks = json.loads(beat)[0] if beat else list(range(node * size, (node + 1) * size))
    store.set(_BEAT.format(node), json.dumps([ranks, time.monotonic(), nodes]))
    events = Events(store)
    while events.read(0.0):
        pass
    if events.restarts:
        return None
    replicas = json.loads(store.get(RANKS))["ranks"]
    lives = {}
    for number, of_replica in enumerate(replicas):
        dead = [life for replica, life in events.dead if replica == number]
        lives[number] = max(dead, default=-1) + 1
        # Whoever counts in its life is lost with the node, though nobody may have noticed yet.
        if beat and set(of_replica) & set(ranks):
            post(store, "dead", (number, lives[number]), events.count)
            lives[number] += 1
    return Vacancy(prefix, node, nodes, ranks, replicas, lives)


class LostReplicas:
    """Of the ranks that one launcher has started together.

    ``ranks``: of each process, by local rank; ``again(local_rank, variables)`` starts one again;
    ``may_go_on(failure)``: whether a rank that failed is no reason to end or restart all;
    ``told_to_stop``: the exit code of ranks that were; ``node``: of this launcher, among ``nodes``
    of which ``together`` have started at once.
    """

    def __init__(
        self,
        store: Any,
        processes: dict[int, Any],
        ranks: dict[int, int],
        error_files: dict[int, str],
        again: Callable[[int, dict[str, str]], None],
        may_go_on: Callable[[RankFailure], bool],
        node: int = 0,
        nodes: int = 1,
        together: int = 1,
        vacancy: Vacancy | None = None,
        told_to_stop: int | None = None,
    ) -> None:
        self._store, self._processes, self._ranks = store, processes, ranks
        self._error_files, self._again, self._may_go_on = error_files, again, may_go_on
        self._events = Events(store)
        self._replicas: list[list[int]] = []
        self._lives: dict[int, int] = {}
        self.ends_job = False  # the program or a sample is at fault
        self._stopped: dict[int, float] = {}
        self._starts: dict[int, list[float]] = {}  # of each replica, in the last minute
        self._node, self._nodes, self._together = node, nodes, together
        self._told_to_stop = told_to_stop
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._beat_at = 0.0
        if vacancy is not None:
            self._replicas, self._lives = vacancy.replicas, dict(vacancy.lives)
            self._read()

    def replace(self) -> bool:
        """Replaces what is lost. Returns whether the job goes on: not before replicas may be lost,
        when all have ended well, when nobody has the state any more, or when a failure is one of
        the whole job."""
        if all(process.poll() == 0 for process in self._processes.values()):
            return False  # the store may have ended with another node
        is_due = self._nodes > 1 and time.monotonic() > self._beat_at + _BEAT_S
        if is_due:
            self._send_beat()
        if not self._has_begun():
            return False
        self._read()
        if is_due:
            self._watch_nodes()
        if not all(itertools.starmap(self._is_no_end, self._processes.items())):
            return False
        self._read()
        if not self._store.check([LATEST]):
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
        return bool(self._replicas) and not self._events.restarts

    def _is_no_end(self, local: int, process: Any) -> bool:
        """Looks at one process, and says that its replica is lost if so. False where its failure
        is one of the whole job."""
        code = process.poll()
        if code is None:
            self._end_if_stopped(local, process)
        elif code == self._told_to_stop:
            return False
        elif code == LEFT_OUT:  # no failure of its own
            self._say_dead(self._member(local))
        elif code and not self._is_dead(self._member(local)):
            error = read_error_file(self._error_files[local])
            failure = RankFailure(self._ranks[local], code, error)
            self.ends_job = self._is_of_the_job(failure)
            if self.ends_job or not self._may_go_on(failure):
                return False
            self._say_dead(self._member(local))
        return True

    @property
    def has_lost(self) -> bool:
        """Whether any replica was lost since all have started."""
        return bool(self._events.dead)

    def has_left(self) -> bool:
        """Whether all replicas of this launcher have told the others to go on without them."""
        self._read()
        own = [self._member(local) for local in self._ranks] if self._replicas else []
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

    def _send_beat(self) -> None:
        """Says that this launcher is there."""
        self._beat_at = time.monotonic()
        own = [sorted(self._ranks.values()), self._beat_at, self._together]
        self._store.set(_BEAT.format(self._node), json.dumps(own))

    def _watch_nodes(self) -> None:
        """Says which replicas are lost with a node whose launcher is silent."""
        now = time.monotonic()
        for node in set(range(self._nodes)) - {self._node}:
            key = _BEAT.format(node)
            if not self._store.check([key]):
                continue
            beat = self._store.get(key)
            if self._beats.get(node, (b"", now))[0] != beat:
                self._beats[node] = beat, now
            elif now - self._beats[node][1] > _SILENT_S:
                self._beats[node] = beat, math.inf  # said once
                ranks = json.loads(beat)[0]
                for number, of_replica in enumerate(self._replicas):
                    if set(ranks) & set(of_replica):
                        self._say_dead((number, self._lives[number]))
                # No replica goes on without them, and nobody here can start them again.
                if self._store.get(ON) == b"all":
                    post(self._store, "restart", None, self._events.count)

    def _member(self, local: int) -> Member:
        rank = self._ranks[local]
        number = next(n for n, ranks in enumerate(self._replicas) if rank in ranks)
        return number, self._lives[number]

    def _is_dead(self, member: Member) -> bool:
        return member in self._events.dead

    def _say_dead(self, member: Member) -> None:
        if not self._is_dead(member):
            post(self._store, "dead", member, self._events.count)
            self._events.dead.add(member)

    def _end_if_stopped(self, local: int, process: Any) -> None:
        state = ""
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "T":
            self._stopped.pop(local, None)
        elif time.monotonic() - self._stopped.setdefault(local, time.monotonic()) > _STOPPED_S:
            process.close(signal.SIGKILL)

    def _start_again(self, number: int) -> None:
        """Ends what is left of the replica here, and starts it again once its pause is over: none
        at first, longer and longer where it is lost again within a minute."""
        mine = [local for local, rank in self._ranks.items() if rank in self._replicas[number]]
        for local in mine:
            self._processes[local].close(signal.SIGKILL)
        now = time.monotonic()
        started = [at for at in self._starts.get(number, ()) if at > now - _LONGEST_PAUSE_S]
        if mine and len(started) > 2 and now < started[-1] + 2.0 ** (len(started) - 2):
            return
        self._starts[number] = [*started, now]
        self._lives[number] += 1
        for local in mine:
            self._processes[local].wait(10.0)
            with contextlib.suppress(OSError):
                os.unlink(self._error_files[local])
            self._again(local, {LIFE: str(self._lives[number])})

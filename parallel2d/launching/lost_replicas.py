"""Restarts the failed replicas of a node while the other replicas train: `LostReplicas`.

See [Note: replicas that never stop] in `parallel2d.base.replicas`. Launchers post failed replicas
in the store, where all ranks read them. Each launcher restarts its own ranks of a failed replica.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from parallel2d.base.exit_codes import LEFT_OUT
from parallel2d.base.launcher_environment import INCARNATION
from parallel2d.base.replicas.events import LATEST, ON, RANKS, RECORD, Events, Member, post
from parallel2d.launching.failures import RankFailure
from parallel2d.launching.node_ranks import GRACE_AFTER_FAILURE_S, NodeRanks
from parallel2d.launching.rendezvous_round import Round

_RESTART_WINDOW_S = 60.0  # restarts within this time lengthen the pause before the next restart


@dataclass(eq=False)
class LostReplicas:
    """Watches the ranks of this launcher, and restarts its failed replicas.

    Attributes:
        ends_job: True after a failure that the program or a sample has caused; see
            `_is_of_the_job`.
        is_late: True if the replicas of the other launchers trained before this launcher started
            its ranks.
        needs_all: True if the other replicas wait for a failed replica.
    """

    _round: Round
    _store: Any  # the store of the ranks
    _ranks: NodeRanks
    # returns False if the failure ends or restarts all ranks
    _may_continue: Callable[[RankFailure], bool]
    _requeue_exit_code: int  # exit code of a rank that was asked to stop

    def __post_init__(self) -> None:
        self._events = Events(self._store)
        self._replicas: list[list[int]] = []
        self._incarnations: dict[int, int] = {}
        self.ends_job = self.needs_all = False
        self._timed_out: set[str] = set()  # names of launchers
        # Local rank -> its CPU time, and the number of seconds in which polls have found it
        # stopped. Each poll adds at most one interval, because the launcher may have been stopped
        # together with its ranks.
        self._stopped: dict[int, tuple[str, float]] = {}
        self._polled_at = time.monotonic()
        # replica -> the times of its restarts in the last minute
        self._starts: dict[int, list[float]] = {}
        # Deadlines after which ranks receive SIGKILL: by replica that must end, and one for all
        # ranks
        self._ends_by: dict[int, float] = {}
        self._restarts_by: float | None = None
        self.is_late = self._has_begun()

    def enter(self) -> dict[int, int]:
        """Give the replicas of this late launcher new incarnations. Return the incarnations of all
        ranks."""
        self._events.read_all()
        own, found = set(self._round.ranks_of(self._round.own)), {}
        for number, ranks in enumerate(self._replicas):
            dead = [incarnation for replica, incarnation in self._events.dead if replica == number]
            self._incarnations[number] = max(dead, default=-1) + 1
            # The previous incarnation has failed, even if no launcher has posted this yet.
            if own & set(ranks):
                self._post_dead((number, self._incarnations[number]))
                self._incarnations[number] += 1
            found.update(dict.fromkeys(ranks, self._incarnations[number]))
        return found

    def replace(self) -> bool:
        """Restart failed replicas. Returns False if all ranks must end, for one of three reasons:
        replicas may not fail yet, no member of the quorum is live, or the failure restarts or ends
        all ranks."""
        if not self._has_begun():
            return False
        self._events.read_all()
        self._post_timed_out_nodes()
        self._kill_stopped()
        if not all(map(self._continues_after, self._ranks.processes)):
            return False
        self._events.read_all()
        if self._events.restarts or not self._store.check([LATEST]):
            return False  # all ranks restart
        members = json.loads(self._store.get(RECORD.format(self._store.get(LATEST).decode())))
        if all(self._is_dead(tuple(each)) for each in members["members"]):
            return False
        for member in list(self._incarnations.items()):
            if self._is_dead(member):
                self._restart(member[0])
        return True

    def post_failed(self) -> None:
        """Post the failed replicas of this launcher, and do not restart them. Called after this
        launcher was asked to stop: the other ranks can save only after they have read which
        replicas failed."""
        with contextlib.suppress(DistNetworkError, DistStoreError):  # the store's node has ended
            if not self._has_begun():
                return
            self._events.read_all()
            self._kill_stopped()
            for local, process in self._ranks.processes.items():
                if process.poll() not in (None, 0, self._requeue_exit_code):
                    self._post_dead(self._member(local))

    def _has_begun(self) -> bool:
        """True if replicas may fail, and no event restarts all ranks."""
        if not self._replicas and self._store.check([ON]):
            self._replicas = json.loads(self._store.get(RANKS))["ranks"]
            self._incarnations = dict.fromkeys(range(len(self._replicas)), 0)
            self.needs_all = self._store.get(ON) == b"all"
        return bool(self._replicas) and not self._events.restarts

    def _continues_after(self, local: int) -> bool:
        """Check the process of local rank ``local``, and post its replica as failed if the process
        has failed. Returns False if all ranks must end."""
        code = self._ranks.processes[local].poll()
        if code == self._requeue_exit_code:
            return False
        if code == LEFT_OUT:  # the other replicas continue without this replica
            self._post_dead(self._member(local))
        elif code and not self._is_dead(self._member(local)):
            failure = self._ranks.failure(local)
            self.ends_job = self._is_of_the_job(failure)
            if self.ends_job or not self._may_continue(failure):
                return False
            self._post_dead(self._member(local))
        return True

    def all_must_end(self) -> bool:
        """True if all ranks restart, and the time in which they may end without a signal is
        over."""
        now = time.monotonic()
        if self._events.restarts and self._restarts_by is None:
            self._restarts_by = now + GRACE_AFTER_FAILURE_S
        return self._restarts_by is not None and now > self._restarts_by

    @property
    def has_lost(self) -> bool:
        """True if any replica has failed since the start of all ranks."""
        return bool(self._events.dead)

    def has_left(self) -> bool:
        """True if all replicas of this launcher have left, and other replicas continue."""
        with contextlib.suppress(DistNetworkError, DistStoreError):  # the store's node has ended
            self._events.read_all()
        own = list(map(self._member, self._ranks.numbers)) if self._replicas else []
        return bool(own) and all(map(self._is_dead, own))

    def _is_of_the_job(self, failure: RankFailure) -> bool:
        """True if ranks of two replicas have raised an error in the same step. The cause is then a
        sample or the program, and every replica would fail in this step."""
        error = failure.error
        if error is None or error.step is None or failure.lost_a_peer:
            return False
        if "ReplicaLost" in error.text:  # for example from a hook that uses the replicate axis
            return False
        number = next(n for n, ranks in enumerate(self._replicas) if failure.rank in ranks)
        key = f"replicas/raised/{error.step}"
        self._store.append(key, f"{number} ")
        return len(set(self._store.get(key).split())) > 1

    def _post_timed_out_nodes(self) -> None:
        """Post the replicas of each timed-out node as failed, once per timeout."""
        for each in self._round.state.members:
            if not self._round.has_timed_out(each.name):
                self._timed_out.discard(each.name)
            elif each.name not in self._timed_out:
                self._timed_out.add(each.name)
                ranks = set(self._round.ranks_of(each))
                for number, of_replica in enumerate(self._replicas):
                    if ranks & set(of_replica):
                        self._post_dead((number, self._incarnations[number]))
                # The job cannot continue without the failed replica, and the timed-out launcher
                # cannot restart this replica.
                if self.needs_all:
                    post(self._store, "restart", None, self._events.count)

    def _member(self, local: int) -> Member:
        rank = self._ranks.numbers[local]
        number = next(n for n, ranks in enumerate(self._replicas) if rank in ranks)
        return number, self._incarnations[number]

    def _is_dead(self, member: Member) -> bool:
        return member in self._events.dead

    def _post_dead(self, member: Member) -> None:
        if not self._is_dead(member):
            post(self._store, "dead", member, self._events.count)
            self._events.dead.add(member)
            # The other ranks of the replica may wait for the failed rank forever. The deadline 0
            # kills them at the next restart.
            self._ends_by[member[0]] = 0.0

    def _kill_stopped(self) -> None:
        """Kill each rank that has been stopped (by SIGSTOP or a debugger) for longer than the
        heartbeat timeout."""
        now, before = time.monotonic(), self._polled_at
        self._polled_at = now
        for local, process in self._ranks.processes.items():
            state = ran = ""
            with contextlib.suppress(OSError, IndexError):
                state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
                # CPU time shows whether a stopped rank has run between two polls.
                ran = Path(f"/proc/{process.pid}/schedstat").read_text()
            old, stopped_s = self._stopped.pop(local, ("", 0.0))
            if state != "T":
                continue
            if ran == old:
                stopped_s += min(now - before, self._round.heartbeat_interval_s)
            else:
                stopped_s = 0.0
            self._stopped[local] = ran, stopped_s
            if stopped_s > self._round.heartbeat_timeout_s:
                process.close(signal.SIGKILL)

    def _restart(self, number: int) -> None:
        """Restart this launcher's ranks of a failed replica, if the restart is due; otherwise
        return. Each poll calls this method again until the ranks have restarted. The restart is due
        when this launcher's ranks of the replica have ended or their deadline is over; the
        remaining ranks receive SIGKILL at the deadline. From the fourth restart within
        `_RESTART_WINDOW_S`, each restart is delayed twice as long as the previous restart."""
        replica = self._replicas[number]
        mine = [local for local, rank in self._ranks.numbers.items() if rank in replica]
        now = time.monotonic()
        ends_by = self._ends_by.setdefault(number, now + GRACE_AFTER_FAILURE_S)
        if now < ends_by and any(self._ranks.processes[each].poll() is None for each in mine):
            return
        for local in mine:
            self._ranks.processes[local].close(signal.SIGKILL)
        started = [at for at in self._starts.get(number, ()) if at > now - _RESTART_WINDOW_S]
        if mine and len(started) > 2 and now < started[-1] + 2.0 ** (len(started) - 2):
            return
        self._starts[number] = [*started, now]
        self._ends_by.pop(number)
        self._incarnations[number] += 1
        for local in mine:
            self._ranks.processes[local].wait(10.0)
            self._ranks.start_one(local, {INCARNATION: str(self._incarnations[number])})

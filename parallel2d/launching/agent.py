"""One node's launcher: `run_node` starts its ranks, watches them, and restarts them.

The launcher decides whether and when ranks restart. The launcher converts a failure to one
exception, with the error of the rank that failed first. In `Round` the nodes agree on the nodes
that start together.

[Note: reasons for a restart] All workers restart for one of four reasons. (1) A worker failed. The
launcher ends the other workers of this node immediately, because these workers would wait for the
failed worker forever; see [Note: a storm of restarts]. (2) A node wants to join. The workers
receive the request to stop and save, and no step is repeated. (3) A scheduler takes a node away,
and a rank received the scheduler's signal to stop. All workers have saved, and the other nodes
continue. (4) This node timed out, and the other nodes continued without this node. The launcher
ends the workers of this node without a save.

[Note: a storm of restarts] A limit on all restarts of a job would end a month-long run after a few
failed nodes. Without a limit, a step that always fails would repeat forever. Therefore the limit
counts consecutive failures without progress; progress is a step that no attempt has reached before.
After the first of these failures the workers restart immediately. After the following failures the
workers restart after 1, 2, 4 ... seconds, at most one minute.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from parallel2d.base import files
from parallel2d.base.config import LaunchConfig
from parallel2d.base.errors import ConfigError, counted
from parallel2d.base.files import private_folders as folders
from parallel2d.base.launcher_environment import (
    AGENT,
    HAS_STORE,
    INCARNATION,
    MEMORY_DIR,
    PREFIX,
    SHARED_MEMORY,
)
from parallel2d.launching.failures import RankFailure, StoreLost, WorkersFailed, first_failure
from parallel2d.launching.joining_node import JoiningNode
from parallel2d.launching.lost_replicas import LostReplicas
from parallel2d.launching.node_ranks import GRACE_AFTER_FAILURE_S, NodeRanks
from parallel2d.launching.processes import Signalled
from parallel2d.launching.rendezvous import Rendezvous
from parallel2d.launching.rendezvous_round import FIRST_CALL_S, LAST_CALL_S, JobDone, Round
from parallel2d.launching.shared_job import folder_errors_explained

LONGEST_PAUSE_S = 60.0
_LOOK_S = 0.1  # interval between two polls of the ranks
_FAILURE = "parallel2d/failure-of-job"  # the first node to set this key shows the error


class Restarts:
    """Decides whether failed workers may restart, and how long they wait before the restart; see
    [Note: a storm of restarts].

    Args:
        limit: largest number of consecutive failures without progress after which workers restart.
        step: function that returns the last step that has begun; called after each failure.
    """

    def __init__(self, limit: int, step: Callable[[], int]) -> None:
        self.limit, self._step = limit, step
        self._furthest, self.in_a_row = -1, 0

    def after_failure(self) -> float | None:
        """Return the seconds to wait before the next attempt; None if no attempt is left."""
        step = self._step()
        if step > self._furthest:
            self._furthest, self.in_a_row = step, 0
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            return None
        return 0.0 if self.in_a_row == 1 else min(2.0 ** (self.in_a_row - 2), LONGEST_PAUSE_S)


@dataclass
class NodeWorkers:
    """The ranks of this node for the duration of the job."""

    words: Sequence[str]  # command-line arguments of each rank
    size: int
    settings: LaunchConfig
    folder: str  # deleted when this launcher ends
    # Folder for the output of all ranks except the first; None: the console
    logs: str | None = None
    main: str = "parallel2d.rank:rank_main"  # called by each rank with ``words``
    save: bool = False  # True if the ranks can save a checkpoint
    # True if the ranks had finished or stopped on request when they last ended
    have_saved: bool = False
    has_left: bool = False  # True if the ranks ended after a signal and the other replicas continue
    starts: int = 0  # number of starts of all ranks

    def __post_init__(self) -> None:
        limit = self.settings.max_restarts
        if limit == "auto":  # no restart on one node, where a user usually watches the job
            limit = 0 if self.settings.node_range == (1, 1) else 5
        self.restarts = Restarts(int(limit), self.last_step)

    def last_step(self) -> int:
        """Return the last step that workers of this launcher have begun; -1 before the first."""
        with contextlib.suppress(OSError, ValueError):
            return int(Path(self.folder, "step").read_text())
        return -1

    def log(self, text: str) -> None:
        print(f"parallel2d: {files.for_terminal(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def launcher_environment(environment: dict[str, str]) -> Iterator[str]:
    """Create two folders for this launcher, and set ``environment`` and the variables with their
    paths for its workers. One folder is for records. The other folder is in shared memory, for
    in-memory checkpoints. Yields the folder for records, and deletes both folders at the end.
    Raises `ConfigError` if another user owns a folder with one of the names."""
    places = {AGENT: folders.temporary_place()}
    if os.path.isdir(SHARED_MEMORY) and MEMORY_DIR not in os.environ:
        places[MEMORY_DIR] = SHARED_MEMORY
    with folder_errors_explained():
        paths = {}
        for name, place in places.items():
            paths[name] = folders.open_folder(os.getpid(), place)
    before = dict(os.environ)
    os.environ.update(environment, **paths)
    try:
        yield paths[AGENT]
    finally:
        os.environ.clear()
        os.environ.update(before)
        for path in paths.values():
            folders.remove(path)


def run_node(workers: NodeWorkers, rendezvous: Rendezvous) -> None:
    """Run this node's ranks until the job ends; see [Note: reasons for a restart].

    Raises `ConfigError` or `WorkersFailed` with the error of the rank that failed first;
    `StoreLost` if the store no longer answers; or `Signalled` after this process has received a
    signal to end and has ended its ranks.
    """
    try:
        with Round(rendezvous, workers.size, workers.settings) as current:
            node = _Node(workers, rendezvous, current)
            try:
                node.run()
            except JobDone:
                workers.log("the job ended before this node joined it")
            except Signalled:
                workers.has_left = node.has_left()
                raise
            except (DistNetworkError, DistStoreError):
                # After a successful job the store may end with another node.
                if set(node.ranks.codes()) != {0}:
                    raise
            finally:
                if node.ranks.processes:
                    workers.have_saved = workers.save and node.ended_well()
    except (DistNetworkError, DistStoreError) as error:
        raise StoreLost(str(error).splitlines()[0]) from None


class _End(enum.Enum):
    """The reason why the ranks of this node must end."""

    DONE = enum.auto()
    FAILED = enum.auto()
    NODES_CHANGED = enum.auto()
    WITHOUT_US = enum.auto()


class _Node:
    """The loop of one launcher."""

    def __init__(self, workers: NodeWorkers, rendezvous: Rendezvous, current: Round) -> None:
        self.workers, self._rendezvous, self._round = workers, rendezvous, current
        folder = workers.logs or os.path.join(workers.folder, "logs")
        self.ranks = NodeRanks(workers.main, workers.words, folder, bool(workers.logs))
        self.lost: LostReplicas | None = None

    def run(self) -> None:
        """Start and restart the ranks until the job ends or must end."""
        grace_s = self.workers.settings.grace_s
        late = JoiningNode(self._round, self._rendezvous.store, self.workers.log)
        has_failed = False
        try:
            while True:
                call_s = LAST_CALL_S if self.workers.starts else FIRST_CALL_S
                self._round.join(call_s, late.wanted, has_failed)
                lost = self._start()
                end = self._watch(lost)
                if end is _End.DONE:
                    # A node with failed replicas may not reach the end of the job.
                    if not lost.has_lost:
                        self._round.await_others()
                    self._end_job("well")
                    return
                has_failed = self._end_ranks(end, lost)
        except Signalled as stopped:
            raise self._pass_on(stopped) from None
        finally:
            self.ranks.end(signal.SIGTERM, grace_s)

    def ended_well(self) -> bool:
        """True if a rank has finished, or has stopped on request."""
        return bool({0, self.workers.settings.requeue_exit_code} & set(self.ranks.codes()))

    def has_left(self) -> bool:
        """True if the other replicas continue without the replicas of this node."""
        return self.ended_well() and self.lost is not None and self.lost.has_left()

    def _start(self) -> LostReplicas:
        """Start the ranks of this node, with their ranks in the job as RANK."""
        state, ranks = self._round.state, self._round.ranks_of(self._round.own)
        store = PrefixStore(state.prefix, self._rendezvous.store)
        requeue = self.workers.settings.requeue_exit_code
        self.lost = lost = LostReplicas(self._round, store, self.ranks, self._may_continue, requeue)
        lives: dict[int, int] = {}
        if lost.is_late:
            lives = lost.enter()
            self.workers.log(f"replacing failed ranks {ranks}; the other ranks continue")
        of_all = {
            **self._rendezvous.environment,
            PREFIX: state.prefix,
            HAS_STORE: int(self._rendezvous.server is not None and self._round.largest > 1),
            # The variables that torchrun sets for a worker
            "WORLD_SIZE": len(lives) or sum(each.size for each in state.members),
            "LOCAL_WORLD_SIZE": self.workers.size,
            "GROUP_RANK": state.members.index(self._round.own),
            "GROUP_WORLD_SIZE": len(state.members),
            "MASTER_ADDR": state.members[0].address,
            "MASTER_PORT": state.members[0].port,
            "TORCHELASTIC_RESTART_COUNT": self.workers.starts,
            "TORCHELASTIC_MAX_RESTARTS": self.workers.restarts.limit,
            "TORCHELASTIC_RUN_ID": self._rendezvous.name,
            "TORCHELASTIC_USE_AGENT_STORE": False,
        }
        environments = []
        for local, rank in enumerate(ranks):
            of_one = {"RANK": rank, "LOCAL_RANK": local, INCARNATION: lives.get(rank, 0)}
            given = {}
            for name, value in {**of_all, **of_one}.items():
                given[name] = str(value)
            environments.append({**os.environ, **given})
        self.ranks.start(self.workers.starts, environments)
        self.workers.starts += 1
        return lost

    def _watch(self, lost: LostReplicas) -> _End:
        """Restart failed replicas until all ranks of this node must end. Return the reason."""
        limit = self.workers.restarts.limit
        while True:
            time.sleep(_LOOK_S)
            codes = self.ranks.codes()
            if all(code == 0 for code in codes):
                # checked before the store is used, because the store may have ended
                return _End.DONE
            if any(codes) and not limit:
                return _End.FAILED
            self._round.poll()
            if not (self._round.takes_part or self._round.is_open):
                # Checked before a restart: another node may have these ranks now
                return _End.WITHOUT_US
            goes_on = bool(limit) and lost.replace()
            if (any(codes) or lost.all_must_end()) and not goes_on:
                return _End.FAILED
            if not self._round.takes_part:
                return _End.NODES_CHANGED

    def _end_ranks(self, end: _End, lost: LostReplicas) -> bool:
        """End the ranks of this node before a restart, or raise the error that ends the job.
        Returns True if a rank of this node has failed and no rank was asked to stop."""
        workers, grace_s = self.workers, self.workers.settings.grace_s
        if end is _End.FAILED:
            failures = self.ranks.end_after_failure()
            pause = None if lost.ends_job else self._pause_after(failures)
            if pause is None:
                error = self._explain(first_failure(failures))
                if not lost.is_late:  # with a late launcher, the other replicas may continue
                    self._end_job("failed")
                raise error
            time.sleep(pause)
            requeue = workers.settings.requeue_exit_code
            return all(each.exit_code != requeue for each in failures)
        if end is _End.NODES_CHANGED and self._round.state.after_failure:
            # The live ranks cannot save without the failed ranks. A rank does not react to SIGTERM
            # while its accelerator waits for a failed rank.
            workers.log("ranks of another node have failed; restarting with all live nodes")
            self.ranks.end(signal.SIGKILL, GRACE_AFTER_FAILURE_S)
        elif end is _End.NODES_CHANGED:
            workers.log(
                "the nodes of this job have changed; saving, then restarting with all live nodes"
            )
            self.ranks.end(signal.SIGTERM, grace_s)
        else:
            # Since this node timed out, the other nodes have repeated its steps and may be ahead.
            # The ranks are killed, not asked to stop: if they saved, they would overwrite the
            # progress of the other nodes.
            workers.log(
                "this node timed out and the other nodes continued; ending its ranks and rejoining"
            )
            self.ranks.end(signal.SIGKILL, GRACE_AFTER_FAILURE_S)
        return False

    def _end_job(self, how: str) -> None:
        with contextlib.suppress(DistNetworkError, DistStoreError):  # the store has ended already
            self._rendezvous.end(how)

    def _pass_on(self, stopped: Signalled) -> Signalled:
        """Send the ranks the signal that this process received, and wait until they have ended.
        Returns the last signal that this process has received. Another Ctrl-C kills the ranks
        immediately."""
        number, grace_s = stopped.number, float(self.workers.settings.grace_s)
        if number == signal.SIGINT and self.workers.save and self.workers.last_step() > 0:
            self.workers.log("saving after the running step; Ctrl-C again ends at once")
        while True:
            try:
                self.ranks.end(number, grace_s, self._post_failed)
                return stopped
            except Signalled as another:
                stopped, number = another, another.number
                if number == signal.SIGINT:
                    number, grace_s = signal.SIGKILL, GRACE_AFTER_FAILURE_S

    def _post_failed(self) -> None:
        if self.lost is not None:
            self.lost.post_failed()

    def _may_continue(self, failure: RankFailure) -> bool:
        """True if only the replica of the failed rank restarts. The other replicas continue, or
        wait for it."""
        workers, restarts = self.workers, self.workers.restarts
        if failure.error and failure.error.complete:
            return False
        if restarts.after_failure() is None:
            return False
        others = "wait" if self.lost is not None and self.lost.needs_all else "continue"
        workers.log(f"rank {failure.rank}: {failure}. Its replica restarts, the others {others}")
        return True

    def _pause_after(self, failures: Sequence[RankFailure]) -> float | None:
        """Return the seconds until all ranks restart; None if they do not restart. Raises
        `Signalled` if a rank was asked to stop and restarts are not allowed."""
        workers, restarts = self.workers, self.workers.restarts
        if any(each.exit_code == workers.settings.requeue_exit_code for each in failures):
            if not restarts.limit:
                raise Signalled(signal.SIGTERM)  # as if the launcher had received the signal
            workers.log(
                "a rank was asked to stop, and all have saved; continuing with the remaining nodes"
            )
            return 0.0
        failure = first_failure(failures)
        if failure.error and failure.error.config_error:
            return None
        pause = restarts.after_failure()
        if pause is not None:
            wait = f" in {pause:.0f} s" if pause else ""
            left = counted(restarts.limit - restarts.in_a_row, "attempt")
            workers.log(f"rank {failure.rank}: {failure}. Restarting{wait}; {left} left")
        return pause

    def _explain(self, failure: RankFailure) -> Exception:
        """Return the exception that ends the job. On one node it has the error of the rank that
        failed first; on the other nodes it refers to that error."""
        workers, error = self.workers, failure.error
        is_alone = workers.settings.node_range == (1, 1)
        if not (is_alone or self._reports_failure(failure.lost_a_peer)):
            return WorkersFailed(
                f"the ranks of {socket.gethostname()} ended because a rank on another node failed; "
                "see the error there"
            )
        if error and error.config_error:
            return ConfigError(error.text)
        text = error.text if error else str(failure)
        if error is None or not error.complete:
            text = f"rank {failure.rank} failed first:\n{text}"
        restarts = workers.restarts
        if restarts.in_a_row > restarts.limit > 0:
            text += f"\n{restarts.limit} restarts made no progress"
        if workers.logs:
            text += f"\nlogs of the other ranks: {workers.logs}"
        return WorkersFailed(text)

    def _reports_failure(self, lost_a_peer: bool) -> bool:
        """True if this node must report the error."""
        if lost_a_peer:  # the node with the cause must be able to set the key first
            time.sleep(1.5)
        with contextlib.suppress(DistNetworkError, DistStoreError):  # the store's node has ended
            return self._rendezvous.store.add(f"{_FAILURE}/{self._rendezvous.name}", 1) == 1
        return True

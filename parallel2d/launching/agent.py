"""One node's launcher: `run_node` starts its ranks, watches them, and starts them again.

It decides whether and when they start again, and turns a failure into one exception with the error
of the rank that failed first. Which nodes start together is agreed on in `Round`.

[Note: three reasons to start again] A worker failed: the others of this node are ended at once,
since they wait for it in vain; see [Note: a storm of restarts]. The nodes changed, because one
wants to join: workers are asked to stop, so they save and nothing is repeated. A worker stopped
because a rank somewhere got a signal to stop (a node is being taken away): it has saved too, and
the rest go on. There is one reason to end running workers unsaved: the other nodes have gone on
without this one, because it did not answer for too long.

[Note: a storm of restarts] A count for the whole of a job would end a month's run for its twentieth
lost node; no count would repeat a broken step for ever. So what counts are failures in a row
without a step further than any before. The first of them is followed by a restart at once, the next
ones after 1, 2, 4 ... seconds, a minute at most.
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
from parallel2d.base.topology import (
    AGENT,
    HAS_STORE,
    INCARNATION,
    MEMORY_DIR,
    PREFIX,
    SHARED_MEMORY,
)
from parallel2d.launching.failures import RankFailure, StoreLost, WorkersFailed, first_failure
from parallel2d.launching.lost_replicas import Latecomer, LostReplicas
from parallel2d.launching.node_ranks import GRACE_AFTER_FAILURE_S, NodeRanks
from parallel2d.launching.processes import Signalled
from parallel2d.launching.rendezvous import Rendezvous
from parallel2d.launching.round import FIRST_CALL_S, LAST_CALL_S, JobDone, Round
from parallel2d.launching.shared_job import folder_errors_explained

LONGEST_PAUSE_S = 60.0
_LOOK_S = 0.1  # between two looks at the ranks
_FAILURE = "parallel2d/failure-of-job"  # the node that is first to claim it shows the error


class Restarts:
    """Whether workers that failed may try again, and after which pause. ``limit``: failures in a
    row without progress after which workers still start again. ``step``: called after each failure,
    returns the last step begun. See [Note: a storm of restarts]."""

    def __init__(self, limit: int, step: Callable[[], int]) -> None:
        self.limit, self._step = limit, step
        self._furthest, self.in_a_row = -1, 0

    def after_failure(self) -> float | None:
        """Seconds to wait before the next try; None when there is none left."""
        step = self._step()
        if step > self._furthest:
            self._furthest, self.in_a_row = step, 0
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            return None
        return 0.0 if self.in_a_row == 1 else min(2.0 ** (self.in_a_row - 2), LONGEST_PAUSE_S)


@dataclass
class NodeWorkers:
    """The ranks of this node, as long as the job lasts."""

    words: Sequence[str]  # of each, on its command line
    size: int
    settings: LaunchConfig
    folder: str  # exists as long as this launcher
    logs: str | None = None  # where ranks beside the first print to; None: the console
    main: str = "parallel2d.rank:rank_main"  # what each calls with ``words``
    save: bool = False  # whether they can
    have_saved: bool = False  # they did, or left, at their last end
    has_left: bool = False  # after a signal, and the other replicas go on
    starts: int = 0  # how often all have started

    def __post_init__(self) -> None:
        limit = self.settings.max_restarts
        if limit == "auto":  # on one node a person is near
            limit = 0 if self.settings.node_range == (1, 1) else 5
        self.restarts = Restarts(int(limit), self.last_step)

    def last_step(self) -> int:
        """The last step that workers of this launcher have begun; -1 before the first."""
        with contextlib.suppress(OSError, ValueError):
            return int(Path(self.folder, "step").read_text())
        return -1

    def log(self, text: str) -> None:
        print(f"parallel2d: {files.for_terminal(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def launcher_environment(environment: dict[str, str]) -> Iterator[str]:
    """This launcher's folders, one for records and one in shared memory for copies of the state,
    announced to its workers along with ``environment``. Both are removed afterwards. Yields the
    first. Raises `ConfigError` where somebody else holds one of their names."""
    places = {AGENT: folders.temporary_place()}
    if os.path.isdir(SHARED_MEMORY) and MEMORY_DIR not in os.environ:
        places[MEMORY_DIR] = SHARED_MEMORY
    with folder_errors_explained():
        paths = {name: folders.open_folder(os.getpid(), place) for name, place in places.items()}
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
    """Runs this node's ranks until the job ends. See [Note: three reasons to start again]. Raises
    `ConfigError` or `WorkersFailed` with the error of the rank that failed first, `StoreLost`, and
    `Signalled` when this process got a signal to end and has ended its ranks."""
    try:
        with Round(rendezvous, workers.size, workers.settings) as current:
            node = _Node(workers, rendezvous, current)
            try:
                node.run()
            except JobDone:
                workers.log("the job has ended, and had no place for this node")
            except Signalled:
                workers.has_left = node.has_left()
                raise
            except (DistNetworkError, DistStoreError):
                # The store may end with another node once the job has ended well.
                if set(node.ranks.codes()) != {0}:
                    raise
            finally:
                if node.ranks.processes:
                    workers.have_saved = workers.save and node.ended_well()
    except (DistNetworkError, DistStoreError) as error:
        raise StoreLost(str(error).splitlines()[0]) from None


class _End(enum.Enum):
    """Why the ranks of this node do not go on as they are."""

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
        """Starts the ranks, again and again, until the job ends or is to end."""
        grace_s = self.workers.settings.grace_s
        late = Latecomer(self._round, self._rendezvous.store, self.workers.log)
        has_failed = False
        try:
            while True:
                call_s = LAST_CALL_S if self.workers.starts else FIRST_CALL_S
                self._round.join(call_s, late.wanted, has_failed)
                lost = self._start()
                end = self._watch(lost)
                if end is _End.DONE:
                    # A node whose replicas were lost may not come so far.
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
        """Whether a rank has finished, or was told to stop and did."""
        return bool({0, self.workers.settings.requeue_exit_code} & set(self.ranks.codes()))

    def has_left(self) -> bool:
        """Whether the other replicas go on without those of this node."""
        return self.ended_well() and self.lost is not None and self.lost.has_left()

    def _start(self) -> LostReplicas:
        """Starts the ranks of this node in their places."""
        state, ranks = self._round.state, self._round.ranks_of(self._round.own)
        store = PrefixStore(state.prefix, self._rendezvous.store)
        told = self.workers.settings.requeue_exit_code
        self.lost = lost = LostReplicas(self._round, store, self.ranks, self._may_continue, told)
        lives: dict[int, int] = {}
        if lost.is_late:
            lives = lost.enter()
            self.workers.log(f"taking a place that is free, with ranks {ranks}: the others go on")
        of_all = {
            **self._rendezvous.environment,
            PREFIX: state.prefix,
            HAS_STORE: int(self._rendezvous.server is not None and self._round.largest > 1),
            # The variables that torchrun gives a worker
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
            given = {name: str(value) for name, value in {**of_all, **of_one}.items()}
            environments.append({**os.environ, **given})
        self.ranks.start(self.workers.starts, environments)
        self.workers.starts += 1
        return lost

    def _watch(self, lost: LostReplicas) -> _End:
        """Replaces replicas that are lost, until all ranks have to end."""
        limit = self.workers.restarts.limit
        while True:
            time.sleep(_LOOK_S)
            codes = self.ranks.codes()
            if all(code == 0 for code in codes):
                return _End.DONE  # the store may have ended with another node
            if any(codes) and not limit:
                return _End.FAILED
            self._round.look()
            if not (self._round.takes_part or self._round.is_open):
                return _End.WITHOUT_US  # before it starts ranks whose place another has taken
            goes_on = bool(limit) and lost.replace()
            if any(codes) and not goes_on:
                return _End.FAILED
            if not self._round.takes_part:
                return _End.NODES_CHANGED

    def _end_ranks(self, end: _End, lost: LostReplicas) -> bool:
        """Ends the ranks of this node for a new start, or raises the error that ends the job.
        Returns whether some had failed, without being asked to stop."""
        workers, grace_s = self.workers, self.workers.settings.grace_s
        if end is _End.FAILED:
            failures = self.ranks.end_after_failure()
            pause = None if lost.ends_job else self._pause_after(failures)
            if pause is None:
                error = self._explain(first_failure(failures))
                if not lost.is_late:  # else the others may go on
                    self._end_job("failed")
                raise error
            time.sleep(pause)
            told = workers.settings.requeue_exit_code
            return all(each.exit_code != told for each in failures)
        if end is _End.NODES_CHANGED and self._round.state.after_failure:
            # They cannot save without the ranks that are gone, and where they wait for those on an
            # accelerator they do not hear a SIGTERM.
            workers.log("ranks of another node have failed; starting again with all that are there")
            self.ranks.end(signal.SIGKILL, GRACE_AFTER_FAILURE_S)
        elif end is _End.NODES_CHANGED:
            workers.log(
                "the nodes of this job have changed; saving, and starting again with all that are "
                "there"
            )
            self.ranks.end(signal.SIGTERM, grace_s)
        else:
            # What its ranks have done since is done again elsewhere: they must not save it.
            workers.log(
                "the other nodes considered this one lost and went on; ending its ranks and "
                "rejoining"
            )
            self.ranks.end(signal.SIGKILL, GRACE_AFTER_FAILURE_S)
        return False

    def _end_job(self, how: str) -> None:
        with contextlib.suppress(DistNetworkError, DistStoreError):  # it ended with another node
            self._rendezvous.end(how)

    def _pass_on(self, stopped: Signalled) -> Signalled:
        """Sends the ranks the signal that this process got, and waits for their end. Returns the
        last signal that came meanwhile: another Ctrl-C ends them at once."""
        number, grace_s = stopped.number, float(self.workers.settings.grace_s)
        if number == signal.SIGINT and self.workers.save and self.workers.last_step() > 0:
            self.workers.log("saving after the running step; Ctrl-C again ends at once")
        while True:
            try:
                self.ranks.end(number, grace_s)
                return stopped
            except Signalled as another:
                stopped, number = another, another.number
                if number == signal.SIGINT:
                    number, grace_s = signal.SIGKILL, GRACE_AFTER_FAILURE_S

    def _may_continue(self, failure: RankFailure) -> bool:
        """Whether all but its replica go on after this failure of a rank."""
        workers, restarts = self.workers, self.workers.restarts
        if failure.error and failure.error.complete:
            return False
        if restarts.after_failure() is None:
            return False
        others = "wait" if self.lost is not None and self.lost.needs_all else "go on"
        workers.log(
            f"rank {failure.rank}: {failure}. Its replica starts again, the others {others}"
        )
        return True

    def _pause_after(self, failures: Sequence[RankFailure]) -> float | None:
        """Seconds until all ranks start again; None where they do not."""
        workers, restarts = self.workers, self.workers.restarts
        if any(each.exit_code == workers.settings.requeue_exit_code for each in failures):
            if not restarts.limit:
                raise Signalled(signal.SIGTERM)  # that a rank got is as one to the launcher
            workers.log(
                "a rank was asked to stop, and all have saved; continuing with the nodes that are "
                "left"
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
        """The end of a job: on one node the error of the rank that failed first, others refer to
        it."""
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
            text += f"\n{restarts.limit} restarts brought no step further"
        if workers.logs:
            text += f"\nlogs of the other ranks: {workers.logs}"
        return WorkersFailed(text)

    def _reports_failure(self, lost_a_peer: bool) -> bool:
        """Whether this node is the one to report the error."""
        if lost_a_peer:  # another node may have more to report, and comes first then
            time.sleep(1.5)
        with contextlib.suppress(DistNetworkError, DistStoreError):  # it ended with its node
            return self._rendezvous.store.add(f"{_FAILURE}/{self._rendezvous.name}", 1) == 1
        return True

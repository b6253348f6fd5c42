"""One node's launcher: `run_node` starts its ranks, watches them, and starts them again.

torch's elastic agent does the work. This module decides whether, when and how a group of workers
starts again, and turns a failure into one exception with the error of the rank that failed first.

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
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore
from torch.distributed.elastic.agent.server import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousError

from parallel2d.base import files
from parallel2d.base.config import LaunchConfig
from parallel2d.base.errors import ConfigError, counted
from parallel2d.base.files import private_folders as folders
from parallel2d.base.topology import AGENT, LIFE, MEMORY_DIR, PREFIX, SHARED_MEMORY
from parallel2d.launching.agreement import folder_errors_explained
from parallel2d.launching.elastic_internals import (
    GRACE_AFTER_FAILURE_S,
    ElasticAgent,
    StartedProcesses,
    goes_on_without_this_node,
    stop_heartbeats,
)
from parallel2d.launching.failures import RankFailure, StoreLost, WorkersFailed, first_failure
from parallel2d.launching.lost_replicas import LostReplicas, Vacancy, find_vacancy
from parallel2d.launching.rank_processes import start_rank
from parallel2d.launching.rendezvous import Rendezvous, ReturnHandler

LONGEST_PAUSE_S = 60.0
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
    """The ranks of this node, as long as the job lasts. ``words``: of each, on its command line.
    ``folder``: exists as long as this launcher. ``logs``: where ranks beside the first write what
    they print; None: to the console. ``main``: what each calls with ``words``
    ("package.module:function"). ``save``: whether they can; ``have_saved``: after a signal;
    ``have_left``: after one, and the other replicas go on."""

    words: Sequence[str]
    size: int
    settings: LaunchConfig
    folder: str
    logs: str | None = None
    main: str = "parallel2d.rank:rank_main"
    save: bool = False
    have_saved: bool = False
    have_left: bool = False

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

    def say(self, text: str) -> None:
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
    # torch 2.13 reuses the agent's store across restarts: workers would read dead peers' addresses.
    os.environ.update(environment, **paths, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        yield paths[AGENT]
    finally:
        os.environ.clear()
        os.environ.update(before)
        for path in paths.values():
            folders.remove(path)


def run_node(workers: NodeWorkers, rendezvous: Rendezvous) -> None:
    """Runs this node's ranks until the job ends, in the place of a node that is not there if others
    go on without it. As `_run_round`, and raises `ConfigError` for a node that does not fit."""
    nodes = workers.settings.node_range[1]
    if workers.restarts.limit and nodes > 1:
        try:
            vacancy = find_vacancy(
                rendezvous.store, rendezvous.latest_prefix, workers.size, nodes, workers.say
            )
        except (DistNetworkError, DistStoreError) as error:
            raise _explain_rendezvous(workers, rendezvous, error) from None
        if vacancy is not None:
            workers.say(
                f"taking a place that is free, with ranks {vacancy.ranks}: the others go on"
            )
            try:
                _run_round(workers, rendezvous, vacancy)
                return
            except _Restart:
                workers.say("all ranks start again; joining the others")
    _run_round(workers, rendezvous, None)


class _Restart(Exception):  # noqa: N818 (named after what happens)
    """All nodes start again, and this one was in the place of another."""


def _run_round(workers: NodeWorkers, rendezvous: Rendezvous, vacancy: Vacancy | None) -> None:
    """Runs this node's ranks until the job ends. See [Note: three reasons to start again]. Raises
    `ConfigError` or `WorkersFailed` with the error of the rank that failed first, `StoreLost`, and
    torch's SignalException when this process got a signal to end and has ended its workers."""
    os.environ.update(
        rendezvous.environment,
        TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    handler: Any = rendezvous.handler(workers.settings)
    if vacancy is not None:
        address = rendezvous.interface.address
        handler = ReturnHandler(
            rendezvous.store, vacancy.node, vacancy.nodes, rendezvous.name, address
        )
    rendezvous.announce_host()
    spec = WorkerSpec(
        role="worker",
        local_world_size=workers.size,
        entrypoint=workers.main,
        args=tuple(workers.words),
        rdzv_handler=handler,
        max_restarts=workers.restarts.limit,
        monitor_interval=0.1,
        local_addr=rendezvous.interface.address,
    )
    redirects = dict.fromkeys(range(1, workers.size), Std.ALL) if workers.logs else Std.NONE
    folder = workers.logs or os.path.join(workers.folder, "logs")
    logs = DefaultLogsSpecs(folder, redirects=redirects)
    agent = _Agent(workers, rendezvous, spec, logs, vacancy)
    over = True
    try:
        result = agent.run()
        if result is not None and result.is_failed():
            over = vacancy is None  # else the others may go on
            raise _explain_failure(workers, rendezvous, first_failure(result.failures))
    except _Restart:
        over = False
        raise
    except SignalException:
        over = False  # closing would keep a node that is only being replaced from coming back
        ended_well = {0, workers.settings.requeue_exit_code} & set(agent.exit_codes())
        workers.have_saved = workers.save and bool(ended_well)
        workers.have_left = bool(ended_well) and agent.has_left()
        raise
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        over = False
        raise _explain_rendezvous(workers, rendezvous, error) from None
    finally:
        # Else the heartbeats' thread may hold the handler's last reference, and wait for itself.
        stop_heartbeats(handler)
        if over:
            with contextlib.suppress(Exception):  # the store may have ended with another node
                rendezvous.end()
                handler.shutdown()


class _Agent(ElasticAgent):
    """torch's agent with our reasons to start again; it calls the methods below from its loop."""

    def __init__(
        self,
        workers: NodeWorkers,
        rendezvous: Rendezvous,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        vacancy: Vacancy | None,
    ) -> None:
        grace_s = workers.settings.grace_s
        super().__init__(spec, logs, exit_barrier_timeout=60, shutdown_timeout=grace_s)
        self.workers, self.rendezvous, self.logs = workers, rendezvous, logs
        self._pause, self._evicted = 0.0, False
        self._lost: LostReplicas | None = None
        self._vacancy = vacancy
        if vacancy is not None:
            self.given_ranks = vacancy.ranks
            self.given_size = sum(map(len, vacancy.replicas))

    def new_processes(self, group: Any) -> StartedProcesses:
        vacancy = self._vacancy
        os.environ[PREFIX] = vacancy.prefix if vacancy else self.rendezvous.ranks_prefix(group)
        spec = group.spec
        # The variables that torchrun gives a worker
        of_all = {
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self.remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": False,
        }
        environments = {}
        for worker in group.workers:
            of_one = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
                LIFE: vacancy.life_of(worker.global_rank) if vacancy else 0,
            }
            given = {name: str(value) for name, value in {**of_all, **of_one}.items()}
            environments[worker.local_rank] = {**os.environ, **given}
        start = functools.partial(start_rank, spec.entrypoint, spec.args)
        self._lost = None
        return StartedProcesses(start, environments, self.logs)

    def monitor_workers(self, group: Any) -> RunResult:
        if self.workers.restarts.limit and self._lost_replicas(group).replace():
            self.waits_for_others = not self._lost_replicas(group).has_lost
            return RunResult(state=WorkerState.HEALTHY)
        result = super().monitor_workers(group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            ends = self._lost is not None and self._lost.ends_job
            starts_again = not ends and self._may_start_again(result.failures)
            self.remaining_restarts = 1 if starts_again else 0
        # torch's agent does not check this; see also [Note: two halves of a job].
        elif result.state == WorkerState.HEALTHY and goes_on_without_this_node(
            group.spec.rdzv_handler
        ):
            self.workers.say(
                "the other nodes considered this one lost and went on; ending its ranks and "
                "rejoining"
            )
            self.remaining_restarts, self._pause, self._evicted = 1, 0.0, True
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _lost_replicas(self, group: Any) -> LostReplicas:
        started = self.started
        if self._lost is None:

            def again(local: int, variables: dict[str, str]) -> None:
                process = started.start_again(local, variables)
                group.workers[local].id = process.pid

            self._lost = LostReplicas(
                PrefixStore(os.environ[PREFIX], self.rendezvous.store),
                started.subprocess_handlers,
                {worker.local_rank: worker.global_rank for worker in group.workers},
                started.error_files,
                again,
                self._may_go_on,
                group.group_rank,
                self.workers.settings.node_range[1],
                group.group_world_size,
                self._vacancy,
                self.workers.settings.requeue_exit_code,
            )
        return self._lost

    def has_left(self) -> bool:
        """Whether the others go on without the ranks of this node, which were told to stop."""
        with contextlib.suppress(Exception):  # the store may have ended
            return self._lost is not None and self._lost.has_left()
        return False

    def _may_go_on(self, failure: RankFailure) -> bool:
        """Whether all but its replica go on after this failure of a rank."""
        workers, restarts = self.workers, self.workers.restarts
        if failure.error and failure.error.complete:
            return False
        if restarts.after_failure() is None:
            return False
        workers.say(f"rank {failure.rank}: {failure}. Its replica starts again, the others go on")
        return True

    def _may_start_again(self, failures: dict[int, Any]) -> bool:
        workers, restarts = self.workers, self.workers.restarts
        saved = workers.settings.requeue_exit_code
        if any(failure.exitcode == saved for failure in failures.values()):
            self._pause = 0.0
            workers.say(
                "a rank was asked to stop, and all have saved; continuing with the nodes that are "
                "left"
            )
            return restarts.limit > 0
        failure = first_failure(failures)
        if failure.error and failure.error.config_error:
            return False
        pause = restarts.after_failure()
        if pause is None:
            return False
        self._pause = pause
        wait = f" in {pause:.0f} s" if pause else ""
        left = counted(restarts.limit - restarts.in_a_row, "attempt")
        workers.say(f"rank {failure.rank}: {failure}. Restarting{wait}; {left} left")
        return True

    def interrupted(self) -> None:
        if self.workers.save and self.workers.last_step() > 0:
            self.workers.say("saving after the running step; Ctrl-C again ends at once")

    def stop_workers(self, group: Any) -> None:
        # What its ranks have done since is done again elsewhere: they must not save it.
        if self._evicted:
            self._evicted = False
            self.shut_down(signal.SIGKILL, GRACE_AFTER_FAILURE_S)
        elif group.state == WorkerState.HEALTHY:
            self.workers.say(
                "the nodes of this job have changed; saving, and starting again with all that are "
                "there"
            )
            self.shut_down(timeout=self.workers.settings.grace_s)
        else:
            self.shut_down(timeout=GRACE_AFTER_FAILURE_S)

    def restart_workers(self, group: Any) -> None:
        failed = group.state != WorkerState.HEALTHY
        self.stop_workers(group)
        if self._vacancy is not None:
            raise _Restart
        if failed and self._pause:
            time.sleep(self._pause)
        group.state = WorkerState.STOPPED
        self.initialize_workers(group)


def _explain_failure(
    workers: NodeWorkers, rendezvous: Rendezvous, failure: RankFailure
) -> Exception:
    """The end of a job: on one node the error of the rank that failed first, others refer to it."""
    is_alone = workers.settings.node_range == (1, 1)
    if not (is_alone or _claims_the_report(rendezvous, failure.lost_a_peer)):
        return WorkersFailed(
            f"the ranks of {socket.gethostname()} ended because a rank on another node failed; see "
            "the error there"
        )
    error, restarts = failure.error, workers.restarts
    if error and error.config_error:
        return ConfigError(error.text)
    text = error.text if error else str(failure)
    if error is None or not error.complete:
        text = f"rank {failure.rank} failed first:\n{text}"
    if restarts.in_a_row > restarts.limit > 0:
        text += f"\n{restarts.limit} restarts brought no step further"
    if workers.logs:
        text += f"\nlogs of the other ranks: {workers.logs}"
    return WorkersFailed(text)


def _claims_the_report(rendezvous: Rendezvous, lost_a_peer: bool) -> bool:
    """Whether this node is the one to report the error."""
    if lost_a_peer:  # another node may have more to report, and comes first then
        time.sleep(1.5)
    with contextlib.suppress(Exception):  # the store may have ended with its node
        return rendezvous.store.add(f"{_FAILURE}/{rendezvous.name}", 1) == 1
    return True


def _explain_rendezvous(
    workers: NodeWorkers, rendezvous: Rendezvous, error: Exception
) -> Exception:
    kind, settings = type(error).__name__, workers.settings
    if kind == "RendezvousClosedError":
        return WorkersFailed("the job was ended by another node; see the error there")
    if kind == "RendezvousTimeoutError":
        there = rendezvous.hosts_there()
        return WorkersFailed(
            f"after {settings.rendezvous_timeout:.0f} s {len(there)} of "
            f"launch.nnodes={settings.nnodes} nodes were at {rendezvous.endpoint} "
            f"({', '.join(there)}); the launchers of the others say why they cannot reach it"
        )
    return StoreLost(str(error).splitlines()[0])

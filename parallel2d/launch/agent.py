"""One node's launcher: `run_team` starts the node's ranks, watches them, and starts them again with
the nodes that remain.

torch's elastic agent does the work. This module decides whether, when and how a group of workers
starts again, and turns a failure into one exception with the error of the rank that failed first.

[Note: three reasons to start again] A worker failed: the others of this node are ended at once,
since they wait for it in vain; see [Note: a storm of restarts]. The nodes changed, because one
wants to join: workers are asked to end, so they save and nothing is repeated. A worker ended
because a rank somewhere got a signal to end (a node is being taken away): it has saved too, and the
rest go on. There is one reason to end running workers unsaved: the other nodes have gone on without
this one, because it did not answer for too long.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousError

from parallel2d import files
from parallel2d.config import LaunchConfig
from parallel2d.errors import ConfigError
from parallel2d.files import private_folders as folders
from parallel2d.launch.agreement import folder_errors_explained, read_story
from parallel2d.launch.elastic_internals import (
    ElasticAgent,
    StartedProcesses,
    goes_on_without_this_node,
    stop_heartbeats,
)
from parallel2d.launch.endings import StoreLost, WorkersFailed
from parallel2d.launch.rank_processes import LOST, start_rank
from parallel2d.launch.rendezvous import Meeting
from parallel2d.launch.restarts import Restarts
from parallel2d.rank_environment import AGENT, PREFIX
from parallel2d.recovery.place import SHARED_MEMORY, VARIABLE

# that workers have between SIGTERM and SIGKILL once one of their group has failed
_SECONDS_FOR_LAST_WORDS = 5
_STORY = "parallel2d/story"
_CAME = "parallel2d/came"  # host names of the nodes that have come, with blanks between them


@dataclass(frozen=True)
class Team:
    """The ranks of this node."""

    words: tuple[str, ...]  # of each, on its command line
    size: int
    settings: LaunchConfig
    restarts: Restarts
    folder: str  # exists as long as this launcher
    # where ranks beside the first write what they print; None: to the console
    logs: str | None = None
    main: str = "parallel2d.train:main"  # what each calls with the words
    say: Callable[[str], None] = field(
        default=lambda text: print(
            f"parallel2d: {files.for_terminal(text)}", file=sys.stderr, flush=True
        )
    )


def last_step(folder: str) -> int:
    """The last step that workers of this launcher have begun; -1 before the first."""
    try:
        with open(os.path.join(folder, "step")) as file:
            return int(file.read())
    except (OSError, ValueError):
        return -1


@contextlib.contextmanager
def launcher_environment(environment: dict[str, str]) -> Iterator[str]:
    """This launcher's folders, one for records and one in shared memory for copies of the state,
    announced to its workers along with ``environment``. Both are removed afterwards. Yields the
    first. Raises `ConfigError` where somebody else holds one of their names."""
    places = {AGENT: folders.temporary_place()}
    if os.path.isdir(SHARED_MEMORY) and VARIABLE not in os.environ:
        places[VARIABLE] = SHARED_MEMORY
    with folder_errors_explained():
        paths = {
            variable: folders.open_folder(os.getpid(), place) for variable, place in places.items()
        }
    before = dict(os.environ)
    # torch 2.13 reuses the agent's store across restarts, so that workers would read the addresses
    # of dead peers
    os.environ.update(environment, **paths, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        yield paths[AGENT]
    finally:
        os.environ.clear()
        os.environ.update(before)
        for path in paths.values():
            folders.remove(path)


def run_team(team: Team, meeting: Meeting) -> None:
    """Runs this node's ranks until the job ends. See [Note: three reasons to start again].

    Raises `ConfigError` or `WorkersFailed` with the error of the rank that failed first,
    `StoreLost`, and torch's SignalException when this process got a signal to end and has ended its
    workers.
    """
    os.environ.update(
        meeting.environment, TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    )
    handler = meeting.handler(team.settings)
    meeting.store.append(f"{_CAME}/{meeting.name}", f"{socket.gethostname()} ")
    spec = WorkerSpec(
        role="worker",
        local_world_size=team.size,
        entrypoint=team.main,
        args=team.words,
        rdzv_handler=handler,
        max_restarts=team.restarts.limit,
        monitor_interval=0.1,
        local_addr=meeting.interface.address,
    )
    redirects = dict.fromkeys(range(1, team.size), Std.ALL) if team.logs else Std.NONE
    agent = _Agent(
        team,
        meeting,
        spec,
        DefaultLogsSpecs(
            log_dir=team.logs or os.path.join(team.folder, "logs"), redirects=redirects
        ),
    )
    over = True
    try:
        result = agent.run()
        if result is not None and result.is_failed():
            raise _told(meeting, result.failures, team)
    except SignalException:
        over = False  # closing would keep a node that is only being replaced from coming back
        raise
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        over = False
        raise _explained(error, meeting, team) from None
    finally:
        # Otherwise the heartbeats' thread may hold the last reference to the handler, and a thread
        # cannot wait for its own end.
        stop_heartbeats(handler)
        if over:
            with contextlib.suppress(Exception):  # the store may have ended with another node
                meeting.end()
                handler.shutdown()


class _Agent(ElasticAgent):
    """torch's agent with our reasons to start again; it calls the methods below from its loop."""

    def __init__(
        self, team: Team, meeting: Meeting, spec: WorkerSpec, logs: DefaultLogsSpecs
    ) -> None:
        super().__init__(
            spec, logs, exit_barrier_timeout=60, shutdown_timeout=team.settings.grace_s
        )
        self._meeting, self._team, self._pause, self._evicted = meeting, team, 0.0, False

    def start_workers(self, group: Any) -> Any:
        os.environ[PREFIX] = self._meeting.ranks_prefix(group)
        context: Any = StartedProcesses(
            functools.partial(start_rank, group.spec.entrypoint, group.spec.args),
            self._environments(group),
            self.logs_specs,
        )
        self.process_context = context
        context.start()
        # torch calls it without a timeout once a worker has failed. A worker that is stopped or
        # stuck then does not react to SIGTERM.
        context.close = functools.partial(_close_soon, context.close)
        return context.pids()

    def _environments(self, group: Any) -> dict[int, dict[str, str]]:
        """By local rank: the variables that torchrun gives a worker."""
        spec = group.spec
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
        return {
            worker.local_rank: {
                name: str(value)
                for name, value in {
                    **os.environ,
                    **of_all,
                    "RANK": worker.global_rank,
                    "LOCAL_RANK": worker.local_rank,
                    "WORLD_SIZE": worker.world_size,
                }.items()
            }
            for worker in group.workers
        }

    def monitor_workers(self, group: Any) -> RunResult:
        result = super().monitor_workers(group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self.remaining_restarts = 1 if self._may_start_again(result.failures) else 0
        # torch's agent does not check this; see also [Note: two halves of a job].
        elif result.state == WorkerState.HEALTHY and goes_on_without_this_node(
            group.spec.rdzv_handler
        ):
            self._team.say(
                "the other nodes took this one for lost and went on; ending its ranks and joining "
                "again"
            )
            self.remaining_restarts, self._pause, self._evicted = 1, 0.0, True
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _may_start_again(self, failures: dict[int, Any]) -> bool:
        team = self._team
        if any(
            failure.exitcode == team.settings.requeue_exit_code for failure in failures.values()
        ):
            self._pause = 0.0
            team.say(
                "a rank was told to end, and all have saved; going on with the nodes that are left"
            )
            return team.restarts.limit > 0
        rank, failure, story = first_failure(failures)
        if story and story["config_error"]:
            return False
        pause = team.restarts.after_failure()
        if pause is None:
            return False
        self._pause = pause
        what = one_line(failure, story)
        wait = f" in {pause:.0f} s" if pause else ""
        left = team.restarts.limit - team.restarts.in_a_row
        team.say(f"rank {rank}: {what}; starting again{wait} ({left} more without progress)")
        return True

    def stop_workers(self, group: Any) -> None:
        asked_to_save = group.state == WorkerState.HEALTHY
        if asked_to_save:
            self._team.say(
                "the nodes of this job have changed; saving, and starting again with all that are "
                "there"
            )
        # what its ranks have done since is done again elsewhere: they must not save it
        if self._evicted:
            self._evicted = False
            self.shut_down(signal.SIGKILL, _SECONDS_FOR_LAST_WORDS)
            return
        self.shut_down(
            timeout=self._team.settings.grace_s if asked_to_save else _SECONDS_FOR_LAST_WORDS
        )

    def restart_workers(self, group: Any) -> None:
        failed = group.state != WorkerState.HEALTHY
        self.stop_workers(group)
        if failed and self._pause:
            time.sleep(self._pause)
        group.state = WorkerState.STOPPED
        self.initialize_workers(group)


def _close_soon(
    close: Callable[..., None],
    death_sig: signal.Signals | None = None,
    timeout: int = _SECONDS_FOR_LAST_WORDS,
) -> None:
    close(death_sig, timeout)


def first_failure(failures: dict[int, Any]) -> tuple[int, Any, dict[str, Any] | None]:
    """The rank that failed first, torch's record of it and its own error report, if it left one."""
    ordered = sorted(failures.items(), key=lambda item: item[1].timestamp)
    stories = [(rank, failure, read_story(failure.error_file)) for rank, failure in ordered]
    told = sorted(((r, f, s) for r, f, s in stories if s), key=lambda item: item[2]["time"])
    killed = [(r, f, s) for r, f, s in stories if s is None and f.exitcode < 0]
    if killed and all(lost_a_peer(s) for _, _, s in told):
        return killed[0]
    return told[0] if told else stories[0]


def lost_a_peer(story: dict[str, Any]) -> bool:
    """Whether a rank failed only because another one had ended: its connection broke."""
    words = (
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "Connection refused",
        "connection was closed",
    )
    return any(word in story["text"] for word in words)


def one_line(failure: Any, story: dict[str, Any] | None) -> str:
    """What happened to a rank, in one line."""
    if story:
        return (
            "lost the connection to another rank"
            if lost_a_peer(story)
            else story["text"].strip().splitlines()[-1]
        )
    if failure.exitcode == -signal.SIGKILL:
        return "ended by SIGKILL, by somebody or by the kernel for want of memory"
    if failure.exitcode < 0:
        return f"ended by {signal.Signals(-failure.exitcode).name}"
    if failure.exitcode == LOST:
        return f"exited with code {LOST}, as ranks do when the process that forks them is ended"
    return f"exited with code {failure.exitcode}"


def _told(meeting: Meeting, failures: dict[int, Any], team: Team) -> Exception:
    """The exception for these failures. One node's has the error of the rank that failed first;
    that of the others refers to it."""
    rank, failure, story = first_failure(failures)
    config_error = bool(story and story["config_error"])
    bystander = bool(story and lost_a_peer(story))
    alone = team.settings.node_range == (1, 1)
    first = alone or _is_first_to_tell(meeting, bystander)
    if not first:
        return WorkersFailed(
            f"the ranks of {socket.gethostname()} ended, because one on another node did; it tells "
            "why"
        )
    if config_error and story:
        return ConfigError(story["text"])
    cause = story["text"] if story else one_line(failure, story)
    tried = (
        f"\n{team.restarts.limit} restarts brought no step further"
        if team.restarts.in_a_row > team.restarts.limit > 0
        else ""
    )
    others = f"\nlogs of the other ranks: {team.logs}" if team.logs else ""
    first_line = "" if story and story["complete"] else f"rank {rank} failed first:\n"
    return WorkersFailed(f"{first_line}{cause}{tried}{others}")


def _is_first_to_tell(meeting: Meeting, bystander: bool) -> bool:
    """Whether this node is the one to report the error. A node whose ranks only lost a peer waits a
    moment before it claims the report."""
    try:
        if bystander:
            time.sleep(1.5)
        return meeting.store.add(f"{_STORY}/{meeting.name}", 1) == 1
    except Exception:  # the store ended with its node
        return True


def _explained(error: Exception, meeting: Meeting, team: Team) -> Exception:
    kind = type(error).__name__
    if kind == "RendezvousClosedError":
        return WorkersFailed("the job was ended by another node, which tells why")
    if kind == "RendezvousTimeoutError":
        # torch's own list is empty by now: a node that gives up takes itself from it first.
        there: list[str] = []
        with contextlib.suppress(Exception):  # the node that holds the store may have ended
            there = sorted(set(meeting.store.get(f"{_CAME}/{meeting.name}").decode().split()))
        return WorkersFailed(
            f"after {team.settings.rendezvous_timeout:.0f} s {len(there)} of "
            f"launch.nnodes={team.settings.nnodes} nodes were at {meeting.endpoint} "
            f"({', '.join(there)}); the launchers of the others say why they cannot reach it"
        )
    return StoreLost(str(error).splitlines()[0])

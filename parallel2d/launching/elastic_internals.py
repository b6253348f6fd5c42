"""All that this package reaches of torch elastic and is not public there, tested with torch 2.13.

torch's agent may be extended by methods with an underscore alone, its rendezvous does not show who
takes part, and its state travels as a pickle of private classes. `REACHED` lists every such name; a
test compares it with this file, with torch, and with the rest of the package.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _NodeDesc,
    _RendezvousState,
)

# torch's loop calls the first four, and they decide how workers are started, how a failure is
# judged, and how long workers have to save. The fifth waits for the other nodes again at a restart;
# the last ends workers within a time of ours, where the public loop has one time for all cases.
_OF_AGENT = (
    *("_start_workers", "_monitor_workers", "_stop_workers", "_restart_workers"),
    *("_initialize_workers", "_shutdown", "_assign_worker_ranks", "_exit_barrier"),
)
# What is reached on each. None of it has a public counterpart in torch 2.13.
REACHED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (LocalElasticAgent, _OF_AGENT),
    # Workers are forked ranks: torch starts functions or commands only.
    (SubprocessContext, ("_start",)),
    # A launcher that has ended its job must not look alive to the others.
    (DynamicRendezvousHandler, ("_stop_heartbeats",)),
    # The state is stored as JSON and not as torch's pickle, so it is taken apart.
    (dynamic_rendezvous, ("_NodeDesc", "_RendezvousState")),
)
# What is reached on objects, once they have been made.
KEPT: dict[type, tuple[str, ...]] = {
    LocalElasticAgent: (
        "_pcontext",  # the processes that torch's loop watches
        "_remaining_restarts",  # whether the loop starts workers that failed again
    ),
    # Whether the others have gone on without this node.
    DynamicRendezvousHandler: ("_state_holder", "_this_node"),
}

# Between SIGTERM and SIGKILL for workers of a group of which one has failed.
GRACE_AFTER_FAILURE_S = 5

NodeDescription = _NodeDesc
RendezvousState = _RendezvousState


class ElasticAgent(LocalElasticAgent):
    """torch's agent with public names for what its loop calls, in a subclass, and what it keeps."""

    new_processes: Callable[[WorkerGroup], StartedProcesses]
    stop_workers: Callable[[WorkerGroup], None]
    restart_workers: Callable[[WorkerGroup], None]
    interrupted: Callable[[], None]
    # Of a node that comes back, and of the job; the nodes agree on those of others.
    given_ranks: Sequence[int] = ()
    given_size: int = 0
    waits_for_others: bool = True  # at the end

    def monitor_workers(self, group: WorkerGroup) -> RunResult:
        """Looks how the ranks of this node are now."""
        return super()._monitor_workers(group)

    def initialize_workers(self, group: WorkerGroup) -> None:
        """Waits for the other nodes and starts the ranks."""
        self._initialize_workers(group)

    def shut_down(self, death_signal: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Signals all ranks, and kills those that are there after ``timeout`` seconds."""
        self._shutdown(death_signal, timeout)

    @property
    def remaining_restarts(self) -> int:
        """torch's loop starts workers that failed again while it is above 0."""
        return self._remaining_restarts

    @remaining_restarts.setter
    def remaining_restarts(self, number: int) -> None:
        self._remaining_restarts = number

    @property
    def started(self) -> StartedProcesses:
        """The processes of the ranks."""
        found: Any = self._pcontext
        return found

    def exit_codes(self) -> list[int | None]:
        """Of the ranks of this node, as they are now; None for one that runs."""
        started: Any = getattr(self._pcontext, "subprocess_handlers", {})
        return [process.poll() for process in started.values()]

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if death_sig == signal.SIGINT:
            self.interrupted()
        try:
            super()._shutdown(death_sig, timeout)
        except SignalException as another:
            # Ctrl-C while the ranks save.
            if another.sigval == signal.SIGINT:
                super()._shutdown(signal.SIGKILL, GRACE_AFTER_FAILURE_S)
            raise

    def _assign_worker_ranks(self, store: Any, node: int, nodes: int, spec: WorkerSpec) -> Any:
        if not self.given_ranks:
            return super()._assign_worker_ranks(store, node, nodes, spec)
        size = self.given_size
        return [
            Worker(local, rank, rank, size, size) for local, rank in enumerate(self.given_ranks)
        ]

    def _exit_barrier(self) -> None:
        if self.waits_for_others:
            super()._exit_barrier()

    def _start_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
        self._pcontext = self.new_processes(worker_group)
        self._pcontext.start()
        return self._pcontext.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self.stop_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restart_workers(worker_group)


class StartedProcesses(SubprocessContext):
    """torch's set of worker processes, each started by ``start_one(environment, stdout, stderr)``,
    which returns a process with what torch reads of its own handlers (`RankProcess`).
    ``environments``: variables of each local rank."""

    def __init__(
        self,
        start_one: Callable[[Mapping[str, str], str | None, str | None], Any],
        environments: dict[int, dict[str, str]],
        logs: Any,
    ) -> None:
        nothing: dict[int, tuple[Any, ...]] = dict.fromkeys(environments, ())
        super().__init__("worker", "parallel2d", nothing, environments, logs)
        self.start_one = start_one

    def _start(self) -> None:
        self.subprocess_handlers: dict[int, Any] = {}
        for rank in range(self.nprocs):
            self.start_again(rank, {})

    def start_again(self, rank: int, variables: Mapping[str, str]) -> Any:
        """Starts the process of a local rank anew, with more ``variables``; returns it."""
        self.envs[rank] |= variables
        self.subprocess_handlers[rank] = self.start_one(
            self.envs[rank], self.stdouts[rank], self.stderrs[rank]
        )
        return self.subprocess_handlers[rank]

    def close(
        self, death_sig: signal.Signals | None = None, timeout: int = GRACE_AFTER_FAILURE_S
    ) -> None:
        # torch calls it without a timeout once a worker has failed. A worker that is stopped or
        # stuck then does not react to SIGTERM.
        super().close(death_sig, timeout)


def stop_heartbeats(handler: RendezvousHandler) -> None:
    """Ends the thread that writes into the rendezvous that this node is alive."""
    if isinstance(handler, DynamicRendezvousHandler):
        handler._stop_heartbeats()


def goes_on_without_this_node(handler: RendezvousHandler) -> bool:
    """Whether the other nodes have closed a round in which this one does not take part."""
    if not isinstance(handler, DynamicRendezvousHandler):
        return False
    state = handler._state_holder.state
    return bool(state.complete and handler._this_node not in state.participants)

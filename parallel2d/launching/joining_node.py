"""A launcher that starts while the other nodes of its job train: `JoiningNode`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import PrefixStore

from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas.events import LATEST, ON, Events
from parallel2d.launching.rendezvous_round import Launcher, Round, State
from parallel2d.launching.shared_job import PUBLISHED
from parallel2d.training.run_directory.ownership import has_owner


class JoiningNode:
    """Finds a place for this launcher in a job that trains without it.

    Args:
        current: the round of the other launchers.
        store: the rendezvous store.
        log: function that logs a line.
    """

    def __init__(self, current: Round, store: Any, log: Callable[[str], None]) -> None:
        self._round, self._store, self._log = current, store, log
        self._has_logged = False

    def wanted(self) -> State:
        """Return the next state of the round, one of:

        * the current state, to wait;
        * the state with this launcher in the place of a failed or missing launcher; the other
          launchers' ranks continue;
        * the next round, in which all ranks restart together with this launcher.

        Raises `ConfigError` if this node does not fit into the job: its number of ranks is wrong,
        or it does not see the run directory.
        """
        state = self._round.state
        if not all(self._round.is_known(each.name) for each in state.members):
            return state
        lost = []
        for each in state.members:
            if self._round.has_timed_out(each.name):
                lost.append(each)
        if len(lost) == len(state.members):
            return self._round.next(after_failure=True)
        store = PrefixStore(state.prefix, self._store)
        job, has_begun = _published(store), store.check([ON, LATEST])
        place = self._free_place(job, lost, store) if has_begun else None
        if place is not None:
            return self._round.with_place(place)
        has_room = bool(lost) or len(state.members) < self._round.largest
        if has_room and _needs_restart(job, has_begun, bool(lost)):
            return self._round.next(after_failure=bool(lost))
        if not self._has_logged:
            self._log("waiting until the job has started, or has a place for this node")
            self._has_logged = True
        return state

    def _free_place(self, job: dict[str, Any], lost: Sequence[Launcher], store: Any) -> int | None:
        events = Events(store)
        events.read_all()
        if events.restarts:
            return None  # the other launchers open a new round for the restart
        own, members, nodes = self._round.own, self._round.state.members, self._round.largest
        may_lack_nodes = bool(job.get("sizes"))
        if may_lack_nodes:
            _check_fit(job, own.size, nodes)
        for each in lost:
            if each.size == own.size:
                return members.index(each)
        return len(members) if may_lack_nodes and len(members) < nodes else None


def _published(store: Any) -> dict[str, Any]:
    found = json.loads(store.get(PUBLISHED)) if store.check([PUBLISHED]) else None
    return found or {}


def _needs_restart(job: dict[str, Any], has_begun: bool, has_lost: bool) -> bool:
    """True if all ranks must restart to include a node that has no place in the running job. A job
    that trains with missing nodes needs a restart only if a node has failed before the first
    quorum."""
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

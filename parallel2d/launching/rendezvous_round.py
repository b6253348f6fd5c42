"""The rendezvous of the launchers of a job, through its store: `Round`.

[Note: rounds] All nodes start their ranks together, in a round. One key of the store has the state
of the latest round; launchers change this state only by compare-and-set. A round is open until the
largest number of nodes has joined, or until the smallest number has joined and a waiting time for
further nodes is over. The first launcher that finds this condition true closes the round. A
launcher whose ranks must restart opens the next round. The other launchers see the new round, end
their ranks and join it. The new round stays open until each of these launchers has joined or has
timed out.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch.distributed import DistNetworkError, DistStoreError

from parallel2d.base.config import LaunchConfig
from parallel2d.launching.failures import WorkersFailed
from parallel2d.launching.heartbeat import Heartbeats
from parallel2d.launching.rendezvous import Rendezvous

# Seconds to wait for further nodes after the smallest number of nodes has joined: in the first
# round, and in later rounds
FIRST_CALL_S, LAST_CALL_S = 20.0, 3.0
_END_S = 60.0  # the longest time that a node with finished ranks waits for the other nodes


class JobDone(Exception):  # noqa: N818 (named after the event)
    """The job has succeeded on other nodes."""


class Launcher(NamedTuple):
    """A launcher in a round. The launchers are sorted by these fields, which gives the node
    numbers."""

    address: str
    name: str
    start: int  # number of rounds that the launcher has joined
    port: int  # a port that was free when the launcher joined
    size: int  # number of ranks of the launcher


_KINDS = [str, str, int, int, int]


class State(NamedTuple):
    """The state of a round."""

    prefix: str = ""  # prefix of the store keys of the ranks; empty while the round is open
    members: tuple[Launcher, ...] = ()
    before: tuple[str, ...] = ()  # names of the launchers of the previous round
    old_prefix: str = ""  # prefix of the previous round
    after_failure: bool = False  # a failed rank or node has ended the previous round

    @classmethod
    def from_text(cls, text: bytes) -> State:
        """Parse a state; an empty text is an empty, open round. Raises `WorkersFailed` for other
        text."""
        try:
            prefix, members, before, old_prefix, failed = json.loads(text) if text else cls()
            launchers = tuple(Launcher(*each) for each in members)
            state = cls(prefix, launchers, (*before,), old_prefix, failed)
            is_right = {str} == set(map(type, (prefix, old_prefix, *before))) and failed in (0, 1)
            if not is_right or any(list(map(type, each)) != _KINDS for each in launchers):
                raise TypeError("a value of another kind")
        except (ValueError, TypeError, RecursionError) as error:
            raise WorkersFailed(f"the state of the rendezvous is damaged: {error}") from None
        return state


class Round:
    """The latest round of a job, as this launcher knows it; see [Note: rounds]. Inside the ``with``
    block a thread sends heartbeats. The methods raise the errors of `StoreClient`.

    Args:
        rendezvous: the store, and the name of the job in its keys.
        size: number of ranks of this launcher.
        settings: the launch section.

    Attributes:
        own: the entry of this launcher.
        state: the state at the last poll.
    """

    def __init__(self, rendezvous: Rendezvous, size: int, settings: LaunchConfig) -> None:
        self._rendezvous, self._store, self._settings = rendezvous, rendezvous.store, settings
        self._smallest, self.largest = settings.node_range
        self.heartbeat_interval_s = settings.heartbeat_interval_s
        self.heartbeat_timeout_s = settings.heartbeat_timeout_s
        self._key = f"parallel2d/round/{rendezvous.name}"
        name = f"{socket.gethostname()}/{uuid.uuid4().hex}"
        self.own = Launcher(rendezvous.interface.address, name, 0, 0, size)
        self._heartbeats = Heartbeats(
            rendezvous.store,
            f"parallel2d/beat/{rendezvous.name}/",
            name,
            settings.heartbeat_interval_s,
            settings.heartbeat_timeout_s,
        )
        self._text, self.state = b"", State()
        self._poll_at = 0.0
        self._enough_at: float | None = None
        self._call_s = 0.0

    def __enter__(self) -> Round:
        self._heartbeats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeats.stop()

    # Live launchers

    def poll(self) -> None:
        """Read the state and the heartbeats of the other launchers, at most once per interval."""
        now = time.monotonic()
        if now < self._poll_at:
            return
        self._poll_at = now + self.heartbeat_interval_s
        self._take(self._store.compare_set(self._key, "", ""))
        names = _names(self.state.members).union(self.state.before)
        self._heartbeats.poll(sorted(names - {self.own.name}))

    def _take(self, text: bytes) -> None:
        if self._text and not text:
            raise DistStoreError("the store has lost the state of the rendezvous")
        self._text, self.state = text, State.from_text(text)

    def has_timed_out(self, name: str) -> bool:
        """True if the launcher ``name`` has sent no heartbeat for the timeout."""
        return self._heartbeats.has_timed_out(name)

    def is_known(self, name: str) -> bool:
        """True if a poll has shown that the launcher ``name`` is alive, or that it has timed
        out."""
        return self._heartbeats.is_known(name)

    def ranks_of(self, launcher: Launcher) -> list[int]:
        """Return the ranks of a member."""
        members = self.state.members
        first = sum(each.size for each in members[: members.index(launcher)])
        return list(range(first, first + launcher.size))

    @property
    def is_open(self) -> bool:
        return not self.state.prefix

    @property
    def takes_part(self) -> bool:
        return self.own in self.state.members

    # Joining and leaving

    def join(self, call_s: float, late: Callable[[], State], after_failure: bool) -> None:
        """Wait until this launcher is in a closed round.

        Args:
            call_s: seconds to wait for further nodes after the smallest number has joined.
            late: function that returns the wanted state while the ranks of other launchers run: the
                current state, to wait; the state with this launcher as a member; or the result of
                `next`.
            after_failure: True if the ranks of this launcher have ended because of a failure.

        Raises `JobDone` if the job has succeeded on other nodes, and `WorkersFailed` if the job has
        failed or too few nodes have joined.
        """
        self.own = self.own._replace(start=self.own.start + 1, port=_free_port(self.own.address))
        begin, hosts = time.monotonic(), set[str]()
        self._enough_at, self._call_s = None, call_s
        while True:
            self.poll()
            if self.takes_part and not self.is_open:
                return
            end = self._rendezvous.end_of_job
            if end == "well":
                raise JobDone
            if end is not None:
                raise WorkersFailed("the job was ended by another node; see the error there")
            wanted = self._wanted(late, after_failure)
            if wanted != self.state:
                if not self._replace(wanted):  # another launcher has changed the state
                    time.sleep(random.random() * self.heartbeat_interval_s)
                continue
            now = time.monotonic()
            if not self.is_open:
                self._enough_at, begin = None, now
            hosts.update(each.name.partition("/")[0] for each in self.state.members)
            if self._enough_at is None and now > begin + self._settings.rendezvous_timeout:
                self._give_up(hosts)
            time.sleep(max(0.0, self._poll_at - now))

    def next(self, *, after_failure: bool) -> State:
        """Return the state of the next round, with this launcher as its first member."""
        names = tuple(each.name for each in self.state.members)
        return State("", (self.own,), names, self.state.prefix, after_failure)

    def with_place(self, place: int) -> State:
        """Return the state with this launcher as member number ``place``. This launcher replaces
        the previous member with this number; the first unused number adds a member."""
        members = list(self.state.members)
        members[place : place + 1] = [self.own]
        return self.state._replace(members=tuple(members))

    def _wanted(self, late: Callable[[], State], after_failure: bool) -> State:
        """Return the state that this launcher wants to write next."""
        state, others = self.state, self._others()
        if not self.is_open:
            has_taken_part = len(others) < len(state.members)
            return self.next(after_failure=after_failure) if has_taken_part else late()
        live = [each for each in others if not self.has_timed_out(each.name)] + [self.own]
        prefix = ""
        if self._is_complete(_names(live)):
            prefix = f"{self._rendezvous.ranks_prefix}{uuid.uuid4().hex}/"
        return state._replace(prefix=prefix, members=tuple(sorted(live)))

    def _is_complete(self, names: set[str]) -> bool:
        """True if the launchers ``names`` start without waiting for further launchers."""
        now = time.monotonic()
        if len(names) < self._smallest:
            self._enough_at = None
            return False
        self._enough_at = self._enough_at or now
        # A launcher that ended while the round was open counts as a member until it times out.
        if not all(map(self.is_known, names - {self.own.name})):
            return False
        is_over = now > self._enough_at + self._call_s
        missing = set(self.state.before) - names
        return len(names) == self.largest or (is_over and all(map(self.has_timed_out, missing)))

    def _replace(self, wanted: State) -> bool:
        """Write the state ``wanted``. False if another launcher has changed the state since the
        last poll."""
        was_open, text = self.is_open, json.dumps(wanted)
        self._take(self._store.compare_set(self._key, self._text, text))
        is_ours = self._text == text.encode()
        if is_ours and was_open and wanted.prefix and wanted.old_prefix:
            self._store.delete_all(wanted.old_prefix)
        return is_ours

    def _others(self) -> list[Launcher]:
        """Return the members without this launcher."""
        return [each for each in self.state.members if each.name != self.own.name]

    def _give_up(self, hosts: set[str]) -> None:
        self._replace(self.state._replace(members=tuple(self._others())))
        settings = self._settings
        raise WorkersFailed(
            f"after {settings.rendezvous_timeout:.0f} s {len(hosts)} of "
            f"launch.nnodes={settings.nnodes} nodes were at {self._rendezvous.endpoint} "
            f"({', '.join(sorted(hosts))}); the logs of the other launchers have the reason"
        )

    def await_others(self) -> None:
        """Wait, at most `_END_S` seconds, until the ranks of all live members have succeeded. This
        node may serve the store, which the other nodes still need."""
        key, deadline = f"{self.state.prefix}ended", time.monotonic() + _END_S
        # the store ended with another node
        with contextlib.suppress(DistNetworkError, DistStoreError):
            self._store.add(key, 1)
            while time.monotonic() < deadline and self.takes_part:
                live = [each for each in self.state.members if not self.has_timed_out(each.name)]
                if self._rendezvous.end_of_job or self._store.add(key, 0) >= len(live):
                    return
                time.sleep(self.heartbeat_interval_s / 5)
                self.poll()


def _names(launchers: Iterable[Launcher]) -> set[str]:
    return {each.name for each in launchers}


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind((address, 0))
        port: int = tried.getsockname()[1]
    return port

"""Which launchers run a job together, agreed on through its store: `Round`.

[Note: rounds] All nodes start their ranks together, in a round. One key of the store holds the
state of the latest, and is changed by compare-and-set alone. A round is open until the largest
number of nodes has come, or the smallest and nobody else in a last call; whoever sees that closes
it. A launcher whose ranks must start again opens the next round. The others see it, end their ranks
and come too; they are waited for while they are alive. Each launcher counts on a key of its own,
its beat; one whose beat others find unchanged in six looks, each half a second after the one
before, is lost. So no clocks are compared, and who was held up itself accuses nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import DistNetworkError, DistStoreError

from parallel2d.base.config import LaunchConfig
from parallel2d.launching.failures import WorkersFailed
from parallel2d.launching.rendezvous import Rendezvous

# In which other nodes may still come, once the smallest number is there
FIRST_CALL_S, LAST_CALL_S = 20.0, 3.0
_END_S = 60.0  # that the first node to end waits for the others


class JobDone(Exception):  # noqa: N818 (named after what happened)
    """The job has ended well on other nodes."""


class Launcher(NamedTuple):
    """One that takes part. Nodes are numbered in the order of these fields."""

    address: str
    name: str
    start: int  # how often it has joined
    port: int  # was free then
    size: int  # how many ranks it starts


_KINDS = [str, str, int, int, int]


class State(NamedTuple):
    """Of a round."""

    prefix: str = ""  # what its ranks' keys begin with; empty while it is open
    members: tuple[Launcher, ...] = ()
    before: tuple[str, ...] = ()  # names of the launchers of the round before it
    old_prefix: str = ""  # of that round
    after_failure: bool = False  # that round ended because ranks had failed or a node was lost

    @classmethod
    def from_text(cls, text: bytes) -> State:
        """Raises `WorkersFailed` for what json.dumps does not make of one."""
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
    """The latest round of a job, as this launcher knows it. Inside of ``with`` it says that it is
    there. ``own``: its entry; ``state``: at the last look. Raises the errors of `StoreClient`. See
    [Note: rounds]."""

    def __init__(self, rendezvous: Rendezvous, size: int, settings: LaunchConfig) -> None:
        self._rendezvous, self._store, self._settings = rendezvous, rendezvous.store, settings
        self._smallest, self.largest = settings.node_range
        self.heartbeat_interval_s = settings.heartbeat_interval_s
        self.heartbeat_timeout_s = settings.heartbeat_timeout_s
        self._missed = math.ceil(self.heartbeat_timeout_s / self.heartbeat_interval_s)
        self._key = f"parallel2d/round/{rendezvous.name}"
        self._beats = f"parallel2d/beat/{rendezvous.name}/"
        name = f"{socket.gethostname()}/{uuid.uuid4().hex}"
        self.own = Launcher(rendezvous.interface.address, name, 0, 0, size)
        self._text, self.state = b"", State()
        self._look_at = 0.0
        # By name: the last beat, in how many looks it was the same, and whether it is known to have
        # been alive: its beat has changed, or it has come since the first look
        self._heard: dict[str, tuple[bytes, int, bool]] = {}
        self._has_looked = False
        self._enough_at: float | None = None
        self._call_s = 0.0
        self._is_over = threading.Event()

    def __enter__(self) -> Round:
        self._store.set(self._beats + self.own.name, "0")
        threading.Thread(target=self._beat, name="beats", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _beat(self) -> None:
        for count in itertools.count(1):
            if self._is_over.wait(self.heartbeat_interval_s):
                return
            # The launcher itself sees that the store is lost.
            with contextlib.suppress(DistNetworkError, DistStoreError):
                self._store.set(self._beats + self.own.name, str(count))

    # Who is there

    def look(self) -> None:
        """Reads the state and hears the other launchers, unless it has done so just now."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + self.heartbeat_interval_s
        self._take(self._store.compare_set(self._key, "", ""))
        names = {each.name for each in self.state.members}.union(self.state.before)
        others = sorted(names - {self.own.name})
        keys = [self._beats + name for name in others]
        # Each has sent one before it came.
        for name, beat in zip(others, self._store.multi_get(keys) if keys else (), strict=True):
            last, looks, was_alive = self._heard.get(name, (beat, -1, self._has_looked))
            if beat == last:
                self._heard[name] = beat, looks + 1, was_alive
            else:
                self._heard[name] = beat, 0, True
        self._has_looked = True

    def _take(self, text: bytes) -> None:
        if self._text and not text:
            raise DistStoreError("the store has lost the state of the rendezvous")
        self._text, self.state = text, State.from_text(text)

    def is_silent(self, name: str) -> bool:
        """Whether the launcher of this name is lost."""
        return self._heard.get(name, (b"", 0, False))[1] >= self._missed

    def is_heard(self, name: str) -> bool:
        """Whether it is known of the launcher of this name if it is there or lost."""
        return self.is_silent(name) or self._heard.get(name, (b"", 0, False))[2]

    def ranks_of(self, launcher: Launcher) -> list[int]:
        """The ranks of a member."""
        members = self.state.members
        first = sum(each.size for each in members[: members.index(launcher)])
        return list(range(first, first + launcher.size))

    @property
    def is_open(self) -> bool:
        return not self.state.prefix

    @property
    def takes_part(self) -> bool:
        return self.own in self.state.members

    # Coming and going

    def join(self, call_s: float, late: Callable[[], State], after_failure: bool) -> None:
        """Waits until this launcher takes part in a round that is closed, for those that may still
        come ``call_s`` seconds longer. ``late``: what one wants that comes while a round goes on
        without it: the state as it is, to wait; with itself in a place; or `next`.
        ``after_failure``: its ranks ended for that. Raises `JobDone`, and `WorkersFailed` for a job
        that failed or when too few nodes come."""
        self.own = self.own._replace(start=self.own.start + 1, port=_free_port(self.own.address))
        begin, came = time.monotonic(), set[str]()
        self._enough_at, self._call_s = None, call_s
        while True:
            self.look()
            if self.takes_part and not self.is_open:
                return
            end = self._rendezvous.end_of_job
            if end == "well":
                raise JobDone
            if end is not None:
                raise WorkersFailed("the job was ended by another node; see the error there")
            wanted = self._wanted(late, after_failure)
            if wanted != self.state:
                if not self._replace(wanted):  # others want to change it too
                    time.sleep(random.random() * self.heartbeat_interval_s)
                continue
            now = time.monotonic()
            if not self.is_open:
                self._enough_at, begin = None, now
            came.update(each.name.partition("/")[0] for each in self.state.members)
            if self._enough_at is None and now > begin + self._settings.rendezvous_timeout:
                self._give_up(came)
            time.sleep(max(0.0, self._look_at - now))

    def next(self, *, after_failure: bool) -> State:
        """The one after this, with this launcher."""
        names = tuple(each.name for each in self.state.members)
        return State("", (self.own,), names, self.state.prefix, after_failure)

    def with_place(self, place: int) -> State:
        """This one, with this launcher in the place of a member, or after the last."""
        members = list(self.state.members)
        members[place : place + 1] = [self.own]
        return self.state._replace(members=tuple(members))

    def _wanted(self, late: Callable[[], State], after_failure: bool) -> State:
        """What the state is to be next, as it seems from here."""
        state = self.state
        others = [each for each in state.members if each.name != self.own.name]
        if not self.is_open:
            has_taken_part = len(others) < len(state.members)
            return self.next(after_failure=after_failure) if has_taken_part else late()
        here = [each for each in others if not self.is_silent(each.name)] + [self.own]
        prefix = ""
        if self._is_complete({each.name for each in here}):
            prefix = f"{self._rendezvous.ranks_prefix}{uuid.uuid4().hex}/"
        return state._replace(prefix=prefix, members=tuple(sorted(here)))

    def _is_complete(self, names: set[str]) -> bool:
        """Whether the launchers of these names are to start, without others that may still come."""
        now = time.monotonic()
        if len(names) < self._smallest:
            self._enough_at = None
            return False
        self._enough_at = self._enough_at or now
        # Who has ended while it waited counts until it is silent.
        if not all(map(self.is_heard, names - {self.own.name})):
            return False
        is_over = now > self._enough_at + self._call_s
        missing = set(self.state.before) - names
        return len(names) == self.largest or (is_over and all(map(self.is_silent, missing)))

    def _replace(self, wanted: State) -> bool:
        """Whether nobody has changed the state before."""
        was_open, text = self.is_open, json.dumps(wanted)
        self._take(self._store.compare_set(self._key, self._text, text))
        is_ours = self._text == text.encode()
        if is_ours and was_open and wanted.prefix and wanted.old_prefix:
            self._store.delete_all(wanted.old_prefix)
        return is_ours

    def _give_up(self, came: set[str]) -> None:
        others = [each for each in self.state.members if each.name != self.own.name]
        self._replace(self.state._replace(members=tuple(others)))
        settings = self._settings
        raise WorkersFailed(
            f"after {settings.rendezvous_timeout:.0f} s {len(came)} of "
            f"launch.nnodes={settings.nnodes} nodes were at {self._rendezvous.endpoint} "
            f"({', '.join(sorted(came))}); the launchers of the others say why they cannot reach it"
        )

    def await_others(self) -> None:
        """Waits until all who take part have ended well, since one may hold what others need."""
        key, deadline = f"{self.state.prefix}ended", time.monotonic() + _END_S
        with contextlib.suppress(DistNetworkError, DistStoreError):  # it ended with another node
            self._store.add(key, 1)
            while time.monotonic() < deadline and self.takes_part:
                there = [each for each in self.state.members if not self.is_silent(each.name)]
                if self._rendezvous.end_of_job or self._store.add(key, 0) >= len(there):
                    return
                time.sleep(self.heartbeat_interval_s / 5)
                self.look()


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind((address, 0))
        port: int = tried.getsockname()[1]
    return port

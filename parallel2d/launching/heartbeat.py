"""The heartbeats of the launchers of a job, through its store: `Heartbeats`.

Each launcher increases a counter in the store, its heartbeat, every
``launch.heartbeat_interval_s``. The other launchers poll the counter at the same interval. A
launcher has timed out when all polls of ``launch.heartbeat_timeout_s`` have found the same value.
Polls are counted and no clocks are compared. Therefore a launcher that was stopped for a while does
not consider the other launchers timed out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Sequence

from torch.distributed import DistNetworkError, DistStoreError

from parallel2d.base.store.client import StoreClient


class Heartbeats:
    """Sends the heartbeat of one launcher, and polls the heartbeats of others.

    Args:
        store: the store of the launchers.
        prefix: prefix of the keys of the heartbeats.
        name: the name of this launcher.
        interval_s: seconds between two heartbeats.
        timeout_s: seconds without a heartbeat after which a launcher has timed out.
    """

    def __init__(
        self, store: StoreClient, prefix: str, name: str, interval_s: float, timeout_s: float
    ) -> None:
        self._store, self._prefix, self._name = store, prefix, name
        self._interval_s = interval_s
        self._missed = math.ceil(timeout_s / interval_s)
        # By name: the last heartbeat, the number of polls with the same heartbeat, and True if a
        # poll has shown that the launcher was alive. A poll shows this if the heartbeat has
        # changed, or if the launcher has joined after the first poll.
        self._heard: dict[str, tuple[bytes, int, bool]] = {}
        self._has_polled = False
        self._is_over = threading.Event()

    def start(self) -> None:
        """Send the first heartbeat, and the following heartbeats in a thread."""
        self._store.set(self._prefix + self._name, "0")
        threading.Thread(target=self._send, name="heartbeats", daemon=True).start()

    def stop(self) -> None:
        """Send no further heartbeat."""
        self._is_over.set()

    def _send(self) -> None:
        for count in itertools.count(1):
            if self._is_over.wait(self._interval_s):
                return
            # If the store has failed, the main thread of the launcher notices it.
            with contextlib.suppress(DistNetworkError, DistStoreError):
                self._store.set(self._prefix + self._name, str(count))

    def poll(self, names: Sequence[str]) -> None:
        """Read the heartbeats of the launchers ``names``. Called once per interval."""
        keys = []
        for name in names:
            keys.append(self._prefix + name)
        # Each launcher sends its first heartbeat before it joins, so every key exists.
        heartbeats = self._store.multi_get(keys) if keys else ()
        for name, heartbeat in zip(names, heartbeats, strict=True):
            last, polls, was_alive = self._heard.get(name, (heartbeat, -1, self._has_polled))
            if heartbeat == last:
                self._heard[name] = heartbeat, polls + 1, was_alive
            else:
                self._heard[name] = heartbeat, 0, True
        self._has_polled = True

    def has_timed_out(self, name: str) -> bool:
        """True if the launcher ``name`` has sent no heartbeat for the timeout."""
        return self._heard.get(name, (b"", 0, False))[1] >= self._missed

    def is_known(self, name: str) -> bool:
        """True if a poll has shown that the launcher is alive, or that it has timed out."""
        return self.has_timed_out(name) or self._heard.get(name, (b"", 0, False))[2]

"""Numbers the nodes of a check and exchanges values between them over a store: `PreflightMeeting`.

Only plain keys of the store are used, no process group. Nodes that wait too long raise
`NodeMissing` with the names of those that they waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from parallel2d.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store


class NodeMissing(Exception):  # noqa: N818 (named after what happened)
    """Nodes did not come, or ended before the others were done. The message names them."""


class PreflightMeeting:
    """``nodes`` processes at one store, each with a number.

    ``name`` keeps two checks apart that use the same outside store. ``node``: this one's number;
    None takes the next free one. ``expected``: host names by number where the caller knows them
    (Slurm does), for messages. Raises `ConfigError` when the number is taken or more nodes come
    than were announced.
    """

    def __init__(
        self,
        store: Store,
        nodes: int,
        host: str,
        node: int | None,
        name: str,
        timeout_s: float,
        expected: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self.nodes = nodes
        self._name = f"preflight/{name}"
        self._expected = list(expected) if len(expected) == nodes else [""] * nodes
        self._failed = f"{self._name}/failed"
        self._count = 0  # of values handed in so far, the same on every node
        self.node = self._take_number(node)
        store.set(self._host_key(self.node), host)

    def _host_key(self, node: int) -> str:
        return f"{self._name}/host/{node}"

    def _take_number(self, node: int | None) -> int:
        arrived = self._store.add(f"{self._name}/arrived", 1)
        taken = node if node is not None else arrived - 1
        if arrived > self.nodes or self._store.add(f"{self._name}/number/{taken}", 1) > 1:
            raise ConfigError(
                f"--node-rank={taken} is taken, or more than --nnodes={self.nodes} nodes came to "
                "this store: give every node a number of its own (or none a number), and on a "
                "store that serves several checks a new --name"
            )
        return taken

    # Every node calls the following in the same order. Each returns when all have called it, or
    # raises `NodeMissing` after the timeout, on every node that is present. ``wait_s``: how long
    # the slowest node may take beside the timeout.

    def wait_for_all(self) -> None:
        """The first call."""
        self._exchange(None, 0.0, "did not come to the endpoint")

    def together(self, wait_s: float = 0.0) -> None:
        """Only waits."""
        self._exchange(None, wait_s, "stopped answering")

    def gather(self, what: str, mine: Any, wait_s: float = 0.0) -> list[Any] | None:
        """All nodes' values by number, on node 0; None elsewhere. ``mine``: what JSON can hold."""
        prefix = self._exchange(mine, wait_s, f"did not answer ({what})")
        if self.node != 0:
            return None
        answers = self._store.multi_get([f"{prefix}/{node}" for node in range(self.nodes)])
        return [json.loads(answer) for answer in answers]

    def tell(self, value: Any, wait_s: float = 0.0) -> Any:
        """Node 0's ``value`` on every node, as JSON returns it: no tuples, no numbers as keys."""
        mine = value if self.node == 0 else None
        prefix = self._exchange(mine, wait_s, "did not answer")
        return json.loads(self._store.get(f"{prefix}/0"))

    def leave(self, hosts_store: bool) -> None:
        """The last call, whatever came before: the process that holds the store returns when the
        other nodes that are present no longer need it (after 5 s at the latest)."""
        gone = f"{self._name}/gone"
        if not hosts_store:
            self._store.add(gone, 1)
            return
        deadline = time.monotonic() + 5.0
        others = min(self._store.add(f"{self._name}/arrived", 0), self.nodes) - 1
        while self._store.add(gone, 0) < others and time.monotonic() < deadline:
            time.sleep(0.02)

    def _exchange(self, mine: Any, wait_s: float, did_not: str) -> str:
        """Hands in ``mine``; returns the prefix of the keys of all nodes' values when they are
        there. ``did_not``: what is said of nodes that do not come."""
        from torch.distributed import DistStoreError

        self._count += 1
        prefix = f"{self._name}/{self._count}"
        seconds = self._timeout_s + wait_s
        self._store.set(f"{prefix}/{self.node}", json.dumps(mine))
        if self._store.add(f"{prefix}/arrived", 1) == self.nodes:
            self._store.set(f"{prefix}/open", "")
        try:
            self._store.wait([f"{prefix}/open"], timedelta(seconds=seconds))
        except DistStoreError:
            message = self._missing(prefix, did_not, seconds)
            self._store.set(self._failed, message)
            # All others that wait raise it too, before the node that holds the store closes it.
            # Those whose last wait ended just before wait for the next value.
            for count in (self._count, self._count + 1):
                self._store.set(f"{self._name}/{count}/open", "")
            raise NodeMissing(message) from None
        if self._store.check([self._failed]):
            raise NodeMissing(self._store.get(self._failed).decode())
        return prefix

    def _missing(self, prefix: str, did_not: str, seconds: float) -> str:
        """Who has handed in nothing, and who has."""
        missing, present = [], []
        for node in range(self.nodes):
            key = self._host_key(node)
            host = self._expected[node]
            if self._store.check([key]):
                host = self._store.get(key).decode()
            if self._store.check([f"{prefix}/{node}"]):
                present.append(host)
            else:
                number = f"node {node} of {self.nodes}"
                missing.append(f"{host} ({number})" if host else number)
        more = " ..." if len(present) > 8 else ""
        told = f"{', '.join(missing)} {did_not} within {seconds:g} s"
        return f"{told}; present: {', '.join(present[:8])}{more}"

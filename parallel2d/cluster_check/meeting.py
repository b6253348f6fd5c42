"""Numbers the nodes of a check and exchanges values between them over a store: `PreflightMeeting`.

Only plain keys of the store are used, no process group. A node that waits too long raises
`NodeMissing` with the names of the nodes that it waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

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
        self._store, self.nodes, self._name, self._timeout_s = (
            store,
            nodes,
            f"preflight/{name}",
            timeout_s,
        )
        self._expected = list(expected) if len(expected) == nodes else []
        self._failed = f"{self._name}/failed"
        self._count = 0
        self.node = self._take_number(node)
        store.set(f"{self._name}/host/{self.node}", host)

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

    def wait_for_all(self) -> list[str]:
        """Host names by number. Raises `NodeMissing` after the timeout, on every node that is
        present, naming those that are not."""
        self.together(did_not="did not come to the endpoint")
        return [
            host.decode()
            for host in self._store.multi_get(
                [f"{self._name}/host/{node}" for node in range(self.nodes)]
            )
        ]

    def _await(self, keys: list[str], timeout_s: float, did_not: str) -> None:
        """``keys[k]`` is node k's."""
        deadline = time.monotonic() + timeout_s
        pause = 0.005
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                self._give_up(
                    [node for node, key in enumerate(keys) if not self._store.check([key])],
                    did_not,
                    timeout_s,
                )
            time.sleep(pause)
            pause = min(0.25, pause * 1.5)

    def _give_up(self, missing: Sequence[int], did_not: str, timeout_s: float) -> NoReturn:
        """Raises `NodeMissing`, here and on every node that waits. The node that has waited longest
        names the missing ones. All raise its message before the store is closed on the node that
        holds it."""
        message = f"{self._names(missing)} {did_not} within {timeout_s:g} s{self._present(missing)}"
        self._store.set(self._failed, message)
        # node 0 gathers while the others wait for what it will send
        for count in (self._count, self._count + 1):
            for key in (f"{self._name}/{count}", f"{self._name}/{count}/open"):
                self._store.set(key, "null")
        raise NodeMissing(message)

    def _names(self, nodes: Sequence[int]) -> str:
        names = []
        for node in nodes:
            key = f"{self._name}/host/{node}"
            host = (
                self._store.get(key).decode()
                if self._store.check([key])
                else (self._expected[node] if self._expected else "")
            )
            names.append(
                f"{host} (node {node} of {self.nodes})" if host else f"node {node} of {self.nodes}"
            )
        return ", ".join(names)

    def _present(self, missing: Sequence[int]) -> str:
        present = [node for node in range(self.nodes) if node not in missing]
        hosts = [
            self._store.get(f"{self._name}/host/{node}").decode()
            for node in present
            if self._came(node)
        ]
        return (
            f"; present: {', '.join(hosts[:8])}{' ...' if len(hosts) > 8 else ''}" if hosts else ""
        )

    def _came(self, node: int) -> bool:
        return self._store.check([f"{self._name}/host/{node}"])

    def gather(self, what: str, mine: Any, wait_s: float = 0.0) -> list[Any] | None:
        """All nodes' answers by number, on node 0; None elsewhere. ``mine``: a value that JSON can
        hold. ``wait_s``: how long the slowest node may take, beside the timeout. Every node calls
        it in the same order."""
        self._count += 1
        prefix = f"{self._name}/{self._count}"
        self._store.set(f"{prefix}/{self.node}", json.dumps(mine))
        if self.node:
            return None
        keys = [f"{prefix}/{node}" for node in range(self.nodes)]
        self._await(keys, self._timeout_s + wait_s, f"did not answer ({what})")
        return [json.loads(answer) for answer in self._store.multi_get(keys)]

    def tell(self, value: Any, wait_s: float = 0.0) -> Any:
        """Node 0's ``value`` on every node."""
        self._count += 1
        key = f"{self._name}/{self._count}"
        if self.node == 0:
            self._store.set(key, json.dumps(value))
            return json.loads(json.dumps(value))  # as on the others: no tuples, no numbers as keys
        patience = self._timeout_s + wait_s + 5.0  # node 0 gives up first, on whom it waits for
        if not self._wait(key, patience):
            self._give_up([0], "did not answer", patience)
        return json.loads(self._store.get(key))

    def together(self, wait_s: float = 0.0, did_not: str = "stopped answering") -> None:
        """Returns on every node once all have come here."""
        self._count += 1
        prefix = f"{self._name}/{self._count}"
        self._store.set(f"{prefix}/{self.node}", "")
        if self._store.add(f"{prefix}/count", 1) == self.nodes:
            self._store.set(f"{prefix}/open", "")
        if not self._wait(f"{prefix}/open", self._timeout_s + wait_s):
            missing = [
                node for node in range(self.nodes) if not self._store.check([f"{prefix}/{node}"])
            ]
            self._give_up(missing, did_not, self._timeout_s + wait_s)

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

    def _wait(self, key: str, seconds: float) -> bool:
        from torch.distributed import DistStoreError

        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except DistStoreError:
            return False
        if self._store.check([self._failed]):
            raise NodeMissing(self._store.get(self._failed).decode())
        return True

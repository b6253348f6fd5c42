"""Which ranks share a host, gathered from the ranks and never assumed from their order. Start at
`Topology.gather`."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass

from parallel2d.base.errors import counted
from parallel2d.base.exchange import all_gather


def host_identity(override: str | None = None) -> str:
    """A string that two ranks share exactly when traffic between them stays inside one machine.

    Host name plus network namespace: containers and namespaces on one kernel count as different
    hosts, as their traffic does. The boot id would not do: namespaces share it.
    """
    if override is not None:
        return override
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        # Other systems than Linux have no /proc: the host name decides alone.
        namespace = 0
    return f"{socket.gethostname()}/{namespace}"


@dataclass(frozen=True)
class Topology:
    """``hosts[rank]`` is the identity of the host that rank runs on."""

    hosts: tuple[str, ...]

    @classmethod
    def gather(cls, host_id: str | None = None) -> Topology:
        """The topology of the default process group, gathered from its ranks. Collective: all ranks
        must call it."""
        return cls(tuple(all_gather(host_identity(host_id))))

    @classmethod
    def single_host(cls, world_size: int, host: str = "this host") -> Topology:
        """All ranks on one machine, for a launcher that has not started them yet."""
        return cls((host,) * world_size)

    @classmethod
    def equal_hosts(cls, hosts: int, ranks: int) -> Topology:
        """``hosts`` machines with ``ranks`` each, for a launcher on one of several nodes."""
        by_rank: list[str] = []
        for host in range(hosts):
            by_rank += [f"host {host}"] * ranks
        return cls(tuple(by_rank))

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @functools.cached_property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """Host -> its ranks in ascending order; hosts in the order of their first rank."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return found

    def describe(self) -> str:
        """For messages: ``2 hosts with 4 ranks each`` or ``2 hosts with 4, 2 ranks``."""
        sizes = [len(ranks) for ranks in self.ranks_by_host.values()]
        if len(set(sizes)) != 1:
            return f"{len(sizes)} hosts with {', '.join(map(str, sizes))} ranks"
        # From here on every host has as many ranks as the first.
        each = " each" if len(sizes) > 1 else ""
        return f"{counted(len(sizes), 'host')} with {counted(sizes[0], 'rank')}{each}"

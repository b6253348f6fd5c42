"""The hosts of a job and their ranks, gathered from the ranks: `Topology`."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from dataclasses import dataclass

from parallel2d.base.errors import counted


@dataclass(frozen=True)
class Topology:
    """Placement of ranks on hosts. ``hosts[rank]`` is the identity of the host of a rank."""

    hosts: tuple[str, ...]

    @classmethod
    def gather(cls, host_id: str | None = None) -> Topology:
        """Return the topology of the default process group, gathered from its ranks. Collective.

        Inside `exchange.among` only the ranks of this context take part; other ranks have no host.

        Args:
            host_id: identity of the host of this rank, equal for two ranks if and only if traffic
                between them stays inside one machine. Default: host name and network namespace.
                Containers and network namespaces on one kernel count as different hosts, because
                traffic between them uses the network. The boot id would be equal for them.
        """
        # Imported here, because these modules import torch, which a launcher does not need.
        import torch.distributed as dist

        from parallel2d.base.exchange import all_gather, group_of_members, members
        from parallel2d.base.replicas import current

        replicas = current()
        if replicas is not None and replicas.hosts:
            # the hosts are known already, and failed ranks could not take part in a gather
            return cls(tuple(replicas.hosts))
        if host_id is None:
            # Without /proc, on other systems than Linux, only the host name distinguishes hosts.
            namespace = 0
            with contextlib.suppress(OSError):
                namespace = os.stat("/proc/self/ns/net").st_ino
            host_id = f"{socket.gethostname()}/{namespace}"
        found = all_gather(host_id)
        if group_of_members() is None:
            return cls(tuple(found))  # see `completed` for absent ranks
        hosts = dict(zip(members(), found, strict=True))
        return cls(tuple(hosts.get(rank, "") for rank in range(dist.get_world_size())))

    def completed(self, world_size: int, nodes: int) -> Topology:
        """Return a topology of ``world_size`` ranks: this topology, and the missing ranks on
        additional hosts. ``nodes``: the number of live nodes, which have equal numbers of ranks."""
        here = len(self.hosts)
        absent = [f"node {rank * nodes // here} (absent)" for rank in range(here, world_size)]
        return Topology((*self.hosts, *absent))

    @classmethod
    def equal_hosts(cls, hosts: int, ranks: int) -> Topology:
        """Return a topology of ``hosts`` machines with ``ranks`` ranks each. A launcher uses it
        before the ranks exist."""
        by_rank: list[str] = []
        for host in range(hosts):
            by_rank += [f"host {host}"] * ranks
        return cls(tuple(by_rank))

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @functools.cached_property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """Host -> its ranks in ascending order. Hosts are in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            if host:
                found.setdefault(host, []).append(rank)
        return found

    def describe(self) -> str:
        """Return ``2 hosts with 4 ranks each`` or ``2 hosts with 4, 2 ranks``, for messages."""
        sizes = list(map(len, self.ranks_by_host.values()))
        if len(set(sizes)) != 1:
            return f"{len(sizes)} hosts with {', '.join(map(str, sizes))} ranks"
        # All hosts have the same number of ranks.
        each = " each" if len(sizes) > 1 else ""
        return f"{counted(len(sizes), 'host')} with {counted(sizes[0], 'rank')}{each}"

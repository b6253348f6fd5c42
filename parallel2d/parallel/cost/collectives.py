"""Bytes and seconds of collectives.

`sent_bytes` returns the bytes that a rank sends in a collective, `CollectiveTally` sums these bytes
over one mesh axis, and `collective_seconds` returns the seconds of a collective.

[Note: collectives in time] The prediction assumes ring algorithms, with the latencies of NCCL's
tuning model (``src/graph/tuning.cc``). A ring through the ranks of a group leaves each host once,
so a host sends the bytes of one rank over its link for each group with ranks on the host. The link
of a host with one rank of each of eight groups carries the bytes of eight ranks. The link of a host
with eight ranks of one group carries the bytes of one rank. An all-gather or reduce-scatter over n
ranks on m hosts has m - 1 steps between hosts and n - m steps inside hosts. An all-reduce has twice
as many steps. For few bytes an all-reduce uses a tree, with 2 log2(m) steps between hosts. Gloo
(CPU) uses only rings, and its reduce-scatter has the steps of an all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parallel2d.base.config import AXES, ClusterConfig
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh_sizes import groups_along


def sent_bytes(collective: str, whole_bytes: float, size: int, device_type: str) -> float:
    """Return the bytes that one rank sends, averaged over the ranks of a group of ``size``.

    Bandwidth-optimal algorithms (ring; Thakur et al. 2005) send (n-1)/n of the payload, and an
    all-reduce twice as many bytes. Gloo (CPU tensors) runs a reduce-scatter as an all-reduce.

    Args:
        collective: name of the collective; KeyError for an unknown one.
        whole_bytes: bytes of the larger side of the collective: the output of ``all_gather``, the
            input of ``reduce_scatter`` and ``all_to_all``, the tensor of ``all_reduce``.
        size: ranks of the group.
        device_type: device of the tensors.
    """
    return _passes(collective, device_type) * (size - 1) / size * whole_bytes


def _passes(collective: str, device_type: str) -> int:
    """Return the number of passes around a ring of the ranks."""
    reduce_scatter = 2 if device_type == "cpu" else 1
    passes = {"all_gather": 1, "all_to_all": 1, "reduce_scatter": reduce_scatter, "all_reduce": 2}
    return passes[collective]


@dataclass
class CollectiveTally:
    """Collectives of this rank over one mesh axis."""

    axis: str
    size: int  # ranks of the axis
    bytes: float = 0.0  # sent by this rank
    calls: int = 0
    ring_passes: int = 0  # an all-reduce passes the ring twice

    def add(self, collective: str, whole_bytes: int, device_type: str) -> float:
        """Count one collective, with the arguments of `sent_bytes`. Return its bytes."""
        sent = sent_bytes(collective, whole_bytes, self.size, device_type)
        self.bytes += sent
        self.calls += 1
        self.ring_passes += 2 if collective == "all_reduce" else 1
        return sent

    def reset(self) -> None:
        """Set all sums to zero."""
        self.bytes = 0.0
        self.calls = self.ring_passes = 0


@dataclass(frozen=True)
class GroupPlacement:
    """Placement of the groups of one mesh axis."""

    ranks: int
    hosts: int  # maximum number of hosts of one group
    groups_per_host: int  # maximum number of groups on one host that cross hosts

    @property
    def is_inside(self) -> bool:
        return self.hosts == 1


def placement_of(ranks: torch.Tensor, axis: str, topology: Topology) -> GroupPlacement:
    """Return the placement of the groups of ``axis``; see `groups_along`."""
    numbers = {}
    for number, host in enumerate(topology.ranks_by_host):
        numbers[host] = number
    host_of = torch.tensor([numbers[host] for host in topology.hosts])
    # [group, rank in the group]: hosts as numbers in ascending order.
    hosts = host_of[groups_along(ranks, axis)].sort(dim=1).values
    is_first = torch.ones_like(hosts, dtype=torch.bool)
    is_first[:, 1:] = hosts[:, 1:] != hosts[:, :-1]
    hosts_of_group = is_first.sum(dim=1)
    # For each group on several hosts, list each of its hosts once.
    crosses = hosts_of_group > 1
    crossed = hosts[crosses][is_first[crosses]]
    most = int(crossed.bincount().max()) if crossed.numel() else 0
    return GroupPlacement(hosts.shape[1], int(hosts_of_group.max()), most)


def placements(ranks: torch.Tensor, topology: Topology) -> dict[str, GroupPlacement]:
    """Return the placement of the groups of each axis, by axis."""
    return {axis: placement_of(ranks, axis, topology) for axis in AXES}


def collective_seconds(
    collective: str,
    sent: float,
    placement: GroupPlacement,
    cluster: ClusterConfig,
    device_type: str = "cuda",
) -> float | None:
    """Return the seconds of a collective that all groups of an axis run at the same time.

    None if the speed of a link is unknown.

    Args:
        collective: ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``all_reduce``.
        sent: bytes that each rank sends; see `sent_bytes`.
        placement: placement of the groups.
        cluster: links of the cluster.
        device_type: ``cuda`` (NCCL) or ``cpu`` (gloo), which selects the algorithms.
    """
    if placement.ranks == 1:
        return 0.0
    inside, inner_s = cluster.inside_node.bytes_per_s, cluster.inside_node.latency_us
    if inside is None or inner_s is None:
        return None
    outer, inner = collective_steps(collective, placement, device_type)
    if placement.is_inside:
        return inner * inner_s / 1e6 + sent / inside
    between, outer_s = cluster.between_nodes.bytes_per_s, cluster.between_nodes.latency_us
    if between is None or outer_s is None:
        return None
    # Both kinds of links run at the same time, and the slower one decides.
    transfer = max(sent / inside, placement.groups_per_host * sent / between)
    latency = outer * outer_s + inner * inner_s
    if collective == "all_reduce" and device_type == "cuda":
        on_a_host = placement.ranks / placement.hosts
        tree = 2 * (math.log2(placement.hosts) * outer_s + (on_a_host - 1) * inner_s)
        latency = min(latency, tree)
    return latency / 1e6 + transfer


def collective_steps(
    collective: str, placement: GroupPlacement, device_type: str
) -> tuple[int, int]:
    """Return the steps of a ring between hosts and inside hosts; each costs one latency."""
    passes = _passes(collective, device_type)
    return passes * (placement.hosts - 1), passes * (placement.ranks - placement.hosts)

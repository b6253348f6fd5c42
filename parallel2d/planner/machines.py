"""The ranks, hosts and devices of a job on the machines of ``cluster``."""

from __future__ import annotations

import torch

from parallel2d.config import TrainConfig
from parallel2d.errors import ConfigError
from parallel2d.launch import workers_per_node
from parallel2d.topology import Topology

_MOST_RANKS = 1_000_000


def planned_topology(config: TrainConfig) -> Topology:
    """Equal hosts, as many as ``cluster.nodes`` with ``cluster.ranks_per_node`` each; where these
    are ``auto``, what the launcher would start. Raises `ConfigError` for more ranks than can be
    planned."""
    nodes = config.cluster.nodes
    if nodes == "auto":
        _, nodes = config.launch.node_range
    ranks = config.cluster.ranks_per_node
    if ranks == "auto":
        ranks = workers_per_node(config.launch)
    if int(nodes) * int(ranks) > _MOST_RANKS:
        raise ConfigError(
            f"cluster.nodes={nodes} x cluster.ranks_per_node={ranks} are more than {_MOST_RANKS:,} "
            "ranks, which no plan is made for"
        )
    if nodes == 1:
        return Topology.single_host(int(ranks))
    return Topology.equal_hosts(int(nodes), int(ranks))


def usable_gib(config: TrainConfig) -> float | None:
    """What a layout may fill of a device's memory; None where that is not known."""
    whole = config.cluster.device.memory_gib
    return None if whole is None else whole * (1 - config.plan.free_memory)


def planned_device_type(config: TrainConfig) -> str:
    """``cuda`` or ``cpu``: of ``cluster.device``, or of this machine."""
    if config.cluster.device.type != "auto":
        return config.cluster.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"

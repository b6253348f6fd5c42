"""Decides at the start of a job what happens when a replica fails: the other replicas continue, or
all ranks restart. Start at `choose`. See [Note: replicas that never stop] in
`parallel2d.base.replicas`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from parallel2d.base.config import TrainConfig
from parallel2d.base.device import accelerator_type
from parallel2d.base.errors import ConfigError
from parallel2d.base.launcher_environment import RankIdentity
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh_sizes import resolve_mesh

_CHECK = "python -m parallel2d.preflight --self-check --only replica-loss --write CLUSTER.yaml"
# With these values of the variables, calls of NCCL or torch wait for the device. Recovery needs
# calls that return immediately.
_BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_COMM_BLOCKING": "1"}


@dataclass(frozen=True)
class LossPolicy:
    """The reaction to the loss of a replica.

    Attributes:
        continues: True if the other replicas continue, False if all ranks restart.
        backend: backend of collectives across replicas, gloo or nccl2.
        reason: the reason why all ranks restart, for the log. Empty if the other replicas continue,
            or if the configuration selects the restart.
    """

    continues: bool
    backend: str = "gloo"
    reason: str = ""


def choose(
    config: TrainConfig,
    identity: RankIdentity,
    *,
    device_type: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> LossPolicy:
    """Return the policy of a job. Raises `ConfigError` if the configuration has
    ``launch.on_replica_loss=continue`` and the job cannot continue without a replica."""
    wish, device_type = config.launch.on_replica_loss, device_type or accelerator_type()
    starts_again = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if wish == "restart":
        return LossPolicy(False)
    if wish == "auto" and not (starts_again and config.replicas_survive):
        return LossPolicy(False)
    backend, is_checked = _backend(config, device_type)
    limits = list(_limits(config, identity, starts_again, device_type, backend, environment))
    if not limits and wish == "auto" and not is_checked:
        limits.append(
            f"this cluster's file has no cluster.replica_backend={backend}; after {_CHECK} "
            "start with cluster=CLUSTER.yaml, or set launch.on_replica_loss=continue"
        )
    if not limits:
        return LossPolicy(True, backend)
    if wish == "continue":
        raise ConfigError(f"launch.on_replica_loss=continue: {limits[0]}")
    return LossPolicy(False, backend, f"all ranks restart after the loss of a replica: {limits[0]}")


def _backend(config: TrainConfig, device_type: str) -> tuple[str, bool]:
    """Return the backend of ``launch.replica_backend``, and True if it needs no check or a check on
    this cluster has passed with it."""
    wish, checked = config.launch.replica_backend, config.cluster.replica_backend
    if wish == "auto":
        wish = "nccl2" if device_type == "cuda" and checked == "nccl2" else "gloo"
    return wish, device_type == "cpu" or wish == checked


def _limits(
    config: TrainConfig,
    identity: RankIdentity,
    starts_again: bool,
    device_type: str,
    backend: str,
    environment: Mapping[str, str],
) -> Iterator[str]:
    """Yield the reasons why all ranks must restart after the loss of a replica."""
    if not starts_again:
        yield "launch.max_restarts=0 starts no replica again; set launch.max_restarts=3"
    if identity.launcher not in ("self", "nodes"):
        yield f"{identity.launcher} starts all ranks again; start with python -m parallel2d.train"
    if not config.replicas_survive:
        yield "this job needs all of its replicas (docs/failures.md says which do not)"
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        # With this setting, every collective of torch waits for all ranks, also for failed ranks.
        yield "TORCH_DISTRIBUTED_DEBUG=DETAIL connects all ranks; unset it"
    if "cudagraph" in config.compile.backend:
        # A graph contains the communicator that existed when the graph was captured.
        yield f"compile.backend={config.compile.backend} records communicators in CUDA graphs"
    if backend == "nccl2":
        yield from _limits_of_nccl(config, identity, device_type, environment)


def _limits_of_nccl(
    config: TrainConfig, identity: RankIdentity, device_type: str, environment: Mapping[str, str]
) -> Iterator[str]:
    if device_type != "cuda" or torch.version.hip is not None:
        yield "launch.replica_backend=nccl2 needs NVIDIA GPUs; use gloo"
        return
    for name, value in _BLOCKING.items():
        if environment.get(name) == value:
            yield f"{name}={value} blocks calls of NCCL after a failure; unset it"
    local = identity.world_size // identity.nodes
    topology = Topology.equal_hosts(identity.nodes, local)
    groups = resolve_mesh(config, topology).place(topology).flatten(1).T.tolist()
    has_common_host = False
    for group in groups:
        hosts = [topology.hosts[rank] for rank in group]
        has_common_host |= len(set(hosts)) < len(hosts)
    if has_common_host:
        # GPUs of one host map memory of their peers. NCCL frees this memory when it revokes a
        # communicator.
        yield (
            "several GPUs of one host are in one replicate group, and nccl2 cannot continue if one "
            "of them fails; use launch.replica_backend=gloo, or one replica per node"
        )

"""Which rank this process is, from the variables that its launcher set: `find_rank`. Which ranks
share a host, gathered from the ranks and never assumed from their order: `Topology.gather`."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from parallel2d.base.errors import ConfigError, counted

JOB = "PARALLEL2D_JOB"  # set by the launcher of one node for its workers: the file of the job
AGENT = "PARALLEL2D_AGENT"  # set by our launcher: its folder, which lives as long as it does
# set by our launcher: the endpoint of the workers' store, and the prefix of their keys in it
STORE, PREFIX = "PARALLEL2D_STORE", "PARALLEL2D_STORE_PREFIX"
# set by our launcher: 1 where it has the store that other nodes use, which ends with it
HAS_STORE = "PARALLEL2D_HAS_STORE"
# Set by our launcher: how often the ranks of this replica were replaced.
INCARNATION = "PARALLEL2D_LIFE"
# set by our launcher: a folder in shared memory for this node's ranks, which it removes at its end
MEMORY_DIR = "PARALLEL2D_MEMORY_DIR"
SHARED_MEMORY = "/dev/shm"
# Slurm step ids from here on are shells (batch, interactive, extern), not srun steps
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class RankIdentity:
    """``launcher``: ``self`` and ``nodes`` (ours, of one or several), ``torchrun`` or ``srun``."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    nodes: int
    launcher: str


def find_rank(environment: MutableMapping[str, str] | None = None) -> RankIdentity | None:
    """The `RankIdentity` that the environment gives this process, or None when it is not a rank.

    torchrun: its variables. srun: those of a step with several tasks; the shell of ``salloc`` or
        ``srun --pty`` is not a rank.
    For srun the variables that torch needs are derived and set. Raises `ConfigError` for an
    incomplete set.
    """
    env = os.environ if environment is None else environment
    launcher = _find_launcher(env)
    if launcher is None:
        return None
    if launcher == "srun":
        _set_from_slurm(env)
    identity = RankIdentity(
        rank=_integer(env, "RANK"),
        world_size=_integer(env, "WORLD_SIZE"),
        local_rank=_integer(env, "LOCAL_RANK", "0"),
        node=_integer(env, "GROUP_RANK", "0"),
        nodes=_integer(env, "GROUP_WORLD_SIZE", "1"),
        launcher=launcher,
    )
    # Not part of the identity, but the error is clearer here than where the port is used.
    _integer(env, "MASTER_PORT")
    if identity.rank >= identity.world_size:
        raise ConfigError(f"RANK={identity.rank} must be below WORLD_SIZE={identity.world_size}")
    return identity


def _find_launcher(env: MutableMapping[str, str]) -> str | None:
    """``launcher`` of the `RankIdentity`, or None when no launcher started this process."""
    if not {"RANK", "WORLD_SIZE"} <= env.keys():
        step = env.get("SLURM_STEP_ID", "")
        if "SLURM_PROCID" not in env or not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
            return None
        # A single task, such as the shell of srun --pty, needs no other ranks.
        return "srun" if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else None
    missing = sorted({"MASTER_ADDR", "MASTER_PORT"} - env.keys())
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not: start with torchrun, or "
            "unset them"
        )
    # Our own launchers set the variables of torchrun and one of their own.
    if JOB in env:
        return "self"
    return "nodes" if AGENT in env else "torchrun"


def _integer(env: MutableMapping[str, str], name: str, default: str | None = None) -> int:
    """The variable, or ``default``, as a number of at least 0. Raises `ConfigError` for others."""
    text = env.get(name, default)
    # str.isdigit is false for signs, points and the empty text.
    if text is None or not text.isdigit():
        raise ConfigError(f"{name}={text} in the environment must be a whole number")
    return int(text)


def _set_from_slurm(env: MutableMapping[str, str]) -> None:
    """Sets torchrun's variables from those of srun; a given MASTER_ADDR or MASTER_PORT stays."""
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
    # One number for each node, such as 4(x2),3: the first is taken.
    by_node = env.get("SLURM_STEP_TASKS_PER_NODE", str(tasks // max(nodes, 1)))
    local_size = by_node.split("(")[0].split(",")[0]
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
    # All tasks derive the same port without a message, and two steps on one node seldom share it.
    seed = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(20000 + seed % 20000))
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = str(tasks)
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
    env["LOCAL_WORLD_SIZE"] = local_size
    env["GROUP_RANK"] = env.get("SLURM_NODEID", "0")
    env["GROUP_WORLD_SIZE"] = str(nodes)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-05,9],cpu1`` -> ``gpu03``."""
    head, bracket, rest = nodes.partition("[")
    # No brackets, or brackets of a later host: cpu1,gpu[03-05]
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


@dataclass(frozen=True)
class Topology:
    """``hosts[rank]`` is the identity of the host that rank runs on."""

    hosts: tuple[str, ...]

    @classmethod
    def gather(cls, host_id: str | None = None) -> Topology:
        """The topology of the default process group, gathered from its ranks. Collective: all ranks
        must call it. ``host_id``: what ranks share exactly when traffic between them stays inside
        one machine. Default: host name plus network namespace. Containers and namespaces on one
        kernel count as different hosts, as their traffic does; the boot id would not do, since they
        share it."""
        # Imported here because torch comes with it, which a launcher does not need.
        from parallel2d.base.exchange import all_gather
        from parallel2d.base.replicas import current

        replicas = current()
        if replicas is not None and replicas.hosts:
            return cls(tuple(replicas.hosts))  # known already, where some ranks may not be there
        if host_id is None:
            # Other systems than Linux have no /proc: the host name decides alone.
            namespace = 0
            with contextlib.suppress(OSError):
                namespace = os.stat("/proc/self/ns/net").st_ino
            host_id = f"{socket.gethostname()}/{namespace}"
        return cls(tuple(all_gather(host_id)))

    def completed(self, world_size: int, nodes: int) -> Topology:
        """With the ranks that are not there yet, on hosts of their own. ``nodes``: how many equal
        ones are there."""
        here = len(self.hosts)
        absent = [f"node {rank * nodes // here} (absent)" for rank in range(here, world_size)]
        return Topology((*self.hosts, *absent))

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

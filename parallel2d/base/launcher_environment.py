"""Reads the rank of this process from the environment variables of torchrun, Slurm's srun or our
launcher: `find_rank`."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from parallel2d.base.errors import ConfigError

# The launcher sets these variables for its workers.
JOB = "PARALLEL2D_JOB"  # on a single node: path of the file with the job
# the folder for records of the launcher, which removes the folder when it ends
AGENT = "PARALLEL2D_AGENT"
# The endpoint of the workers' store, and the prefix of their keys
STORE, PREFIX = "PARALLEL2D_STORE", "PARALLEL2D_STORE_PREFIX"
# 1 if this node's launcher serves the store of all nodes. The store ends with this launcher.
HAS_STORE = "PARALLEL2D_HAS_STORE"
# Restart count of the ranks of this replica
INCARNATION = "PARALLEL2D_LIFE"
# A folder in shared memory for the ranks of this node, which the launcher removes at its exit
MEMORY_DIR = "PARALLEL2D_MEMORY_DIR"
SHARED_MEMORY = "/dev/shm"
# Slurm step ids of at least this value are shells (batch, interactive, extern), not srun steps
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class RankIdentity:
    """Rank and launcher of this process. ``launcher`` is ``self`` (our launcher, one node),
    ``nodes`` (our launcher, several nodes), ``torchrun`` or ``srun``."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    nodes: int
    launcher: str


def find_rank(environment: MutableMapping[str, str] | None = None) -> RankIdentity | None:
    """Return the `RankIdentity` from the environment, or None if this process is not a rank.

    Under srun, a process is a rank only if its step has several tasks. The shell of ``salloc`` or
    ``srun --pty`` is not a rank. This function also sets the variables that torch needs, from
    Slurm's variables.

    Raises:
        ConfigError: for an incomplete set of variables.
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
    # The port is not part of the identity. Checked here, because a later error would be less clear.
    _integer(env, "MASTER_PORT")
    if identity.rank >= identity.world_size:
        raise ConfigError(f"RANK={identity.rank} must be below WORLD_SIZE={identity.world_size}")
    return identity


def _find_launcher(env: MutableMapping[str, str]) -> str | None:
    """Return ``launcher`` of the `RankIdentity`, or None if no launcher started this process."""
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
    # Our launchers set the variables of torchrun and an additional one.
    if JOB in env:
        return "self"
    return "nodes" if AGENT in env else "torchrun"


def _integer(env: MutableMapping[str, str], name: str, default: str | None = None) -> int:
    """Return the variable, or ``default``, as an integer. Raises `ConfigError` for other texts and
    negative numbers."""
    text = env.get(name, default)
    # str.isdigit is false for signs, points and an empty string.
    if text is None or not text.isdigit():
        raise ConfigError(f"{name}={text} in the environment must be a whole number")
    return int(text)


def _set_from_slurm(env: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from srun's variables. A given MASTER_ADDR or MASTER_PORT is not
    changed."""
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
    # One number per node, such as 4(x2),3. The first is used.
    by_node = env.get("SLURM_STEP_TASKS_PER_NODE", str(tasks // max(nodes, 1)))
    local_size = by_node.split("(")[0].split(",")[0]
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
    # All tasks derive the same port without communication; two steps on one node rarely share it.
    seed = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(20000 + seed % 20000))
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = str(tasks)
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
    env["LOCAL_WORLD_SIZE"] = local_size
    env["GROUP_RANK"] = env.get("SLURM_NODEID", "0")
    env["GROUP_WORLD_SIZE"] = str(nodes)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[03-05,9],cpu1`` -> ``gpu03``."""
    head, bracket, rest = nodes.partition("[")
    # No brackets, or brackets of a later host: cpu1,gpu[03-05]
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]

"""Which rank this process is, read from the environment variables that its launcher set."""

from __future__ import annotations

import os
from dataclasses import dataclass

from parallel2d.errors import ConfigError

# set by the launcher of one node for the workers it starts
CONFIG, RUN_DIR = "PARALLEL2D_CONFIG", "PARALLEL2D_RUN_DIR"
AGENT = "PARALLEL2D_AGENT"  # set by our launcher: its folder, which lives as long as it does
# set by our launcher: where workers meet, and under which names
STORE, PREFIX = "PARALLEL2D_STORE", "PARALLEL2D_STORE_PREFIX"
# Slurm step ids from here on are shells (batch, interactive, extern), not srun steps
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class RankIdentity:
    """Which rank this process is. ``launcher``: ``self`` (ours, one node), ``nodes`` (ours,
    several), ``torchrun`` or ``srun``."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    nodes: int
    launcher: str


def find_rank(environment: os._Environ[str] | dict[str, str] | None = None) -> RankIdentity | None:
    """The `RankIdentity` that the environment gives this process, or None when it is not a rank.

    torchrun: its variables. srun: those of a step with several tasks; the shell of ``salloc`` or
        ``srun --pty`` is not a rank.
    For srun the variables that torch needs are derived and set. Raises `ConfigError` for an
    incomplete set.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise ConfigError(
                f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not: start with "
                "torchrun, or unset them"
            )
        launcher = "self" if CONFIG in env else "nodes" if AGENT in env else "torchrun"
    elif _is_srun_task(env):
        _set_from_slurm(env)
        launcher = "srun"
    else:
        return None
    numbers = {}
    for name, default in (
        ("RANK", None),
        ("WORLD_SIZE", None),
        ("LOCAL_RANK", "0"),
        ("GROUP_RANK", "0"),
        ("GROUP_WORLD_SIZE", "1"),
        ("MASTER_PORT", None),
    ):
        text = env.get(name, default)
        if text is None or not text.isdigit():
            raise ConfigError(f"{name}={text} in the environment must be a whole number")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(
            f"RANK={numbers['RANK']} must be below WORLD_SIZE={numbers['WORLD_SIZE']}"
        )
    return RankIdentity(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        numbers["GROUP_RANK"],
        numbers["GROUP_WORLD_SIZE"],
        launcher,
    )


def _is_srun_task(env: os._Environ[str] | dict[str, str]) -> bool:
    step, tasks = env.get("SLURM_STEP_ID", ""), env.get("SLURM_STEP_NUM_TASKS", "1")
    return (
        "SLURM_PROCID" in env
        and step.isdigit()
        and int(step) < _FIRST_SPECIAL_STEP
        and int(tasks) > 1
    )


def _set_from_slurm(env: os._Environ[str] | dict[str, str]) -> None:
    tasks, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env.get("SLURM_STEP_NUM_NODES", "1"))
    local = (
        env.get("SLURM_STEP_TASKS_PER_NODE", str(tasks // max(nodes, 1)))
        .split("(")[0]
        .split(",")[0]
    )
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
    env.setdefault(
        "MASTER_PORT",
        str(20000 + (int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env["SLURM_STEP_ID"])) % 20000),
    )
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], str(tasks)
    env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = env.get("SLURM_LOCALID", "0"), local
    env["GROUP_RANK"], env["GROUP_WORLD_SIZE"] = env.get("SLURM_NODEID", "0"), str(nodes)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-05,9],cpu1`` -> ``gpu03``."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]

"""Arguments of the check from the variables of srun and torchrun, so that nothing has to be typed
under them: `defaults_of_launcher`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from parallel2d.errors import ConfigError


def expand_hosts(nodes: str) -> list[str]:
    """A Slurm node list, written out: ``gpu[03-05,9],cpu1`` -> ``gpu03 gpu04 gpu05 gpu9 cpu1``."""
    return [host for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes) for host in _expand(word)]


def _expand(word: str) -> Iterator[str]:
    head, bracket, rest = word.partition("[")
    if not bracket:
        yield head
        return
    inner, _, tail = rest.partition("]")
    for part in inner.split(","):
        first, dash, last = part.partition("-")
        for number in range(int(first), int(last if dash else first) + 1):
            for end in _expand(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


def defaults_of_launcher(env: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of `parallel2d.cluster_check.check.Request` that a launcher's variables
    imply; empty without a launcher.

    srun with one task per node: number, nodes, hosts, and as endpoint the first host with a port
    drawn from the job. torchrun with one process per node: its own store. Raises `ConfigError` for
    several processes per node.
    """
    if (
        "SLURM_PROCID" in env
        and env.get("SLURM_STEP_ID", "").isdigit()
        and "SLURM_STEP_NUM_NODES" in env
    ):
        nodes, tasks = int(env["SLURM_STEP_NUM_NODES"]), int(env.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > nodes:
            raise ConfigError(
                f"srun started {tasks} tasks on {nodes} nodes; this check is one per node: srun "
                "--ntasks-per-node=1"
            )
        if nodes == 1:
            return {}
        hosts = expand_hosts(env["SLURM_STEP_NODELIST"])
        job, step = int(env.get("SLURM_JOB_ID", "0")), int(env["SLURM_STEP_ID"])
        return {
            "nodes": nodes,
            "node": int(env["SLURM_NODEID"]),
            "endpoint": f"{hosts[0]}:{20000 + (job * 7 + step) % 20000}",
            "name": f"slurm-{job}.{step}",
            "expected": tuple(hosts),
        }
    if "GROUP_RANK" in env and "MASTER_ADDR" in env and int(env.get("WORLD_SIZE", "1")) > 1:
        if env.get("LOCAL_WORLD_SIZE", "1") != "1":
            count = env["LOCAL_WORLD_SIZE"]
            raise ConfigError(
                f"torchrun started {count} processes per node; this check is one per node: "
                "--nproc-per-node=1"
            )
        return {
            "nodes": int(env["WORLD_SIZE"]),
            "node": int(env["GROUP_RANK"]),
            "endpoint": f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
            "name": env.get("TORCHELASTIC_RUN_ID", "torchrun"),
            "torchrun": True,
        }
    return {}

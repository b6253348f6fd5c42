"""Measure the step time of the survivors while a replica rejoins over a slow link.

    python -m tools.bench.rejoin [--rate 200mbit] [train.seq_len=64 ...]

Three nodes of one rank are network namespaces of this machine (docs/cluster.md), which need root.
The worker of node 2 is killed and restarts, and the worker of node 0 sends it the state. The output
has the median step time of four phases: before the failure; without the failed replica, while it
restarts; while it receives the state; afterwards. The output also has the time and rate of the
transfer, and the RSS of the donor and of the joining replica.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from parallel2d.training.metrics import keys
from tools.cluster import Cluster

WORDS = (
    *("strategy=ddp", "sync.wire=int8", "checkpoint.enabled=false"),
    *("model.dim=512", "model.n_layers=8", "model.hidden_dim=1536"),
    *("train.seq_len=16", "train.global_batch_size=6", "train.steps=1000000"),
    *("train.validate_every=0", "metrics.log_every=1", "metrics.tensorboard=false"),
)
DONOR, JOINER = 0, 2
# Time limit in seconds for ten steps. With 2 GiB of state a step takes half a minute.
STEPS_S = 1200
PHASES = ("before", "without the replica", "during the stream", "after")


class Memory:
    """Samples of the time and the RSS in MiB of the workers of two nodes."""

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[float, float]]] = {DONOR: [], JOINER: []}

    def sample(self, cluster: Cluster) -> None:
        for node, samples in self._samples.items():
            sizes = cluster.execute(node, ["ps", "-eo", "rss="]).split()
            samples.append((time.time(), max(map(int, sizes)) / 1024))

    def peak(self, node: int, begin: float, end: float) -> float:
        return max(rss for at, rss in self._samples[node] if begin <= at <= end)


def phase_of(row: dict[str, Any], failed: dict[str, Any], admitted: dict[str, Any]) -> str:
    """Return the phase of the step in ``row``. Return an empty text for a step in which the replica
    fails or joins."""
    if row["step"] < failed["step"]:
        return PHASES[0]
    if failed["step"] < row["step"] < admitted["step"]:
        return PHASES[1]
    if row["step"] > admitted["step"] and not row[keys.REPLICAS_JOINED]:
        return PHASES[2]
    return PHASES[3] if row[keys.REPLICAS_JOINED] and row[keys.REPLICAS] == 3 else ""


def report(rows: list[dict[str, Any]], memory: Memory, mib: float) -> str:
    """Return the tables of one run. ``mib``: size of the state."""
    failed = next(row for row in rows if row[keys.REPLICAS] == 2)
    # The first row after the failure with more lost seconds is the row in which the replica joins.
    admitted = next(
        row for row in rows if row[keys.REPLICAS_LOST_S] > failed[keys.REPLICAS_LOST_S] + 1e-3
    )
    joined = next(row for row in rows if row[keys.REPLICAS_JOINED])
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for row in rows[2:]:
        if phase := phase_of(row, failed, admitted):
            seconds[phase].append(row[keys.STEP_S])
    lines = ["| phase | steps | step (s), median | all steps (s) |", "|---|---|---|---|"]
    for phase, found in filter(lambda item: item[1], seconds.items()):
        each = " ".join(f"{step:.1f}" for step in found)
        lines.append(f"| {phase} | {len(found)} | {statistics.median(found):.2f} | {each} |")
    begin, end = admitted[keys.UNIX_S] - admitted[keys.STEP_S], joined[keys.UNIX_S]
    waits = joined[keys.REPLICAS_LOST_S] - failed[keys.REPLICAS_LOST_S]
    lines.append(
        f"transfer: {mib:.0f} MiB in {end - begin:.1f} s, {mib / (end - begin):.1f} MiB/s; "
        f"waits of the survivors: {waits:.2f} s in {joined['step'] - admitted['step'] + 1} steps"
    )
    for name, node in (("donor", DONOR), ("joining replica", JOINER)):
        before, during = memory.peak(node, 0, begin), memory.peak(node, begin, end)
        lines.append(f"RSS of the {name}: at most {before:.0f} MiB before, {during:.0f} MiB during")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("overrides", nargs="*", help="of the job, such as train.seq_len=64")
    arguments = parser.parse_args()
    root = str(Path(__file__).resolve().parents[2])
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(3, rate=arguments.rate, environment=environment) as cluster,
    ):
        words = ["-m", "parallel2d.train", *WORDS, *arguments.overrides]
        job = cluster.run([*words, f"hydra.run.dir={folder}/run"], launcher="own", cwd=folder)
        job.wait_for_step(10, STEPS_S)
        memory = Memory()
        memory.sample(cluster)
        cluster.kill_worker(JOINER, 0)
        while not job.rows()[-1][keys.REPLICAS_JOINED]:
            memory.sample(cluster)
            time.sleep(0.5)
        job.wait_for_step(job.step() + 8, STEPS_S)
        parameters = re.findall(r": ([\d,]+) parameters", job.output(DONOR))[0]
        # The fp32 value and two moments of each parameter
        print(report(job.rows(), memory, 12 * int(parameters.replace(",", "")) / 2**20))


if __name__ == "__main__":
    main()

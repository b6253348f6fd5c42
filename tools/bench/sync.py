"""Measure step time and bytes of every sync method on nodes with a slow link, in one job.

    python tools/bench/sync.py [--rate 200mbit] [--nodes 2] [--rounds 3] [--methods fp32,bf16,...] [--vocabulary 8192] [--json FILE]

Nodes are network namespaces of this machine (docs/cluster.md), which need root. All methods are in
one job and take turns. A round has `EVERY` steps (one period) for methods with diloco, and
`--steps` steps for all other methods. The columns for each method are:

* the step time: the median for methods that exchange in every step, and the mean over a period for
  diloco;
* the ratio of the step time to flat sharding and to fp32;
* the share of the time that rank 0 does not wait for other nodes;
* the bytes that a node sends per step, from the kernel's counters, in units of an exact fp32 all-reduce;
* the predicted bytes of the replicate axis (flat sharding has none).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.slow_link import SEQ, VOCABULARY, build, measure  # noqa: E402

EVERY = 30
MARK = "SYNC "
# strategy, and the values of the section `sync`
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "flat": ("zero3", {}),
    "fp32": ("hybrid", {}),
    "bf16": ("hybrid", {"wire": "bf16"}),
    "int8": ("hybrid", {"wire": "int8"}),
    "int4": ("hybrid", {"wire": "int4", "warmup": 0}),
    "split": ("hybrid_full", {}),
    "split_bf16": ("hybrid_full", {"wire": "bf16"}),
    "split_int8": ("hybrid_full", {"wire": "int8"}),
    "split_int4": ("hybrid_full", {"wire": "int4", "warmup": 0}),
    "diloco": ("hybrid", {"name": "diloco"}),
    "diloco_int8": ("hybrid", {"name": "diloco", "wire": "int8"}),
    "diloco_int4": ("hybrid", {"name": "diloco", "wire": "int4"}),
    "streaming_int4": ("hybrid", {"name": "diloco", "wire": "int4", "fragments": 3, "delay": 5}),
}  # fmt: skip


class Bench:
    """One model with one method."""

    def __init__(self, strategy: str, words: dict[str, Any], vocabulary: int) -> None:
        from parallel2d import (
            MeshSpec,
            ParallelConfig,
            attach_optimizer,
            build_mesh,
            mesh_shape,
            parallelize,
            updated_parameters,
        )
        from parallel2d.base.config import SyncConfig
        from parallel2d.parallel.cost.traffic import exact_bytes, predicted_bytes
        from parallel2d.parallel.parallelize.layout import resolve
        from parallel2d.training.metrics.communication import CommunicationMeter

        words = {"every": EVERY, **words} if words.get("name") == "diloco" else words
        mesh = build_mesh(MeshSpec(), strategy, allow_cross_node=True)
        settings = ParallelConfig(strategy, sync=SyncConfig(**words), allow_cross_node=True)
        plain = build(vocabulary)
        layout = resolve(settings, mesh_shape(mesh), plain, mesh=mesh)
        self.model = parallelize(plain, mesh, settings)
        self.optimizer = torch.optim.SGD(updated_parameters(self.model), lr=0.01)
        attach_optimizer(self.model, self.optimizer)
        self.is_periodic = words.get("name") == "diloco"
        ranks = dist.get_world_size() // mesh.size(0) if mesh.size(0) > 1 else 1
        # The sum over the ranks of a node
        self.predicted = predicted_bytes(layout)["comm/replicate/bytes"] * ranks
        self.exact = exact_bytes(layout) * ranks
        self.meter = CommunicationMeter(mesh)
        # The axis that crosses nodes
        self.crossing = 0 if mesh.size(0) > 1 else 1
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(0, vocabulary, (1, SEQ + 1), generator=generator)

    def step(self) -> None:
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measured(self, step: Callable[[], None], steps: int) -> tuple[list[float], float, float]:
        """Return the seconds of each step, the bytes that this node sent per step, and the seconds that this rank waited for others."""
        self.meter.install()
        self.meter.start()
        seconds, sent = measure(step, steps)
        # bytes, calls, seconds, exposed seconds of each axis: replicate, shard, tensor
        exposed_by_axis = self.meter.read()[3::4]
        waited = exposed_by_axis[self.crossing]
        self.meter.remove()
        return seconds, sent, waited


def worker(names: list[str], rounds: int, steps: int, vocabulary: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    benches = {name: Bench(*METHODS[name], vocabulary) for name in names}
    found: dict[str, list[tuple[list[float], float, float]]] = {name: [] for name in names}
    for bench in benches.values():
        # Run one period first, so that the exchange has run once.
        for _ in range(EVERY if bench.is_periodic else 1):
            bench.step()
    for number in range(rounds):
        for name in names if number % 2 else names[::-1]:
            bench = benches[name]
            count = EVERY if bench.is_periodic else steps
            found[name].append(bench.measured(bench.step, count))
    facts = {
        name: {
            "rounds": found[name],
            "predicted": bench.predicted,
            "exact": bench.exact,
            "periodic": bench.is_periodic,
        }
        for name, bench in benches.items()
    }
    if dist.get_rank() == 0:
        print(MARK + json.dumps(facts), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def summary(facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures of one run by method."""
    exact = max(each["exact"] for each in facts.values())
    rows = {}
    for name, each in facts.items():
        all_seconds = [value for seconds, _, _ in each["rounds"] for value in seconds]
        middle = statistics.fmean if each["periodic"] else statistics.median
        rows[name] = {
            "step_s": middle(all_seconds),
            "computing": 1 - sum(waited for _, _, waited in each["rounds"]) / sum(all_seconds),
            "bytes": statistics.fmean(sent for _, sent, _ in each["rounds"]) / exact,
            "predicted": each["predicted"] / exact,
        }
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "| method | step (s) | share of flat | share of fp32 | computing | bytes | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        shares = [
            f"{row['step_s'] / rows[base]['step_s']:.3f}" if base in rows else "-"
            for base in ("flat", "fp32")
        ]
        lines.append(
            f"| {name} | {row['step_s']:.3f} | {' | '.join(shares)} | {row['computing']:.1%} | "
            f"{row['bytes']:.4f} | {row['predicted']:.4f} |"
        )
    return "\n".join(lines)


def run(
    nodes: int,
    ranks: int,
    rate: str,
    names: list[str],
    rounds: int,
    steps: int,
    vocabulary: int = VOCABULARY,
) -> dict[str, dict[str, float]]:
    """Run one job and return its summary."""
    from tools.cluster import Cluster

    words = [__file__, "--worker", "--methods", ",".join(names), "--rounds", str(rounds)]
    words += ["--steps", str(steps), "--vocabulary", str(vocabulary)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with Cluster(nodes, ranks, rate=rate, environment=environment) as cluster:
        cluster.run(words).check(7200.0)
        text = cluster.log_path(0).read_text(errors="replace")
    line = next(line for line in text.splitlines() if MARK in line)
    return summary(json.loads(line.partition(MARK)[2]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="per node")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="per round, of methods without period")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument(
        "--vocabulary", type=int, default=VOCABULARY, help="a small one: few values in int8 of int4"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the numbers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.methods.split(",")
    if arguments.worker:
        worker(names, arguments.rounds, arguments.steps, arguments.vocabulary)
        return 0
    rows = run(
        arguments.nodes,
        arguments.ranks,
        arguments.rate,
        names,
        arguments.rounds,
        arguments.steps,
        arguments.vocabulary,
    )
    print(f"{arguments.nodes} nodes x {arguments.ranks} ranks, {arguments.rate}")
    print(table(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare the bytes that a node sends per step with the theory, for each strategy: ``python -m
tools.cluster.traffic --nodes 2 --nodes 4``.

Each layout trains twice on the same cluster: one step, and several steps. The difference between
the kernel's counters is the traffic of the additional steps, because both runs have the same
traffic at the start. Losses are compared with a run on one node. The output is a Markdown table.
The seconds depend on the machine, because all nodes share its cores; the bytes do not depend on the
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from tools.cluster.cluster import Cluster
from tools.cluster.leftovers import exit_on_signals
from tools.cluster.network import ClusterError, difference

STRATEGIES = ("hybrid", "hybrid_zero2", "ddp", "zero3")
# Sequences; all layouts use one micro-batch, because flat sharding has collectives in each
# micro-batch
GLOBAL_BATCH = 8
WORDS = (
    "model.dim=256", "model.hidden_dim=704", "train.seq_len=16", f"train.global_batch_size={GLOBAL_BATCH}",
    "train.validate_every=0", "scheduler=constant", "checkpoint.enabled=false", "metrics.tensorboard=false", "metrics.console=silent",
)  # fmt: skip
FEW = 1  # steps of the run that is subtracted


def theory(strategy: str, nodes: int, ranks: int, root: float = 0.0) -> float:
    """Return the bytes that a node sends to others per step with gloo, in units of the gradient's bytes (4 x parameters in fp32).

    ``root`` is the share of the root group in the parameters. zero3 gathers this group only once.

    A ring of n members moves (n-1)/n of the payload per member for an all-gather and twice as much
    for an all-reduce. gloo's reduce-scatter costs an all-reduce. In a ring over all ranks, each
    node sends to another node on only one hop. In the rings of the replicate axis, every hop goes
    to another node, and each ring has 1/ranks of the payload.
    """
    world = nodes * ranks
    if strategy in ("hybrid", "hybrid_zero2"):
        return 2 * (nodes - 1) / nodes
    if strategy == "ddp":
        return 2 * (world - 1) / world
    assert strategy == "zero3"  # all-gather in forward and in backward, reduce-scatter
    return (4 - root) * (world - 1) / world


def _root_share(run_dir: Path, parameters: int) -> float:
    """Return the share of embedding, last norm and head in the parameters of a Llama."""
    model = OmegaConf.load(run_dir / ".hydra" / "config.yaml").model
    return (2 * model.vocab_size + 1) * model.dim / parameters


@dataclass(frozen=True)
class Traffic:
    """Measured traffic of one layout."""

    strategy: str
    nodes: int
    expected: float  # from `theory`
    units: list[float]  # measured per node, in the units of `theory`
    losses: list[float]  # of the longer run
    step_s: float  # median


def _train(
    cluster: Cluster, strategy: str, steps: int, run_dir: Path, words: Sequence[str], timeout: float
) -> None:
    micro, rest = divmod(GLOBAL_BATCH, sum(cluster.ranks))
    if rest:
        raise ClusterError(
            f"{sum(cluster.ranks)} ranks do not divide the global batch of {GLOBAL_BATCH} sequences"
        )
    settings = [
        f"strategy={strategy}",
        f"train.micro_batch_size={micro}",
        f"train.steps={steps}",
        f"hydra.run.dir={run_dir}",
    ]
    cluster.run(["-m", "parallel2d.train", *words, *settings]).check(timeout)


def _rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def reference_losses(
    steps: int, folder: Path, words: Sequence[str] = WORDS, timeout: float = 300.0
) -> list[float]:
    """Return the losses of the same job on one node with two ranks."""
    with Cluster(1, 2) as cluster:
        _train(cluster, "ddp", steps, folder / "reference", words, timeout)
    return [row["loss"] for row in _rows(folder / "reference")]


def measure(
    strategy: str,
    nodes: int,
    ranks: int,
    rate: str | None,
    steps: int,
    folder: Path,
    words: Sequence[str] = WORDS,
    timeout: float = 300.0,
) -> Traffic:
    """Train ``FEW`` and ``FEW + steps`` steps with run directories in ``folder``; return the traffic."""
    counted = []
    with Cluster(nodes, ranks, rate=rate) as cluster:
        for length in (FEW, FEW + steps):
            before = cluster.counters()
            _train(
                cluster, strategy, length, folder / f"{strategy}-{nodes}-{length}", words, timeout
            )
            counted.append(difference(cluster.counters(), before))
    long = folder / f"{strategy}-{nodes}-{FEW + steps}"
    parameters = json.loads((long / "layout.json").read_text())["parameters"]
    expected = theory(strategy, nodes, ranks, _root_share(long, parameters))
    sent = difference(counted[1], counted[0])
    rows = _rows(long)
    return Traffic(
        strategy, nodes, expected,
        [devices["eth0"]["tx_bytes"] / steps / (4 * parameters) for devices in sent.values()],
        [row["loss"] for row in rows], statistics.median(row["time/step_s"] for row in rows[1:]),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.cluster.traffic", description=__doc__)
    parser.add_argument("--nodes", type=int, action="append", help="can be repeated; default: 2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--strategy", action="append", choices=STRATEGIES, help="can be repeated; default: all"
    )
    options = parser.parse_args(arguments)
    try:
        return _table(options)
    except ClusterError as error:
        print(f"tools.cluster.traffic: {error}", file=sys.stderr)
        return 2


def _table(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="p2d-traffic-") as name:
        folder = Path(name)
        expected = reference_losses(FEW + options.steps, folder)
        print(
            "| nodes x ranks | strategy | theory | measured | off | step (s) | largest loss difference |"
        )
        print("|---|---|---|---|---|---|---|", flush=True)
        for nodes in options.nodes or [2]:
            for strategy in options.strategy or STRATEGIES:
                found = measure(strategy, nodes, options.ranks, options.rate, options.steps, folder)
                low, high = min(found.units), max(found.units)
                deviation = max(
                    abs(loss - other) for loss, other in zip(found.losses, expected, strict=True)
                )
                measured = (
                    f"{low:.4f}" if f"{low:.4f}" == f"{high:.4f}" else f"{low:.4f}–{high:.4f}"
                )
                off = max(abs(value / found.expected - 1) for value in found.units)
                print(f"| {nodes} x {options.ranks} | {strategy} | {found.expected:g} | {measured} | {off:.2%} | "
                      f"{found.step_s:.2f} | {deviation:.1e} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())

"""CPU-seconds of Muon's updates on 1, 2 and 4 ranks, all ranks together, against one process.

    OMP_NUM_THREADS=1 python tools/bench/muon.py [--rounds 5] [--strategies zero3 hybrid]

A Llama whose hidden matrices are far more work than anything else in an update. Each number of ranks has processes of its own. They
take turns, so that whatever else the machine does falls on all of them; the figures are medians of the rounds. *Iterations* are the
CPU-seconds of the thread inside the Newton-Schulz iteration, *update* those of all threads of the process in ``optimizer.step()``: the
momentum, the sending and AdamW's part too. *Fullest rank* is the share of the iterations' CPU-seconds on the rank that has most of
them; even shares are 1 / ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from torch import nn
from workers import Pools

from parallel2d import MeshSpec, ParallelConfig, build_mesh, build_optimizer
from parallel2d.config import OPTIMIZERS
from parallel2d.models import llama
from parallel2d.optimizer import muon
from parallel2d.parallelize import parallelize

LLAMA = {
    "dim": 512,
    "n_layers": 8,
    "n_heads": 8,
    "n_kv_heads": 4,
    "hidden_dim": 1408,
    "vocab_size": 320,
    "max_seq_len": 64,
}
UPDATES = 2  # in a round


def new_llama() -> nn.Module:
    torch.manual_seed(0)
    return llama.Llama(**LLAMA)


def prepare(strategy: str, ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, with gradients, and its optimizer. One rank is a plain process without a mesh."""
    model: nn.Module = new_llama()
    if ranks > 1:
        mesh = build_mesh(MeshSpec(), strategy)
        model = parallelize(model, mesh, ParallelConfig(strategy))
    optimizer = build_optimizer(model, OPTIMIZERS["muon"])
    tokens = torch.randint(0, 320, (2, 32), generator=torch.Generator().manual_seed(1))
    model(tokens).square().mean().backward()
    return model, optimizer


def measure(strategy: str, ranks: int) -> dict[str, float]:
    """CPU-seconds of one update on this rank, and how many matrices it iterated on."""
    model, optimizer = prepare(strategy, ranks)
    original = muon._zeropower_via_newtonschulz
    found = {"iterations": 0.0, "update": 0.0, "matrices": 0.0}

    def timed(*args: Any) -> Any:
        begin = time.thread_time()
        result = original(*args)
        found["iterations"] += (time.thread_time() - begin) / UPDATES
        found["matrices"] += 1 / UPDATES
        return result

    optimizer.step()  # makes the state
    muon._zeropower_via_newtonschulz = timed
    try:
        begin = time.process_time()
        for _ in range(UPDATES):
            optimizer.step()
        found["update"] = (time.process_time() - begin) / UPDATES
    finally:
        muon._zeropower_via_newtonschulz = original
    del model
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--strategies", nargs="+", default=["zero3", "hybrid", "hybrid_full", "ddp"]
    )
    options = parser.parse_args()
    pools = Pools()
    layouts: list[tuple[str, int]] = [("one process", 1)]
    for strategy in options.strategies:
        layouts += [(strategy, 2), (strategy, 4)]
    sums: dict[tuple[str, int], list[dict[str, float]]] = {layout: [] for layout in layouts}
    for _ in range(options.rounds):
        for strategy, ranks in layouts:
            by_rank = pools.run(ranks, measure, strategy, ranks)
            total = {key: sum(found[key] for found in by_rank) for key in by_rank[0]}
            fullest = max(found["iterations"] for found in by_rank)
            total["fullest"] = fullest / total["iterations"]
            sums[strategy, ranks].append(total)
    pools.close()
    print_table(sums)
    return 0


def print_table(sums: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    alone = middle(sums["one process", 1])
    print(
        "| layout | ranks | matrices | iterations, s | ratio | update, s | ratio | fullest rank |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (strategy, ranks), rounds in sums.items():
        found = middle(rounds)
        print(
            f"| {strategy} | {ranks} | {found['matrices']:.0f} | {found['iterations']:.3f} "
            f"| {found['iterations'] / alone['iterations']:.3f} | {found['update']:.3f} "
            f"| {found['update'] / alone['update']:.3f} | {found['fullest']:.2f} |",
            flush=True,
        )


def middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians."""
    return {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}


if __name__ == "__main__":
    sys.exit(main())

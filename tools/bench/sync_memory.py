"""Memory of a rank under zero3, hybrid and hybrid_full: what is held between steps, and the peak of a step.

    python tools/bench/sync_memory.py [--replicas 2] [--shards 2]

Ranks are processes of this machine; a small Llama with AdamW in fp32. Optimizer state and parameters are counted from their tensors,
the peak from the allocator's events in the profiler, in a step that is not the first. The largest rank of each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.activation_checkpointing import allocated  # noqa: E402

SIZES = {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 8, "hidden_dim": 768}
VOCABULARY, SEQ = 4096, 64


def measure(strategy: str, sizes: dict[str, int], wire: str) -> list[float]:
    from parallel2d import (
        MeshSpec,
        ParallelConfig,
        build_mesh,
        build_optimizer,
        parallelize,
        updated_parameters,
    )
    from parallel2d.config import OptimizerConfig, SyncConfig
    from parallel2d.models.llama import Llama

    mesh = build_mesh(MeshSpec(**sizes), strategy)
    torch.manual_seed(0)
    model = Llama(vocab_size=VOCABULARY, max_seq_len=SEQ, **SIZES)
    model = parallelize(model, mesh, ParallelConfig(strategy, sync=SyncConfig(wire=wire)))
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens = torch.randint(0, VOCABULARY, (1, SEQ + 1))

    def step() -> None:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    parameters = sum(p.to_local().nbytes for p in model.parameters())
    # Of updates that are sent rounded the owner keeps its rows unrounded; others are views.
    masters = 0
    if wire == "bf16":
        masters = sum(p.to_local().nbytes for p in updated_parameters(model))
    state = sum(
        value.to_local().nbytes
        for entries in optimizer.state.values()
        for value in entries.values()
        if hasattr(value, "to_local")
    )
    _, peak, _ = allocated(step)
    held = [value / 2**20 for value in (parameters, masters, state)]
    found = torch.tensor([*held, peak], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    values: list[float] = found.tolist()
    return values


def worker(rank: int, world: int, replicas: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    split = {"replicate": replicas, "shard": world // replicas}
    rows = {
        "zero3": measure("zero3", {"replicate": 1, "shard": world}, "auto"),
        "hybrid": measure("hybrid", split, "auto"),
        "hybrid_full": measure("hybrid_full", split, "auto"),
        "hybrid_full, bf16": measure("hybrid_full", split, "bf16"),
    }
    if rank == 0:
        print(f"{replicas} replicas x {world // replicas} shards, MiB of the largest rank")
        print(
            "| strategy | parameters | unrounded rows | optimizer state | peak of a step beyond these |"
        )
        print("|---|---|---|---|---|")
        for name, found in rows.items():
            print(f"| {name} | {' | '.join(f'{value:.2f}' for value in found)} |")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    arguments = parser.parse_args()
    world = arguments.replicas * arguments.shards
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (world, arguments.replicas, f"{folder}/store"), nprocs=world)
    return 0


if __name__ == "__main__":
    sys.exit(main())

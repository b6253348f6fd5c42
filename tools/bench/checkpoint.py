"""What a checkpoint costs: seconds the loop is blocked by an asynchronous save over those of a synchronous
one, and bytes.

    python tools/bench/checkpoint.py [--ranks 2] [--mib 64] [--rounds 5] [--folder PATH]

Starts gloo ranks on this machine, shards a model of ``--mib`` MiB of fp32 parameters over them with AdamW (so
3x that is state) and saves it alternately both ways, each asynchronous save left to finish before the next is
measured. The first save of either kind allocates the staging buffers and is shown apart. Prints one table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from parallel2d import MeshSpec, build_mesh
from parallel2d.checkpoint import Checkpointer
from parallel2d.config import CheckpointConfig


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    """One rank: rank 0 puts the measurements into ``results``."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    mesh = build_mesh(MeshSpec(replicate=1), "hybrid")
    width = 1024
    layers = max(options.mib * 2**20 // (4 * width * width), 1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    savers = {
        name: Checkpointer(
            CheckpointConfig(every=1, keep_last=1, asynchronous=name == "asynchronous"),
            os.path.join(folder, name),
            mesh,
            model,
            optimizer,
        )
        for name in ("synchronous", "asynchronous")
    }
    blocked: dict[str, list[float]] = {name: [] for name in savers}
    published: dict[str, list[float]] = {name: [] for name in savers}
    for step in range(1, options.rounds + 2):
        for name, saver in savers.items():
            dist.barrier()
            begin = time.perf_counter()
            saver.save_if_due(step, {"samples": step})
            blocked[name].append(saver.blocked_s)
            saver.finish()
            published[name].append(time.perf_counter() - begin)
    saver = savers["asynchronous"]
    dist.barrier()
    begin = time.perf_counter()
    saver.restore()
    restored = time.perf_counter() - begin
    if rank == 0:
        results.put((blocked, published, restored, saver.bytes_written / len(saver.published), state))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="MiB of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to save; default: the temporary folder")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="checkpoint-bench-", dir=options.folder)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=measure, args=(rank, options, folder, results)) for rank in range(options.ranks)]
    try:
        for process in ranks:
            process.start()
        blocked, published, restored, written, state = results.get(timeout=600)
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{options.ranks} ranks, {state / 2**20:.0f} MiB of state, {options.rounds} rounds after the first\n")
    print("| save | loop blocked: first | median | worst | until published: median |")
    print("|---|---|---|---|---|")
    for name in blocked:
        first, *rest = blocked[name]
        print(f"| {name} | {first:.3f} s | {statistics.median(rest):.3f} s | {max(rest):.3f} s "
              f"| {statistics.median(published[name][1:]):.3f} s |")  # fmt: skip
    ratio = statistics.median(blocked["asynchronous"][1:]) / statistics.median(blocked["synchronous"][1:])
    print(f"\nblocked, asynchronous over synchronous: {ratio:.3f}")
    print(f"bytes written over bytes of state: {written / state:.4f}")
    print(f"verify and restore: {restored:.2f} s")


if __name__ == "__main__":
    main()

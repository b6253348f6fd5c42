"""Measure the cost of a checkpoint: seconds that synchronous, asynchronous and in-memory saves block the loop; bytes.

    python tools/bench/checkpoint.py [--ranks 2] [--mib 64] [--rounds 5] [--folder PATH]

The script starts gloo ranks on this machine and shards a model of ``--mib`` MiB of fp32 parameters
over them. With AdamW, the state is 3x as large. It saves in turn to disk synchronously, to disk
asynchronously, and to memory. Each save finishes before the next is measured. The first save of
each kind allocates its buffers and has a separate column. In memory the first two saves allocate;
the column has one of them. The output is one table.
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
from parallel2d.base.config import CheckpointConfig
from parallel2d.base.launcher_environment import MEMORY_DIR
from parallel2d.training.checkpoint import Checkpointer, in_memory_checkpoints
from parallel2d.training.checkpoint.in_memory import used


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    """Run one rank; rank 0 puts the measurements into ``results``."""
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
    state = 3 * sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )

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

    def in_memory_only() -> Checkpointer:
        settings, run_dir = (
            CheckpointConfig(every=0, memory_every=1),
            os.path.join(folder, "memory"),
        )
        copies = in_memory_checkpoints(settings, run_dir, mesh)
        return Checkpointer(settings, run_dir, mesh, model, optimizer, copies=copies)

    savers["memory"] = in_memory_only()
    blocked: dict[str, list[float]] = {name: [] for name in savers}
    published: dict[str, list[float]] = {name: [] for name in savers}
    for step in range(1, options.rounds + 2):
        for name, saver in savers.items():
            dist.barrier()
            begin = time.perf_counter()
            saver.save_if_due(step, {"samples": step})
            blocked[name].append(saver.blocked_s)
            if saver.in_memory is not None:
                saver.in_memory.wait()
            else:
                saver.finish()
            published[name].append(time.perf_counter() - begin)
    saver = savers["asynchronous"]
    dist.barrier()
    begin = time.perf_counter()
    saver.restore()
    restored = time.perf_counter() - begin
    dist.barrier()
    in_memory = used(os.environ[MEMORY_DIR])
    again = in_memory_only()
    dist.barrier()
    begin = time.perf_counter()
    found = again.restore(restarted=True)
    restored_memory = time.perf_counter() - begin
    assert found is not None
    assert found["step"] == options.rounds + 1
    again.finish()
    if rank == 0:
        written = saver.bytes_written / len(saver.published)
        results.put((blocked, published, restored, restored_memory, written, in_memory, state))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="MiB of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", default=None, help="where to save; default: the temporary folder"
    )
    parser.add_argument("--memory", default="/dev/shm", help="where copies in memory go")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="checkpoint-bench-", dir=options.folder)
    os.environ[MEMORY_DIR] = memory = tempfile.mkdtemp(
        prefix="checkpoint-bench-", dir=options.memory
    )
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=measure, args=(rank, options, folder, results))
        for rank in range(options.ranks)
    ]
    try:
        for process in ranks:
            process.start()
        blocked, published, restored, restored_memory, written, in_memory, state = results.get(
            timeout=600
        )
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    print(
        f"{options.ranks} ranks, {state / 2**20:.0f} MiB of state, {options.rounds} rounds after the first\n"
    )
    print("| save | loop blocked: first | median | worst | until published: median |")
    print("|---|---|---|---|---|")
    for name in blocked:
        first, *rest = blocked[name]
        print(f"| {name} | {first:.3f} s | {statistics.median(rest):.3f} s | {max(rest):.3f} s | "
              f"{statistics.median(published[name][1:]):.3f} s |")  # fmt: skip
    ratio = statistics.median(blocked["asynchronous"][1:]) / statistics.median(
        blocked["synchronous"][1:]
    )
    print(f"\nblocked, asynchronous over synchronous: {ratio:.3f}")
    ratio = statistics.median(blocked["memory"][1:]) / statistics.median(blocked["synchronous"][1:])
    print(f"blocked, memory over synchronous: {ratio:.3f}")
    print(f"bytes written over bytes of state: {written / state:.4f}")
    print(f"bytes in memory over twice the bytes of state: {in_memory / (2 * state):.4f}")
    print(f"verify and restore: {restored:.2f} s from disk, {restored_memory:.2f} s from memory")


if __name__ == "__main__":
    main()

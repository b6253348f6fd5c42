"""Measure the wait of a step for a checkpoint on one device: steps with and without a save.

    python tools/bench/gpu/checkpoint_stall.py [--steps 40] [--every 10] [--folder FOLDER]

On a GPU, the model is the Llama of 1B parameters in bf16 with fused AdamW, 2 x 1024 tokens. On the
CPU, a tiny Llama only shows that the script runs. The step that saves copies the checkpoint to the
host. The checkpoint is written to ``--folder`` (default: the folder for temporary files) while
later steps run. *Stall* is the median of the steps that save, minus the median of all other steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from step_flops import LARGE, TINY
from torch import nn

from parallel2d import (
    Checkpointer,
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_on_meta,
    build_optimizer,
    cross_entropy_sum,
    parallelize,
    token_weight,
)
from parallel2d.base.config import CheckpointConfig, OptimizerConfig
from parallel2d.models.llama import Llama

WARM_UP = 3


def measure(
    device: torch.device, folder: str, steps: int, every: int
) -> tuple[list[float], list[float], int]:
    """Return the seconds of the steps without a save, of the steps with a save, and the bytes written."""
    llama = {**LARGE, "max_seq_len": 1024} if device.type == "cuda" else TINY
    mesh = build_mesh(MeshSpec(), "zero3", device_type=device.type)
    with build_on_meta():
        model: nn.Module = Llama(**llama)
    config = ParallelConfig("zero3", precision="bf16")
    model = parallelize(model, mesh, config, seed=0, init=model.init_weights)
    optimizer = build_optimizer(model, OptimizerConfig("adamw"))
    settings = CheckpointConfig(every=every, keep_last=1)
    checkpointer = Checkpointer(settings, folder, mesh, model, optimizer, layout={})
    tokens = torch.randint(0, llama["vocab_size"], (2, llama["max_seq_len"]), device=device)
    weight = token_weight(tokens.numel(), mesh)
    plain: list[float] = []
    saving: list[float] = []
    for step in range(1, WARM_UP + steps + 1):
        begin = time.perf_counter()
        (cross_entropy_sum(model(tokens), tokens) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save_if_due(step, {}, last=False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if step <= WARM_UP:
            continue
        if step % every:
            plain.append(seconds)
        else:
            saving.append(seconds)
    checkpointer.finish()
    return plain, saving, checkpointer.bytes_written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--folder", help="where checkpoints are written")
    options = parser.parse_args()
    if not 2 <= options.every <= options.steps:
        parser.error("--every must be at least 2 and at most --steps")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        backend = "cuda:nccl,cpu:gloo" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        run_dir = str(Path(folder) / "run")
        plain, saving, written = measure(device, run_dir, options.steps, options.every)
        dist.destroy_process_group()
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU, tiny model"
    print(f"    python {' '.join(sys.argv)}\n")
    print(f"{name}, torch {torch.__version__}; {len(saving)} checkpoints, {written:,} bytes\n")
    print("| steps | median, s | between |")
    print("|---|---|---|")
    for kind, seconds in (("that do not save", plain), ("that save", saving)):
        middle = statistics.median(seconds)
        print(f"| {kind} | {middle:.4f} | {min(seconds):.4f} and {max(seconds):.4f} |")
    print(f"\nStall: {statistics.median(saving) - statistics.median(plain):.4f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

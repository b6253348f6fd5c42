"""Measure throughput and MFU of a training step on one device: parallel2d, a hand-written `fully_shard` loop, and float8.

    python tools/bench/gpu/step_flops.py [--steps 20] [--rounds 3]

On a GPU, the model is the Llama of 1B parameters in bf16, 2 x 4096 tokens, blocks compiled, fused
AdamW, gradients clipped. On the CPU, a tiny Llama without compilation only shows that the script
runs. Each round builds, measures and frees the variants one after the other. The figures are
medians of the rounds. float8 needs torchao and a GPU with float8 units. MFU is the model's FLOPs
per second divided by the bf16 peak of the data sheet, also with float8.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_on_meta,
    build_optimizer,
    clip_gradient_norm,
    cross_entropy_sum,
    parallelize,
)
from parallel2d.base.config import CompileConfig, OptimizerConfig, PrecisionConfig
from parallel2d.models.llama import Llama
from parallel2d.parallel.cost.flops import count_flops, peak_flops
from parallel2d.parallel.parallelize.float8 import CAPABILITY

LARGE = {
    "dim": 2048,
    "n_layers": 16,
    "n_heads": 32,
    "n_kv_heads": 8,
    "hidden_dim": 8192,
    "vocab_size": 128256,
    "max_seq_len": 4096,
    "tie_embeddings": True,
}
TINY = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "hidden_dim": 160,
    "vocab_size": 128,
    "max_seq_len": 32,
    "tie_embeddings": True,
}
SEQUENCES = 2
WARM_UP = 3
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

Step = Callable[[Tensor, Tensor], None]


def hand_written(llama: dict[str, Any], device: torch.device) -> Step:
    """Return the step of a hand-written `fully_shard` loop."""
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(**llama)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        if device.type == "cuda":
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor, targets: Tensor) -> None:
        logits = model(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(llama: dict[str, Any], device: torch.device, float8: str = "none") -> Step:
    """Return the same step with parallel2d."""
    mesh = build_mesh(MeshSpec(), "zero3", device_type=device.type)
    compiled = "block" if device.type == "cuda" else "none"
    precision = PrecisionConfig("bf16", "fp32", "bf16", "fp32", float8=float8)
    config = ParallelConfig("zero3", precision=precision, compile=CompileConfig(compiled))
    with build_on_meta():
        model: nn.Module = Llama(**llama)
    model = parallelize(model, mesh, config, seed=0, init=model.init_weights)
    optimizer = build_optimizer(model, OptimizerConfig("adamw", lr=ADAMW["lr"]))

    def step(tokens: Tensor, targets: Tensor) -> None:
        # `token_weight` would add a collective, which the hand-written loop does not have.
        loss = cross_entropy_sum(model(tokens), targets) / targets.numel()
        loss.backward()
        clip_gradient_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_of(step: Step, batch: tuple[Tensor, Tensor], steps: int) -> float:
    """Return the seconds of one step, the mean over ``steps``."""
    for _ in range(WARM_UP):
        step(*batch)
    synchronize(batch[0].device)
    begin = time.perf_counter()
    for _ in range(steps):
        step(*batch)
    synchronize(batch[0].device)
    return (time.perf_counter() - begin) / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def flops_of_step(llama: dict[str, Any]) -> float:
    with build_on_meta():
        model = Llama(**llama)

    def example(device: str) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(1, llama["max_seq_len"], dtype=torch.int64, device=device)
        return tokens, tokens

    flops = count_flops(
        model, example, lambda model, *given: cross_entropy_sum(model(given[0]), given[1])
    )
    assert flops is not None
    return float(flops * SEQUENCES)


def variants(device: torch.device) -> dict[str, Callable[[dict[str, Any], torch.device], Step]]:
    found: dict[str, Callable[..., Step]] = {
        "hand-written `fully_shard`": hand_written,
        "parallel2d": ours,
    }
    has_float8 = device.type == "cuda" and torch.cuda.get_device_capability() >= CAPABILITY
    if has_float8 and importlib.util.find_spec("torchao"):
        found["parallel2d, float8 tensorwise"] = lambda *given: ours(*given, float8="tensorwise")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    llama = LARGE if on_gpu else TINY
    shape = (SEQUENCES, llama["max_seq_len"])
    tokens = torch.randint(0, llama["vocab_size"], shape, device=device)
    targets = torch.randint(0, llama["vocab_size"], shape, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in variants(device)}
    with tempfile.TemporaryDirectory() as folder:
        backend = "cuda:nccl,cpu:gloo" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        for _ in range(options.rounds):
            for name, build in variants(device).items():
                step = build(llama, device)
                seconds[name].append(seconds_of(step, (tokens, targets), options.steps))
                del step
                gc.collect()
                if on_gpu:
                    torch.cuda.empty_cache()
                    torch.compiler.reset()
        dist.destroy_process_group()
    print_table(seconds, flops_of_step(llama), device)
    return 0


def print_table(seconds: dict[str, list[float]], flops: float, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, tiny model"
    peak = peak_flops(device, "bf16")
    print(f"    python {' '.join(sys.argv)}\n")
    print(f"{name}, torch {torch.__version__}\n")
    print("| step | seconds | rounds between | TFLOP/s | MFU | against hand-written |")
    print("|---|---|---|---|---|---|")
    base = statistics.median(seconds["hand-written `fully_shard`"])
    for variant, rounds in seconds.items():
        middle = statistics.median(rounds)
        mfu = f"{flops / middle / peak:.1%}" if peak else "not known"
        print(
            f"| {variant} | {middle:.4f} | {min(rounds):.4f} and {max(rounds):.4f} "
            f"| {flops / middle / 1e12:.4f} | {mfu} | {base / middle:.3f} |"
        )


if __name__ == "__main__":
    sys.exit(main())

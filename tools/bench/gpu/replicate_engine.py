"""What reducing gradients over replicas costs one device beside the bytes: parallel2d's engine and hand-written FSDP2.

    python tools/bench/gpu/replicate_engine.py [--steps 20] [--rounds 3]

One process is a rank of 2 x 2 that do not exist: collectives return at once, so what is left is the device's and the host's own work,
bucket copies, streams that wait for each other, hooks. `zero3` on two such ranks has no replicas and is what both are compared with. On a
GPU the Llama of `step_flops.py` in bf16, not compiled; without one a tiny Llama on the CPU, which shows that the script runs. *Host*: until
the last kernel of a step is queued. Variants take turns; the figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from step_flops import LARGE, SEQUENCES, TINY, WARM_UP, synchronize
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_on_meta,
    cross_entropy_sum,
    parallelize,
)
from parallel2d.base.config import PrecisionConfig
from parallel2d.models.llama import Llama
from parallel2d.parallel.cost.fake_group import fake_process_group
from parallel2d.parallel.sync.engine.replica_reducer import engines_in

# By name: the number of replicas, and the strategy; None for FSDP2's own hybrid sharding
VARIANTS: dict[str, tuple[int, str | None]] = {
    "no replicas (zero3)": (1, "zero3"),
    "hand-written FSDP2": (2, None),
    "parallel2d": (2, "hybrid"),
}


class EngineSeconds(NamedTuple):
    """Of a step. ``peak``: bytes that torch has allocated at most; 0 on the CPU."""

    device: float
    host: float
    peak: int


def parallelized(llama: dict[str, Any], replicas: int, strategy: str, device: torch.device) -> Any:
    mesh = build_mesh(
        MeshSpec(replicate=replicas, shard=2),
        strategy,
        device_type=device.type,
        allow_cross_node=True,
    )
    precision = PrecisionConfig("bf16", "fp32", "bf16", "fp32")
    with build_on_meta():
        model: Any = Llama(**llama)
    config = ParallelConfig(strategy, precision=precision)
    model = parallelize(model, mesh, config, seed=0, init=model.init_weights)
    # No other rank would answer.
    for engine in engines_in(model):
        engine.defer_agreement()
    return model


def hand_written(llama: dict[str, Any], replicas: int, device: torch.device) -> Any:
    """The same model in the same precision under FSDP2's own hybrid sharding, by block."""
    mesh = init_device_mesh(device.type, (replicas, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = Llama(**llama).to(device, torch.bfloat16)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in [*model.layers, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def measure(replicas: int, strategy: str | None, device: torch.device, steps: int) -> EngineSeconds:
    llama = LARGE if device.type == "cuda" else TINY
    with fake_process_group(2 * replicas):
        if strategy is None:
            model = hand_written(llama, replicas, device)
        else:
            model = parallelized(llama, replicas, strategy, device)
        tokens = torch.randint(
            0, llama["vocab_size"], (SEQUENCES, llama["max_seq_len"]), device=device
        )

        def step() -> None:
            cross_entropy_sum(model(tokens), tokens).backward()
            model.zero_grad()

        return timed(step, device, steps)


def timed(step: Callable[[], None], device: torch.device, steps: int) -> EngineSeconds:
    for _ in range(WARM_UP):
        step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    host = 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        queued = time.perf_counter()
        step()
        host += time.perf_counter() - queued
        synchronize(device)
    seconds = (time.perf_counter() - begin) / steps
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return EngineSeconds(seconds, host / steps, peak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rounds: dict[str, list[EngineSeconds]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, variant in VARIANTS.items():
            rounds[name].append(measure(*variant, device, options.steps))
            gc.collect()
    called = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, tiny model"
    print(f"    python {' '.join(sys.argv)}\n")
    print(f"{called}, torch {torch.__version__}\n")
    print("| engine | seconds | against no replicas | host, seconds | peak, GiB |")
    print("|---|---|---|---|---|")
    base = statistics.median(each.device for each in rounds["no replicas (zero3)"])
    for name, found in rounds.items():
        seconds = statistics.median(each.device for each in found)
        host = statistics.median(each.host for each in found)
        peak = f"{max(each.peak for each in found) / 2**30:.2f}" if found[0].peak else "-"
        print(f"| {name} | {seconds:.4f} | {seconds / base:.3f} | {host:.4f} | {peak} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

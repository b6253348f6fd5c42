"""Compare forward and backward in parallel2d with torch's DDP and FSDP2: seconds, memory and collectives of a step.

    torchrun --nproc-per-node=2 tools/bench/gpu/against_torch.py [--precision bf16] [--compile] [--steps 20] [--rounds 3]
    #     python tools/bench/gpu/against_torch.py # one device: rank 0 of 2 x 2 ranks; collectives
    # return immediately


Both sides have the same parameter sizes, dtypes, groups of parameters and loss. The all-reduce of
used parameters in parallel2d has no equivalent in torch and is omitted. The table has the number of
collectives of each kind, to show that both sides have the same collectives. The model on GPUs is
the Llama of `step_flops.py`; on CPU a tiny Llama shows that the script runs. *Host* is the time
until the last kernel of a step is queued. Variants take turns; the figures are medians of the
rounds. DDP reduces gradients in the dtype of the parameters and is compared only in fp32.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from step_flops import LARGE, SEQUENCES, TINY, WARM_UP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallel2d import MeshSpec, ParallelConfig, build_mesh, build_on_meta, parallelize, setup
from parallel2d.base.config import CompileConfig
from parallel2d.base.device import choose_device, memory_stats, name_of, synchronize
from parallel2d.models.llama import Llama
from parallel2d.parallel.cost.fake_group import fake_process_group
from parallel2d.parallel.sync.engine.replica_reducer import engines_in

Step = Callable[[], None]


class Measured(NamedTuple):
    """Figures of one step."""

    device: float  # seconds until the device has finished
    host: float  # seconds until the last kernel is queued
    peak: int  # peak bytes that torch has allocated so far; 0 on the CPU


def sizes_of(strategy: str) -> tuple[int, int]:
    """Return the number of replicas and of shards."""
    ranks = dist.get_world_size()
    return {"ddp": (ranks, 1), "zero3": (1, ranks), "hybrid": (2, ranks // 2)}[strategy]


def parallelized(
    strategy: str, sizes: tuple[int, int], device: torch.device, precision: str, compiled: bool
) -> Any:
    """Return the model in parallel2d."""
    mesh = build_mesh(
        MeshSpec(replicate=sizes[0], shard=sizes[1]),
        strategy,
        device_type=device.type,
        allow_cross_node=True,
    )
    with build_on_meta():
        model: Any = Llama(**llama_for(device))
    config = ParallelConfig(strategy, precision=precision, allow_cross_node=True)
    if compiled:
        config.compile = CompileConfig("block", backend_for(device))
    model = parallelize(model, mesh, config, seed=0, init=model.init_weights)
    for engine in engines_in(model):
        engine.defer_status()
    return model


def hand_written(strategy: str, device: torch.device, precision: str, compiled: bool) -> Any:
    """Return the model in DDP, or by block in FSDP2 on one axis or two."""
    with torch.device(device):
        model: Any = Llama(**llama_for(device))
    if compiled:
        for block in model.layers:
            block.compile(backend=backend_for(device))
    if strategy == "ddp":
        return DistributedDataParallel(model)
    names = ("replicate", "shard") if strategy == "hybrid" else ("shard",)
    mesh = init_device_mesh(device.type, sizes_of(strategy)[-len(names) :], mesh_dim_names=names)
    computes = torch.bfloat16 if precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(computes, torch.float32)
    for block in [*model.layers, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return model


def llama_for(device: torch.device) -> dict[str, Any]:
    return TINY if device.type == "cpu" else LARGE


def backend_for(device: torch.device) -> str:
    """Return the compiler: inductor needs a C++ compiler for the CPU."""
    return "aot_eager" if device.type == "cpu" else "inductor"


def step_of(model: Any, device: torch.device) -> Step:
    llama = llama_for(device)
    shape = (SEQUENCES, llama["max_seq_len"])
    tokens = torch.randint(0, llama["vocab_size"], shape, device=device)

    def step() -> None:
        F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        model.zero_grad()

    return step


def timed(step: Step, device: torch.device, steps: int) -> Measured:
    for _ in range(WARM_UP):
        step()
    synchronize(device.type)
    host = 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        queued = time.perf_counter()
        step()
        host += time.perf_counter() - queued
        synchronize(device.type)
    seconds = (time.perf_counter() - begin) / steps
    peak = memory_stats(device).get("allocated_bytes.all.peak", 0)
    return Measured(seconds, host / steps, peak)


def collectives_of(step: Step) -> dict[str, int]:
    """Count the collectives of each kind that this rank begins in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = [event.name for event in profile.events() if event.name.startswith("c10d::")]
    return dict(sorted(Counter(name.removeprefix("c10d::") for name in names).items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="each block")
    options = parser.parse_args()
    if "RANK" in os.environ:
        device = setup().device
        return compare(options, device)
    device = choose_device(0)
    with fake_process_group(4):
        return compare(options, device)


def compare(options: argparse.Namespace, device: torch.device) -> int:
    strategies = ["zero3"]
    if dist.get_world_size() % 2 == 0:
        strategies.append("hybrid")
    if options.precision == "fp32" and dist.get_backend() != "fake":  # DDP refuses that one
        strategies.insert(0, "ddp")
    kind = (device, options.precision, options.compile)
    found: dict[tuple[str, str], list[Measured]] = {}
    collectives: dict[tuple[str, str], dict[str, int]] = {}
    for number in range(options.rounds):
        for strategy in strategies:
            for side in ("torch", "parallel2d") if number % 2 else ("parallel2d", "torch"):
                if side == "torch":
                    model = hand_written(strategy, *kind)
                else:
                    model = parallelized(strategy, sizes_of(strategy), *kind)
                step = step_of(model, device)
                found.setdefault((strategy, side), []).append(timed(step, device, options.steps))
                collectives[strategy, side] = collectives_of(step)
                del model, step
                gc.collect()
                torch.compiler.reset()
    if dist.get_rank() == 0:
        print_table(found, collectives, device)
    return 0


def print_table(
    found: dict[tuple[str, str], list[Measured]],
    collectives: dict[tuple[str, str], dict[str, int]],
    device: torch.device,
) -> None:
    print(f"    python {' '.join(sys.argv)}\n")
    print(f"{dist.get_world_size()} x {name_of(device)}, torch {torch.__version__}\n")
    print("| layout | side | seconds | against torch | host, seconds | peak, GiB | collectives |")
    print("|---|---|---|---|---|---|---|")
    for (strategy, side), rounds in sorted(found.items(), reverse=True):
        seconds, host = (statistics.median(each[field] for each in rounds) for field in (0, 1))
        base = statistics.median(each.device for each in found[strategy, "torch"])
        counts = ", ".join(f"{count} {kind}" for kind, count in collectives[strategy, side].items())
        peak = f"{max(each.peak for each in rounds) / 2**30:.2f}" if rounds[0].peak else "-"
        print(
            f"| {strategy} | {side} | {seconds:.4f} | {seconds / base:.3f} | {host:.4f} | {peak} "
            f"| {counts} |"
        )


if __name__ == "__main__":
    sys.exit(main())

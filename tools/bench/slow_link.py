"""Measure the step time of one model on two nodes with a slow link: flat sharding, hybrid in hand-written FSDP2, and hybrid here.

    python -m tools.bench.slow_link [--rate 200mbit] [--rounds 4] [--trace FOLDER]

Nodes are network namespaces of this machine (docs/cluster.md), which need root. All layouts are in
one job and take turns, so that other work of the machine slows all of them equally. *Bare wire* is
the time to all-reduce the gradients of a node, without a model. For each layout, the output has the
median step time, its ratio to flat sharding, and the bytes that a node sends per step in units of
the gradient's bytes. ``--trace`` writes a Chrome trace of one step of parallel2d on rank 0. It also
prints the start of each bucket (ranges ``replicate: bucket N``) and the end of the last reduction
over the shard axis.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM, VOCABULARY, LAYERS, SEQ = 256, 8192, 8, 32  # 10.5 M parameters
STRATEGIES = {"flat sharding": "zero3", "hybrid, parallel2d": "hybrid"}
MARK = "SLOW_LINK "


def build(vocabulary: int = VOCABULARY) -> nn.Module:
    from parallel2d.models.llama import Llama

    torch.manual_seed(0)
    sizes = {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": 8,
        "n_kv_heads": 8,
        "hidden_dim": 3 * DIM,
        "max_seq_len": SEQ,
    }
    return Llama(vocab_size=vocabulary, **sizes)


def parallelized(strategy: str) -> nn.Module:
    from parallel2d import MeshSpec, ParallelConfig, build_mesh, parallelize

    mesh = build_mesh(MeshSpec(), strategy, allow_cross_node=True)
    return parallelize(build(), mesh, ParallelConfig(strategy, allow_cross_node=True))


def hand_written() -> nn.Module:
    """Return the model with FSDP2's hybrid sharding; each block is a group."""
    sizes = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model: Any = build()
    for block in [*model.layers, model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return model


def stepper(model: nn.Module) -> Callable[[], None]:
    """Return a function that runs one training step of ``model``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(
        0, VOCABULARY, (1, SEQ + 1), generator=torch.Generator().manual_seed(dist.get_rank())
    )

    def step() -> None:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare_wire(elements: int) -> Callable[[], None]:
    """Return a function that all-reduces the gradients of one rank with the rank on the other node
    that has the same shard."""
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    groups = [dist.new_group(pair.tolist()) for pair in ranks.t()]
    own = groups[dist.get_rank() % ranks.shape[1]]
    data = torch.ones(elements // ranks.shape[1])
    return lambda: (dist.all_reduce(data, group=own), None)[1]


def sent_bytes() -> int:
    """Return the number of bytes that this node has sent to other nodes, from the kernel's
    counters."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "eth0":
            return int(rest.split()[8])
    raise RuntimeError("this node has no eth0: start the script without --worker")


def measure(step: Callable[[], None], steps: int) -> tuple[list[float], float]:
    """Return the seconds of each step, and the bytes that this node sends per step."""
    dist.barrier()
    time.sleep(0.2)  # packets in flight arrive
    before, seconds = sent_bytes(), []
    dist.barrier()
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    time.sleep(0.2)
    return seconds, (sent_bytes() - before) / steps


def worker(rounds: int, steps: int, trace: str | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    elements = sum(parameter.numel() for parameter in build().parameters())
    kinds = {name: stepper(parallelized(strategy)) for name, strategy in STRATEGIES.items()}
    kinds["hybrid, hand-written FSDP2"] = stepper(hand_written())
    kinds["bare wire"] = bare_wire(elements)
    for step in kinds.values():
        step()
    found: dict[str, list[tuple[list[float], float]]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in list(kinds) if number % 2 else list(kinds)[::-1]:
            found[name].append(measure(kinds[name], steps))
    found_in_trace = ""
    if trace:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            kinds["hybrid, parallel2d"]()
        if dist.get_rank() == 0:
            profile.export_chrome_trace(os.path.join(trace, "slow_link.json"))
            found_in_trace = overlap(profile)
    if dist.get_rank() == 0:
        print(
            MARK + json.dumps({"elements": elements, "found": found, "overlap": found_in_trace}),
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def overlap(profile: torch.profiler.profile) -> str:
    """Describe the starts of the buckets and the end of backward, in ms since the step's first event."""
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    first = events[0].time_range.start
    buckets = [event for event in events if event.name.startswith("replicate: bucket")]
    begun = ", ".join(f"{(event.time_range.start - first) / 1000:.0f}" for event in buckets)
    reduced = max(
        event.time_range.end
        for event in events
        if event.name.startswith("FSDP::post_backward_reduce")
    )
    return f"buckets begin after {begun} ms; backward has reduced its last group after {(reduced - first) / 1000:.0f} ms"


def table(elements: int, found: dict[str, list[tuple[list[float], float]]], overlap: str) -> str:
    medians = {
        name: statistics.median(t for seconds, _ in rounds for t in seconds)
        for name, rounds in found.items()
    }
    units = {
        name: statistics.mean(sent for _, sent in rounds) / (4 * elements)
        for name, rounds in found.items()
    }
    rows = [
        f"| {name} | {medians[name]:.3f} | {medians[name] / medians['flat sharding']:.3f} | {units[name]:.3f} |"
        for name in found
    ]
    return "\n".join(
        [
            overlap,
            "| layout | step (s) | share of flat | sent per node (gradients) |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--ranks", type=int, default=2, help="per node")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="per round and layout")
    parser.add_argument("--trace", metavar="FOLDER")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.rounds, arguments.steps, arguments.trace)
        return 0
    from tools.cluster import Cluster

    root = Path(__file__).resolve().parents[2]
    words = [
        __file__,
        "--worker",
        "--rounds",
        str(arguments.rounds),
        "--steps",
        str(arguments.steps),
    ]
    if arguments.trace:
        os.makedirs(arguments.trace, exist_ok=True)
        words += ["--trace", os.path.abspath(arguments.trace)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    with Cluster(2, arguments.ranks, rate=arguments.rate, environment=environment) as cluster:
        cluster.run(words).check(3600.0)
        text = cluster.log_path(0).read_text(errors="replace")
    line = next(line for line in text.splitlines() if MARK in line)
    print(table(**json.loads(line.partition(MARK)[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())

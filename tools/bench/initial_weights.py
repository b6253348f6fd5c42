"""Measure the seconds that initial weights take on one rank of a large job, without the job.

    python -m tools.bench.initial_weights [--model llama_405b] [--sizes 1x1024x1 ...]

For each mesh (``REPLICATExSHARDxTENSOR``) this process is rank 0 of a fake process group, whose
collectives return immediately. As in `parallelize`, it shards the model on meta, draws the values
that rank 0 must draw, packs the messages for the other ranks, and fills its local shards. No rank
draws more values than rank 0, so no rank takes longer. The script prints:

* values that rank 0 draws and keeps, and bytes that it sends;
* CPU-seconds of drawing and CPU-seconds of all other work, on one thread;
* CPU-seconds of one rank that draws all values at the same rate.

The time of the messages on a network is not measured. To estimate it, divide the bytes by the
bandwidth of the network.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from parallel2d import MeshSpec, ParallelConfig, build_mesh, parallelize
from parallel2d.base.config.composition import compose
from parallel2d.base.topology import Topology
from parallel2d.parallel.cost.fake_group import fake_process_group
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.parallel.weights.initial_values import InitialWeights
from parallel2d.training.model_families import build_model

SIZES = ("1x1024x1", "1x128x8")


def measure(name: str, replicate: int, shard: int, tensor: int) -> str:
    """Return the row of one mesh."""
    composition = compose([f"model={name}"])
    assert composition is not None
    seconds, drawn, sent = {"draw": 0.0, "write": 0.0}, 0, 0
    draw, write, all_to_all = InitialWeights.draw, InitialWeights.write, dist.all_to_all_single

    def timed_draw(*args: Any) -> list[torch.Tensor]:
        nonlocal drawn
        begin = time.process_time()
        values = draw(*args)
        seconds["draw"] += time.process_time() - begin
        drawn += sum(map(torch.numel, values))
        return values

    def timed_write(*args: Any, **options: Any) -> None:
        begin = time.process_time()
        write(*args, **options)
        seconds["write"] += time.process_time() - begin

    def counted(received: torch.Tensor, packed: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += packed.numel() * (shard - 1) // shard
        return all_to_all(received, packed, *args, **options)

    InitialWeights.draw, InitialWeights.write = timed_draw, timed_write  # type: ignore
    dist.all_to_all_single = counted
    ranks = replicate * shard * tensor
    try:
        with fake_process_group(ranks):
            parts = build_model(composition.config.model)
            model = parts.module
            mesh = build_mesh(
                MeshSpec(replicate, shard, tensor=tensor),
                topology=topology_of(ranks),
                allow_cross_node=True,
            )
            plan = parts.tensor_plan(model, tensor) if tensor > 1 else None
            parallelize(
                model,
                mesh,
                ParallelConfig("hybrid"),
                seed=0,
                init=parts.init,
                tensor_plan=plan,
                topology=topology_of(ranks),
            )
            total = sum(math.prod(each.shape) for each in model.parameters())
            kept = sum(local_part(each).numel() for each in model.parameters())
    finally:
        InitialWeights.draw, InitialWeights.write = draw, write  # type: ignore
        dist.all_to_all_single = all_to_all
    alone = total * seconds["draw"] / drawn
    cells = (
        f"{replicate} x {shard} x {tensor}", f"{drawn / 1e9:.2f}", f"{kept / 1e9:.2f}", f"{sent / 2**30:.1f}",
        f"{seconds['draw']:.1f}", f"{seconds['write'] - seconds['draw']:.1f}", f"{alone:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def topology_of(ranks: int) -> Topology:
    """Return nodes of eight ranks."""
    return Topology(tuple(f"node{rank // 8}" for rank in range(ranks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama_405b")
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    print(
        "| replicate x shard x tensor | 1e9 values drawn | 1e9 kept | GiB sent | s drawing | s other | s drawing all |"
    )
    print("|---|---|---|---|---|---|---|")
    for sizes in options.sizes:
        print(measure(options.model, *map(int, sizes.split("x"))), flush=True)


if __name__ == "__main__":
    main()

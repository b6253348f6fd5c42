"""What parallel2d costs over a hand-written FSDP2 loop: CPU-seconds per step on the same model, data and mesh, run alternately.

    python tools/bench/overhead.py [--rounds 12] [--steps 10]

Both loops live in the same four worker processes and take turns, so that whatever else the machine does falls on both. Prints, per
round and over all rounds, the ratio of CPU-seconds (user + system of all ranks); the median over rounds is the figure.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEQ, MICRO, GLOBAL = 128, 8, 32
WORLD = 4


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class HandWritten:
    """What an engineer who knows `fully_shard` writes: a 2 x 2 mesh, blocks, clipping, a loss that is read every step."""

    def __init__(self, config: Any, stream: Any, plan: Any) -> None:
        from parallel2d.models.llama import Llama

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        self.model = Llama(**config)
        for block in self.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.stream, self.plan, self.position = stream, plan, 0

    def step(self) -> None:
        (positions,) = self.plan.positions(self.position)
        batch = self.stream.read(positions)
        self.position += GLOBAL
        loss = F.cross_entropy(self.model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        loss.item()

    def close(self) -> None:
        pass


class Ours:
    """The trainer as ``python -m parallel2d.train`` builds it, everything it measures and writes included."""

    def __init__(self, run_dir: str, words: list[str], place: Any) -> None:
        from parallel2d.assemble import build_trainer
        from parallel2d.compose import Job
        from parallel2d.data import BatchFeed
        from parallel2d.mesh import Topology
        from parallel2d.runtime import Runtime

        runtime = Runtime(place, torch.device("cpu"), Topology.gather())
        self.trainer = build_trainer(Job(compose_config(words), run_dir, ()), runtime)
        self.feed = BatchFeed(self.trainer.training, self.trainer.plan, "cpu")
        self.trainer.begin(self.feed)

    def step(self) -> None:
        self.trainer.step(self.feed)

    def close(self) -> None:
        self.feed.close()
        self.trainer.recorder.close()


def compose_config(words: list[str]) -> Any:
    from hydra import compose, initialize_config_module

    from parallel2d.compose import register, to_config

    register()
    with initialize_config_module("parallel2d.conf", version_base="1.3"):
        return to_config(compose("train", overrides=words))


def worker(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    from parallel2d.launch import Place

    words = [
        "train.steps=1000000", "train.validate_every=0", "metrics.console=silent",
        f"train.global_batch_size={GLOBAL}",
        f"train.micro_batch_size={MICRO}",
        f"train.seq_len={SEQ}",
        *arguments.overrides,
    ]  # fmt: skip
    ours = Ours(folder, words, Place(rank, WORLD, rank, WORLD, 0, 1, "torchrun"))
    trainer = ours.trainer
    model = {k: v for k, v in vars(trainer.config.model).items() if k != "family"}
    theirs = HandWritten(model, trainer.training, trainer.plan)
    for _ in range(3):
        ours.step()
        theirs.step()
    ratios, pairs = [], []
    for number in range(arguments.rounds):
        used = {}
        order = (("ours", ours), ("theirs", theirs))
        for name, loop in order if number % 2 == 0 else order[::-1]:
            dist.barrier()
            begin = cpu_seconds()
            for _ in range(arguments.steps):
                loop.step()
            seconds = torch.tensor(cpu_seconds() - begin, dtype=torch.float64)
            dist.all_reduce(seconds)
            used[name] = seconds.item() / arguments.steps
        pairs.append(used)
        ratios.append(used["ours"] / used["theirs"])
        if rank == 0:
            print(f"round {number + 1:2}: ours {used['ours']:.4f}  hand-written {used['theirs']:.4f}  ratio {ratios[-1]:.4f}")
    if rank == 0:
        total = sum(p["ours"] for p in pairs) / sum(p["theirs"] for p in pairs)
        print(f"CPU-seconds per step, all ranks: median ratio {statistics.median(ratios):.4f}, ratio of sums {total:.4f}")
    ours.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("overrides", nargs="*", help="config overrides for the trainer, as for parallel2d.train")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (arguments, folder), nprocs=WORLD)
    return 0


if __name__ == "__main__":
    sys.exit(main())

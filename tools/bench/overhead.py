"""Measure the CPU-seconds per step of the trainer, relative to a hand-written FSDP2 loop with the
same model, data and mesh.

    python tools/bench/overhead.py [--rounds 12] [--steps 10] [--against unmeasured]

Each loop has four separate worker processes, so that the hooks and allocations of one loop do not
affect the other loop. The loops take turns, so that other work of the machine slows both equally.
With ``--against unmeasured`` the other loop is the same trainer without measured communication,
without TensorBoard, and with a row only every thousand steps. The output is the ratio of
CPU-seconds (user and system time of all ranks) of each round and of all rounds together. The result
is the median of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEQ, MICRO, GLOBAL = 128, 8, 32
WORLD = 4
OTHERS = {  # other loops that are the same trainer with these overrides
    "unmeasured": [
        "metrics.communication=false",
        "metrics.tensorboard=false",
        "metrics.log_every=1000",
    ],
}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class HandWritten:
    """A hand-written `fully_shard` loop on a 2 x 2 mesh. Each block is a group, gradients are
    clipped, and the loss is read in every step."""

    def __init__(self, config: Any, stream: Any, plan: Any) -> None:
        from parallel2d.models.llama import Llama

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        self.model = Llama(**config)
        for block in self.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
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
    """The trainer of ``python -m parallel2d.train``, with all measurements and files."""

    def __init__(self, run_dir: str, words: list[str], identity: Any) -> None:
        from parallel2d.base.config import Job
        from parallel2d.base.runtime import Runtime
        from parallel2d.parallel.mesh import Topology
        from parallel2d.training.assemble import build_trainer
        from parallel2d.training.data.feed import BatchFeed

        runtime = Runtime(identity, torch.device("cpu"), Topology.gather())
        self.trainer = build_trainer(Job(compose_config(words), run_dir, ()), runtime)
        self.feed = BatchFeed(self.trainer.training, self.trainer.plan, "cpu")
        gc.collect()
        gc.disable()  # as `Trainer.run` does around its steps
        self.trainer.begin(self.feed)

    def step(self) -> None:
        self.trainer.step(self.feed)
        if self.trainer.progress.step % self.trainer.config.train.gc_every == 0:
            gc.collect()

    def close(self) -> None:
        self.feed.close()
        self.trainer.recorder.close()


def compose_config(words: list[str]) -> Any:
    from hydra import compose, initialize_config_module

    from parallel2d.base.config.composition import to_config
    from parallel2d.base.config.schema import register

    register()
    with initialize_config_module("parallel2d.conf", version_base="1.3"):
        return to_config(compose("train", overrides=words))


def build(kind: str, rank: int, arguments: argparse.Namespace, folder: str) -> Any:
    """Return the loop of this process, in the process group of its kind."""
    from parallel2d.base.launcher_environment import RankIdentity
    from parallel2d.parallel.mesh_sizes import MeshShape
    from parallel2d.training.assemble import plan_batches
    from parallel2d.training.model_families import build_model
    from parallel2d.training.training_data import open_training_data

    words = [
        "train.steps=1000000", "train.validate_every=0", "metrics.console=silent",
        f"train.global_batch_size={GLOBAL}",
        f"train.micro_batch_size={MICRO}",
        f"train.seq_len={SEQ}",
        *arguments.overrides,
    ]  # fmt: skip
    if kind in OTHERS:
        folder = os.path.join(folder, kind)
        os.makedirs(folder, exist_ok=True)
        words += OTHERS[kind]
    if kind != "hand-written":
        return Ours(folder, words, RankIdentity(rank, WORLD, rank, 0, 1, "torchrun"))
    config = compose_config(words)
    model = {k: v for k, v in vars(config.model).items() if k != "family"}
    plan = plan_batches(
        config, MeshShape(replicate=2, shard=2, tensor=1), data_rank=rank, pad=False
    )
    return HandWritten(model, open_training_data(config, build_model(config.model)).train, plan)


def worker(kind: str, rank: int, arguments: argparse.Namespace, folder: str, pipe: Any) -> None:
    """For each request from ``pipe``, run ``arguments.steps`` steps and send their CPU-seconds."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store-{kind}"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    loop = build(kind, rank, arguments, folder)
    for _ in range(3):
        loop.step()
    pipe.send(None)
    while pipe.recv():
        dist.barrier()
        begin = cpu_seconds()
        for _ in range(arguments.steps):
            loop.step()
        pipe.send(cpu_seconds() - begin)
    loop.close()
    dist.barrier()
    dist.destroy_process_group()


def start(
    worker: Callable[..., None], world: int, kind: str, arguments: argparse.Namespace, folder: str
) -> list[tuple[Any, Any]]:
    """Start ``world`` workers, which send a message after warm-up; return the process and the pipe of each."""
    context = torch.multiprocessing.get_context("spawn")
    workers = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=worker, args=(kind, rank, arguments, folder, theirs), daemon=True
        )
        process.start()
        theirs.close()
        workers.append((process, ours))
    return workers


def turn(workers: list[tuple[Any, Any]], steps: int) -> float:
    """Return the CPU-seconds per step of all ranks."""
    for _, pipe in workers:
        pipe.send(True)
    return sum(pipe.recv() for _, pipe in workers) / steps


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--against", choices=("hand-written", *OTHERS), default="hand-written")
    parser.add_argument(
        "overrides", nargs="*", help="config overrides for the trainer, as for parallel2d.train"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = (arguments.against, "ours")
        worlds = {kind: start(worker, WORLD, kind, arguments, folder) for kind in kinds}
        for workers in worlds.values():
            for _, pipe in workers:
                pipe.recv()
        pairs = []
        for number in range(arguments.rounds):
            order = list(worlds) if number % 2 else list(worlds)[::-1]
            used = {kind: turn(worlds[kind], arguments.steps) for kind in order}
            pairs.append(used)
            ratio = used["ours"] / used[arguments.against]
            print(
                f"round {number + 1:2}: ours {used['ours']:.4f}  {arguments.against} {used[arguments.against]:.4f}  ratio {ratio:.4f}",
                flush=True,
            )
        for workers in worlds.values():
            for _, pipe in workers:
                pipe.send(False)
            for process, _ in workers:
                process.join()
        median = statistics.median(used["ours"] / used[arguments.against] for used in pairs)
        total = sum(used["ours"] for used in pairs) / sum(used[arguments.against] for used in pairs)
        print(
            f"CPU-seconds per step, all ranks: median ratio {median:.4f}, ratio of sums {total:.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

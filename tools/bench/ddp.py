"""Compare a step of ``strategy=ddp`` with torch's DistributedDataParallel: the same model, batch and optimizer, run alternately.

    python -m tools.bench.ddp [--pairs 8] [--steps 15] [--optimizer default|foreach|fused] [--dim 256] [--layers 4]

Each side has two gloo ranks in separate processes, one thread each. A step is forward, backward, clipping, AdamW and ``zero_grad``. The
output is CPU-seconds (user + system of all ranks) and seconds of each pair, and the median of the ratios.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F

from tools.bench.overhead import cpu_seconds, start

WORLD, VOCABULARY = 2, 320
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def build(kind: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model and its clipping function."""
    import parallel2d
    from parallel2d.models.llama import Llama

    torch.manual_seed(0)
    model = Llama(
        dim=arguments.dim,
        n_layers=arguments.layers,
        n_heads=8,
        n_kv_heads=8,
        hidden_dim=arguments.dim * 11 // 4,
        vocab_size=VOCABULARY,
        max_seq_len=arguments.seq,
        rope_theta=500000.0,
        tie_embeddings=False,
    )
    if kind == "torch":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        return wrapped, torch.nn.utils.clip_grad_norm_
    mesh = parallel2d.build_mesh(strategy="ddp")
    config = parallel2d.ParallelConfig("ddp")
    return parallel2d.parallelize(model, mesh, config), parallel2d.clip_gradient_norm


def worker(kind: str, rank: int, arguments: argparse.Namespace, folder: str, pipe: Any) -> None:
    """Run ``arguments.steps`` steps on each request of ``pipe``; answer with their CPU-seconds and seconds."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, kind), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    model, clip = build(kind, arguments)
    chosen = IMPLEMENTATIONS[arguments.optimizer]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, **chosen)
    generator = torch.Generator().manual_seed(rank)
    size = (arguments.batch, arguments.seq + 1)
    tokens = torch.randint(0, VOCABULARY, size, generator=generator)

    def step() -> float:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    # `parallelize.script_checks` examines forwards 1, 2, 4 and so on; the next ones are 64 and 128.
    losses = [step() for _ in range(33)]
    gc.collect()
    gc.freeze()
    pipe.send(losses)
    while pipe.recv():
        dist.barrier()
        cpu, begin = cpu_seconds(), time.perf_counter()
        for _ in range(arguments.steps):
            step()
        pipe.send((cpu_seconds() - cpu, time.perf_counter() - begin))
    dist.barrier()
    dist.destroy_process_group()


def turn(workers: list[tuple[Any, Any]], steps: int) -> tuple[float, float]:
    """Return the CPU-seconds of all ranks and the seconds of a step."""
    for _, pipe in workers:
        pipe.send(True)
    taken = [pipe.recv() for _, pipe in workers]
    return sum(cpu for cpu, _ in taken) / steps, max(seconds for _, seconds in taken) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--optimizer", choices=list(IMPLEMENTATIONS), default="default")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    arguments = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        kinds = ("torch", "ours")
        worlds = {kind: start(worker, WORLD, kind, arguments, folder) for kind in kinds}
        first = {kind: [pipe.recv() for _, pipe in ranks] for kind, ranks in worlds.items()}
        assert torch.allclose(*map(torch.tensor, first.values()), rtol=1e-4), first
        for number in range(arguments.pairs):
            order = list(worlds) if number % 2 else list(worlds)[::-1]
            used = {kind: turn(worlds[kind], arguments.steps) for kind in order}
            pairs = zip(used["ours"], used["torch"], strict=True)
            ratios.append([ours / torchs for ours, torchs in pairs])
            cpu, seconds = ratios[-1]
            print(f"pair {number + 1:2}: CPU {cpu:.3f}  seconds {seconds:.3f}  {used}", flush=True)
        workers = [*worlds["ours"], *worlds["torch"]]
        for _, pipe in workers:
            pipe.send(False)
        for process, _ in workers:
            process.join()
    cpu, seconds = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"ours / torch, median of {len(ratios)}: CPU-seconds {cpu:.4f}, seconds {seconds:.4f}")


if __name__ == "__main__":
    main()

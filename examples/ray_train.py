"""parallel2d in Ray Train: Ray starts the workers and their process group, parallel2d shards and
trains the model.

pip install 'parallel2d[ray]'
python examples/ray_train.py --workers 4
torchrun --nproc-per-node=4 examples/ray_train.py --no-ray

The last command runs the same loop under torchrun, with the same losses.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    accumulate,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    cross_entropy_sum,
    data_coordinate,
    mesh_shape,
    parallelize,
    token_weight,
)

VOCAB, SEQ = 64, 32


def build_model() -> nn.Module:
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(VOCAB, 64), nn.TransformerEncoder(block, 2), nn.Linear(64, VOCAB)
    )


def global_batch(step: int, size: int) -> torch.Tensor:
    """Return token ids, int64 [size, SEQ + 1]; the same for a step on any number of workers."""
    start = torch.randint(0, VOCAB, (size, 1), generator=torch.Generator().manual_seed(step))
    return (start + 3 * torch.arange(SEQ + 1)) % VOCAB


def train_steps(config: dict[str, Any]) -> list[dict[str, float]]:
    """Train on the default process group. Return ``step``, ``loss`` and ``grad_norm`` of each step,
    on every rank.

    ``config`` has the keys ``steps``, ``precision``, ``shard`` (ranks of a shard group; ``auto`` is
    the ranks of a node), ``global_batch`` and ``micro_batch`` (sequences; the latter per rank).
    """
    mesh = build_mesh(MeshSpec(shard=config["shard"]), strategy="hybrid")
    with build_on_meta():
        model = build_model()
    parallel = ParallelConfig(strategy="hybrid", bucketing="block", precision=config["precision"])
    # Do not call ray.train.torch.prepare_model: it would also wrap the model in DDP.
    model = parallelize(model, mesh, parallel, seed=0)
    # Build the optimizer after sharding: it must see the sharded parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rank, data_ranks = data_coordinate(mesh), mesh_shape(mesh).data_ranks
    rows = []
    for step in range(1, config["steps"] + 1):
        tokens = (
            global_batch(step, config["global_batch"]).chunk(data_ranks)[rank].to(mesh.device_type)
        )
        weight = token_weight(tokens[:, 1:].numel(), mesh)
        total = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
        for micro in accumulate(model, tokens.split(config["micro_batch"])):
            loss = cross_entropy_sum(model(micro[:, :-1]), micro[:, 1:])
            (loss * weight.to(loss.dtype)).backward()
            total += loss.detach() * weight
        norm = clip_gradient_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        rows.append({"step": step, "loss": total.item() / data_ranks, "grad_norm": float(norm)})
    return rows


def train_loop_per_worker(config: dict[str, Any]) -> list[dict[str, float]]:
    """Train; Ray calls this on each worker, with the process group and the device ready."""
    import ray.train

    rows = train_steps(config)
    ray.train.report(rows[-1])  # all workers must report equally often
    return rows  # Ray keeps the return value of rank 0


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--workers", type=int, default=4)
    words.add_argument("--steps", type=int, default=10)
    words.add_argument(
        "--shard", default="auto", help="ranks of a shard group (default: the ranks of a node)"
    )
    words.add_argument("--precision", default="fp32")
    words.add_argument(
        "--storage", default=None, help="where Ray writes its results (default: ~/ray_results)"
    )
    words.add_argument("--gpu", action="store_true", help="one GPU per worker")
    words.add_argument("--no-ray", action="store_true", help="under torchrun, or as one process")
    given = words.parse_args()
    config = {
        "steps": given.steps,
        "shard": given.shard if given.shard == "auto" else int(given.shard),
        "precision": given.precision,
        "global_batch": 16,
        "micro_batch": 2,
    }
    rows = (
        run_without_ray(config, given.gpu)
        if given.no_ray
        else run_with_ray(config, given.workers, given.gpu, given.storage)
    )
    for row in rows:
        print(json.dumps(row), flush=True)


def run_with_ray(
    config: dict[str, Any], workers: int, gpu: bool, storage: str | None
) -> list[dict[str, float]]:
    """Train on ``workers`` Ray workers; return the rows of rank 0."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # A cluster reports its CPUs. On one machine with fewer CPUs than workers, Ray would wait
    # without end.
    cpus = None if "RAY_ADDRESS" in os.environ else max(workers + 1, os.cpu_count() or 1)
    ray.init(num_cpus=cpus, ignore_reinit_error=True, log_to_driver=False)
    # With GPUs, parallel2d also needs gloo for exchanges of CPU tensors (ranks of a node,
    # checkpoints).
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config,
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=RunConfig(storage_path=os.path.abspath(storage) if storage else None),
    )
    rows: list[dict[str, float]] = trainer.fit().return_value
    ray.shutdown()
    return rows


def run_without_ray(config: dict[str, Any], gpu: bool) -> list[dict[str, float]]:
    """Train on the ranks of torchrun, or in one process. Return the rows on rank 0."""
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    rows = train_steps(config)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return rows if first else []


if __name__ == "__main__":
    main()

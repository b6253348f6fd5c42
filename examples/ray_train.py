"""parallel2d under Ray Train: Ray starts the workers and their process group, parallel2d's
functions shard the model and train it.

pip install 'parallel2d[ray]'
python examples/ray_train.py --workers 4
torchrun --nproc-per-node=4 examples/ray_train.py --no-ray

The last is the same loop, started by torchrun, with the same losses.
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
    """Token ids, int64 [size, SEQ + 1]; the same for a step on any number of workers."""
    start = torch.randint(0, VOCAB, (size, 1), generator=torch.Generator().manual_seed(step))
    return (start + 3 * torch.arange(SEQ + 1)) % VOCAB


def train_steps(config: dict[str, Any]) -> list[dict[str, float]]:
    """``config["steps"]`` steps on the default process group. Returns ``step``, ``loss`` and
    ``grad_norm`` of each, on every rank.

    ``shard``: ranks of a shard group, ``auto`` for those of a node. ``global_batch``,
    ``micro_batch``: in sequences, micro per rank.
    """
    mesh = build_mesh(MeshSpec(shard=config["shard"]), strategy="hybrid")
    with build_on_meta():
        model = build_model()
    parallel = ParallelConfig(strategy="hybrid", bucketing="block", precision=config["precision"])
    # not ray.train.torch.prepare_model, which would wrap it in DDP once more
    model = parallelize(model, mesh, parallel, seed=0)
    # after sharding: it must see the sharded parameters
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
    """What Ray runs on each worker. Ray has formed the process group and chosen the device."""
    import ray.train

    rows = train_steps(config)
    ray.train.report(rows[-1])  # every worker reports as often as the others
    return rows  # Ray keeps what rank 0 returns


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--workers", type=int, default=4)
    words.add_argument("--steps", type=int, default=10)
    words.add_argument(
        "--shard", default="auto", help="ranks of a shard group (default: those of a node)"
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
    """Trains on ``workers`` Ray workers; the rows of rank 0."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # A cluster tells its CPUs; on one machine with fewer than workers, Ray would wait for more for
    # ever.
    cpus = None if "RAY_ADDRESS" in os.environ else max(workers + 1, os.cpu_count() or 1)
    ray.init(num_cpus=cpus, ignore_reinit_error=True, log_to_driver=False)
    # With GPUs: gloo beside NCCL, for what parallel2d exchanges on the CPU (which ranks share a
    # node, checkpoints).
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
    """The same steps on torchrun's ranks, or alone. The rows on rank 0, nothing elsewhere."""
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

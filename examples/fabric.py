"""parallel2d in Lightning Fabric: Fabric starts the processes and moves the data, parallel2d shards
the model.

pip install 'parallel2d[lightning]'
python examples/fabric.py --devices 4
python examples/fabric.py --devices 4 --tensor 2                   # another layout: the same losses
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, TensorDataset

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    accumulate,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    cross_entropy_sum,
    parallelize,
    token_weight,
)
from parallel2d.models.llama import Llama, tensor_plan

VOCAB, SEQ, GLOBAL_BATCH, MICRO_BATCHES = 64, 32, 16, 2


def sequences(steps: int) -> TensorDataset:
    """Return the global batches of all steps: int64 [steps * GLOBAL_BATCH, SEQ + 1]."""
    start = torch.randint(
        0, VOCAB, (steps * GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(0)
    )
    return TensorDataset((start + 3 * torch.arange(SEQ + 1)) % VOCAB)


def parallelize_fn(model: nn.Module, fabric_mesh: DeviceMesh, strategy: str) -> nn.Module:
    """Shard the model; Fabric calls this with its mesh of the axes ``data_parallel`` and
    ``tensor_parallel``.

    Fabric has one data axis. `build_mesh` splits this axis into replicate and shard by the detected
    nodes. Tensor ranks stay next to each other on both meshes, so Fabric's sampler gives all of
    them the same data.
    """
    tensor = fabric_mesh["tensor_parallel"].size()
    mesh = build_mesh(MeshSpec(tensor=tensor), strategy, device_type=fabric_mesh.device_type)
    plan = tensor_plan(model, tensor) if tensor > 1 else None
    return parallelize(
        model, mesh, ParallelConfig(strategy), seed=0, init=model.init_weights, tensor_plan=plan
    )


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--devices", type=int, default=4)
    words.add_argument("--tensor", type=int, default=1)
    words.add_argument("--strategy", default="hybrid")
    words.add_argument("--steps", type=int, default=10)
    words.add_argument("--accelerator", default="auto")
    words.add_argument("--save", default=None, help="folder for a checkpoint by Fabric at the end")
    given = words.parse_args()
    strategy = ModelParallelStrategy(
        parallelize_fn=partial(parallelize_fn, strategy=given.strategy),
        data_parallel_size=given.devices // given.tensor,
        tensor_parallel_size=given.tensor,
        process_group_backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
    )
    fabric = Fabric(accelerator=given.accelerator, devices=given.devices, strategy=strategy)
    fabric.launch()

    with build_on_meta():
        model = Llama(
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=128,
            vocab_size=VOCAB,
            max_seq_len=SEQ,
        )
    # This calls parallelize_fn: `model` is sharded, and `wrapped` is Fabric's wrapper.
    wrapped = fabric.setup(model)
    # after sharding
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    data_ranks = given.devices // given.tensor
    loader = fabric.setup_dataloaders(
        DataLoader(sequences(given.steps), batch_size=GLOBAL_BATCH // data_ranks)
    )
    mesh = next(model.parameters()).device_mesh

    for step, (tokens,) in enumerate(loader, start=1):
        weight = token_weight(tokens[:, 1:].numel(), mesh)
        total = torch.zeros((), device=fabric.device)
        # instead of fabric.no_backward_sync
        for micro in accumulate(model, tokens.chunk(MICRO_BATCHES)):
            loss = cross_entropy_sum(wrapped(micro[:, :-1]), micro[:, 1:]) * weight.float()
            fabric.backward(loss)
            total += loss.detach()
        # instead of fabric.clip_gradients, which refuses a mixture of meshes
        norm = clip_gradient_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = fabric.all_reduce(total, reduce_op="mean")
        if fabric.is_global_zero:
            print(
                json.dumps({"step": step, "loss": loss.item(), "grad_norm": norm.item()}),
                flush=True,
            )
    if given.save:
        fabric.save(given.save, {"model": wrapped, "optimizer": optimizer})


if __name__ == "__main__":
    main()

"""Runs of every sync method on several ranks, and of its one-process reference, on the same model and data."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    accumulate,
    attach_optimizer,
    build_mesh,
    clip_gradient_norm,
    compare_replicas,
    data_coordinate,
    finish_updates,
    mesh_shape,
    outer_parameters,
    parallelize,
    set_step,
    updated_parameters,
)
from parallel2d.checkpoint import Checkpointer
from parallel2d.config import CheckpointConfig, SyncConfig
from parallel2d.sync.one_process import Batch, Method
from parallel2d.sync.one_process import train as train_reference
from parallel2d.sync.updates import outer_sync

ROWS = 8  # of a global batch
CLIP = 0.5


class Branch(nn.Module):
    """A block with sizes that no number of ranks divides, and a gate of one value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(torch.tanh(self.up(self.norm(x))))


def small_model(width: int = 37, scalar: bool = False) -> nn.Module:
    """Two blocks between layers of other shapes; the same weights each time. ``scalar``: with parameters without dimensions."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, width), Branch(width), Branch(width), nn.Linear(width, 3))
    if not scalar:
        for block in (model[1], model[2]):
            block.gate = nn.Parameter(torch.ones(1))
    return model.double()


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(40 + step)
    inputs = torch.randn(ROWS, 9, dtype=torch.float64, generator=generator)
    return inputs, torch.stack([inputs.sum(1), inputs[:, 0], inputs.prod(1)], 1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2, weight_decay=0.1)


def run(
    sizes: dict[str, int],
    strategy: str,
    sync: dict[str, Any],
    *,
    steps: int,
    accumulation: int = 1,
    mode: str = "reduce_scatter_only",
    scalar: bool = False,
    width: int = 37,
    folder: str = "",
    save_after: Iterable[int] = (),
    resume: str = "never",
    finish: bool = False,
) -> dict[str, Any]:
    """Trains on this process group; the whole parameters, with diloco those that replicas share.

    ``folder``: of checkpoints after the steps ``save_after``; ``resume``: from which to go on first.
    """
    mesh = build_mesh(MeshSpec(**sizes), strategy)
    config = ParallelConfig(strategy, precision="fp64", sync=SyncConfig(**sync))
    model = parallelize(small_model(width, scalar), mesh, config, seed=3)
    optimizer = adamw(updated_parameters(model))
    attach_optimizer(model, optimizer)
    rank, ranks = data_coordinate(mesh), mesh_shape(mesh).data_ranks
    saved = CheckpointConfig(enabled=bool(folder), every=0, resume=resume, memory_every=0)
    checkpointer = Checkpointer(saved, folder, mesh, model, optimizer)
    restored = checkpointer.restore()
    for step in range(1 + (restored["step"] if restored else 0), steps + 1):
        set_step(model, step)
        inputs, targets = (part.chunk(ranks)[rank] for part in batch_of(step))
        micro = list(zip(inputs.chunk(accumulation), targets.chunk(accumulation), strict=True))
        for batch in accumulate(model, micro, mode):
            (loss_of(model, batch) / accumulation).backward()
        clip_gradient_norm(updated_parameters(model), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save_if_due(step, {}, last=step in save_after)
    checkpointer.finish()
    if finish:
        finish_updates(model)
    compare_replicas(model, mesh)
    with outer_parameters(model):
        return {
            "parameters": {
                n: p.full_tensor().detach().clone().numpy() for n, p in model.named_parameters()
            },
            # What this replica did not send yet
            "residual": residuals_of(model),
            # After which step of a period each parameter is sent
            "begins": begins_of(model),
            "state": sum(
                value.to_local().nbytes
                for entry in optimizer.state.values()
                for value in entry.values()
                if hasattr(value, "to_local")
            ),
        }


def residuals_of(model: nn.Module) -> dict[str, Any]:
    outer = outer_sync(model)
    found = {}
    for name, parameter in outer.parameters.items() if outer else ():
        if parameter.residual is not None:
            found[name] = parameter.residual.to_local().clone().numpy()
    return found


def begins_of(model: nn.Module) -> dict[str, int]:
    outer = outer_sync(model)
    fragments = outer.fragments if outer else []
    return {each.name: part.begins for part in fragments for each in part.parameters}


def reference(
    method: Method,
    replicas: int,
    *,
    steps: int,
    shards: int = 1,
    scalar: bool = False,
    width: int = 37,
) -> dict[str, Any]:
    """What `run` must come to."""
    batches = []
    for step in range(1, steps + 1):
        inputs, targets = batch_of(step)
        batches.append(list(zip(inputs.chunk(replicas), targets.chunk(replicas), strict=True)))
    found = train_reference(
        copy.deepcopy(small_model(width, scalar)),
        batches,
        loss_of,
        adamw,
        method,
        clip=CLIP,
        shards=shards,
        seed=3,
    )
    return {name: value.numpy() for name, value in found.items()}

"""Runs of every sync method on several ranks, and of its one-process reference, on the same model
and data.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from training import weights_of

import parallel2d
from parallel2d.base.config import CheckpointConfig, StrategyConfig, SyncConfig
from parallel2d.parallel.model_structure import hidden_matrices
from parallel2d.parallel.sync.formats.quantize import RoundingKeys
from parallel2d.parallel.sync.methods import method_of
from parallel2d.parallel.sync.methods.diloco import ExpectedOuter
from parallel2d.parallel.sync.methods.method import ExpectedState
from parallel2d.parallel.sync.updates import error_feedback_of, outer_sync
from parallel2d.parallel.weights.geometry import Region
from parallel2d.training.checkpoint import Checkpointer

ROWS = 8  # of a global batch
CLIP = 0.5
SEED, WIDTH = 3, 37

Batch = tuple[Tensor, Tensor]  # inputs and targets


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


def small_model(scalar: bool = False) -> nn.Module:
    """Two blocks between layers of other shapes; the same weights each time. ``scalar``: with
    parameters without dimensions.
    """
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, WIDTH), Branch(WIDTH), Branch(WIDTH), nn.Linear(WIDTH, 3))
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
    folder: str = "",
    save_after: Iterable[int] = (),
    resume: str = "never",
) -> dict[str, Any]:
    """Train on this process group; return the unsharded parameters (with diloco the shared
    parameters).

    Args:
        folder: folder of the checkpoints after the steps ``save_after``.
        resume: checkpoint to resume from.
    """
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(**sizes), strategy)
    config = parallel2d.ParallelConfig(strategy, precision="fp64", sync=SyncConfig(**sync))
    model = parallel2d.parallelize(small_model(scalar), mesh, config, seed=SEED)
    optimizer = adamw(parallel2d.updated_parameters(model))
    parallel2d.attach_optimizer(model, optimizer)
    rank, ranks = parallel2d.data_coordinate(mesh), parallel2d.mesh_shape(mesh).data_ranks
    saved = CheckpointConfig(enabled=bool(folder), every=0, resume=resume, memory_every=0)
    checkpointer = Checkpointer(saved, folder, mesh, model, optimizer)
    restored = checkpointer.restore()
    for step in range(1 + (restored["step"] if restored else 0), steps + 1):
        parallel2d.set_step(model, step)
        inputs, targets = (part.chunk(ranks)[rank] for part in batch_of(step))
        micro = list(zip(inputs.chunk(accumulation), targets.chunk(accumulation), strict=True))
        for batch in parallel2d.accumulate(model, micro, mode):
            (loss_of(model, batch) / accumulation).backward()
        parallel2d.clip_gradient_norm(parallel2d.updated_parameters(model), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save_if_due(step, {}, last=step in save_after)
    checkpointer.finish()
    parallel2d.compare_replicas(model, mesh)
    with parallel2d.outer_parameters(model):
        return {
            "parameters": weights_of(model),
            # Unsent part of the update of this replica (error feedback)
            "residual": local_residuals(model),
            # After which step of a period each parameter is sent
            "begins": begins_of(model),
        }


def local_residuals(model: nn.Module) -> dict[str, Any]:
    found = error_feedback_of(model).residuals()
    return {name: value.to_local().clone().numpy() for name, value in found.items()}


def begins_of(model: nn.Module) -> dict[str, int]:
    outer = outer_sync(model)
    fragments = outer.fragments if outer else []
    return {each.name: part.begins for part in fragments for each in part.parameters}


def reference(
    strategy: str,
    sync: dict[str, Any],
    replicas: int,
    *,
    steps: int,
    shards: int = 1,
    scalar: bool = False,
    begins: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Compute the expected results of `run`: replicas are a loop in one process, and each method
    defines its communication. ``begins`` holds the initial parameters of `run`.
    """
    config = SyncConfig(**sync)
    method = method_of(StrategyConfig(strategy), config, replicas)
    model = small_model(scalar)
    computing = dict(model.named_parameters())
    # Replicas that are equal after every step are one.
    references = []
    for _ in range(1 if method.replicas_equal else replicas):
        references.append(dict(small_model(scalar).named_parameters()))
    optimizers = [adamw(reference.values()) for reference in references]
    cuts = {name: cut_in_rows(value.shape, shards) for name, value in computing.items()}
    outer = ExpectedOuter(method, SEED, references, begins or dict.fromkeys(cuts, 0), cuts)
    outer.shared = {name: value.detach().clone() for name, value in computing.items()}
    state = ExpectedState(RoundingKeys(SEED), hidden_matrices(model))
    for step in range(1, steps + 1):
        found = []
        for replica, batch in enumerate(
            zip(*(part.chunk(replicas) for part in batch_of(step)), strict=True)
        ):
            with torch.no_grad():
                for name, value in references[replica % len(references)].items():
                    # Initial values are not sent.
                    computing[name].copy_(method.expected_copy(value) if step > 1 else value)
            model.zero_grad()
            loss_of(model, batch).backward()
            found.append({name: value.grad for name, value in computing.items()})
        if config.name == "every_step":
            state.keys.step, mean = step, {}
            for name, cut in cuts.items():
                values = [each[name] for each in found]
                mean[name] = method.expected_gradient(values, cut, name, state)
            found = [mean]
        for reference, optimizer, gradients in zip(references, optimizers, found, strict=True):
            for name, value in reference.items():
                value.grad = gradients[name]
            torch.nn.utils.clip_grad_norm_(reference.values(), CLIP)
            optimizer.step()
        if config.name == "diloco":
            outer.after_update(step)
    shared = outer.shared if config.name == "diloco" else references[0]
    copied = {n: method.expected_copy(p) for n, p in shared.items()}
    return {name: value.detach().numpy() for name, value in copied.items()}


def cut_in_rows(shape: torch.Size, shards: int) -> list[Region]:
    """The rows that each of ``shards`` ranks holds of a parameter."""
    if not shape:
        return [Region.of_shape(shape)]
    found, size = [], -(-shape[0] // shards)
    for begin in range(0, shape[0], size):
        rows = min(size, shape[0] - begin)
        found.append(Region((begin, *[0] * (len(shape) - 1)), (rows, *shape[1:])))
    return found

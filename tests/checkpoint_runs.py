"""Small training runs that save and resume, for the checkpoint tests. Every function here runs on
the ranks of a pool.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from training import LLAMA, global_batch, optimizer_of, sharded

import parallel2d
from parallel2d.base.config import CheckpointConfig
from parallel2d.parallel.mesh import sum_over_data_ranks
from parallel2d.training.checkpoint import Checkpointer


class Heard(logging.Handler):
    """Collect the log lines of the package `checkpoint` while open, and call ``then`` with each
    line.
    """

    LOGGER = logging.getLogger("parallel2d.training.checkpoint")

    def __init__(self, then: Callable[[str], object] = lambda line: None) -> None:
        super().__init__()
        self.then = then

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        self.LOGGER.addHandler(self)
        self.LOGGER.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self.LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.then(self.lines[-1])


def build(
    mesh_sizes: dict[str, Any], config: dict[str, Any], seed: int = 0, **llama: Any
) -> tuple[Any, Any, Any]:
    mesh, model = sharded(mesh_sizes, config, seed, **llama)
    return mesh, model, optimizer_of(model)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any, step: int) -> float:
    """One step on global batch ``step``; the loss is the mean over its tokens. Ranks that do not divide the
    batch get an uneven share."""
    rank, ranks = parallel2d.data_coordinate(mesh), parallel2d.mesh_shape(mesh).data_ranks
    tokens, targets = (part.tensor_split(ranks)[rank] for part in global_batch(step))
    weight = parallel2d.token_weight(int((targets != -100).sum()), mesh)
    total = torch.zeros((), dtype=torch.float64)
    for micro_tokens, micro_targets in parallel2d.accumulate(model, [(tokens, targets)]):
        loss = parallel2d.cross_entropy_sum(model(micro_tokens), micro_targets)
        (loss * weight.to(loss.dtype)).backward()
        total += loss.detach().double() * weight
    parallel2d.clip_gradient_norm(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return (sum_over_data_ranks(total, mesh) / ranks).item()


def run(
    folder: str,
    mesh_sizes: dict[str, Any],
    config: dict[str, Any],
    *,
    steps: int,
    checkpoint: dict[str, Any] | None = None,
    seed: int = 0,
    llama: dict[str, Any] | None = None,
    validate: bool = False,
) -> dict[str, Any]:
    """Resumes in ``folder`` if it can, trains up to ``steps``, saves as ``checkpoint`` says. Losses by
    step."""
    mesh, model, optimizer = build(mesh_sizes, config, seed, **(llama or {}))
    settings = CheckpointConfig(**{"every": 0, **(checkpoint or {})})
    with Heard() as heard:
        checkpointer = Checkpointer(
            settings, folder, mesh, model, optimizer, layout={"strategy": config}
        )
        restored = checkpointer.restore()
        start = restored["step"] if restored else 0
        losses, blocked = {}, []
        for step in range(start + 1, steps + 1):
            losses[step] = train_step(model, optimizer, mesh, step)
            if (
                validate
            ):  # leaves parameters gathered where the strategy keeps them so after a forward
                with torch.no_grad():
                    model(global_batch(step)[0])
            checkpointer.save_if_due(step, {"samples": 8 * step}, last=step == steps)
            blocked.append(checkpointer.blocked_s)
        checkpointer.finish()
    return {
        "losses": losses,
        "restored": restored,
        "log": heard,
        "published": checkpointer.published,
        "bytes_written": checkpointer.bytes_written,
        "blocked": blocked,
    }


def steps_in(folder: str) -> list[str]:
    path = os.path.join(folder, "checkpoints")
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


__all__ = ["LLAMA", "Heard", "build", "run", "steps_in", "train_step"]

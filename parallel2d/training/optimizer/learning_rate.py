"""The schedule of the learning rate: `learning_rate`, applied by `set_learning_rate`."""

from __future__ import annotations

import math

import torch

from parallel2d.base.config import SchedulerConfig


def learning_rate(step: int, steps: int, lr: float, config: SchedulerConfig) -> float:
    """Return the learning rate of ``step`` (from 1) in a run of ``steps``. With ``wsd`` (warm-up,
    stable, decay; Hu et al. 2024, MiniCPM) the rate stays at ``lr``, and falls linearly in the last
    ``decay_fraction`` of the steps after the warm-up."""
    if step <= config.warmup_steps:
        return lr * step / config.warmup_steps
    if config.name == "constant":
        return lr
    # `progress` rises from 0 in the first step after the warm-up to 1 in the last step of the run.
    done = step - config.warmup_steps - 1
    span = max(steps - config.warmup_steps - 1, 1)
    progress = min(done / span, 1.0)
    # The rate falls from `lr` to `floor * lr` as `shape` falls from 1 to 0.
    shape = 1 - progress
    if config.name == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.name == "wsd":
        # The quotient is above 1, and is limited to 1, until the last `decay_fraction` begins.
        shape = min(1.0, shape / config.decay_fraction)
    return lr * (config.floor + (1 - config.floor) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group to ``lr``, multiplied by the group's
    ``lr_scale`` if it has this setting."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)

"""The learning rate as a function of the step, and the fp16 loss scale. Plain numbers flow in and
out."""

from __future__ import annotations

import math

import torch

from parallel2d.config import SchedulerConfig


def learning_rate(step: int, steps: int, lr: float, config: SchedulerConfig) -> float:
    """The rate used by ``step`` (from 1) of a run of ``steps``: a function of the step alone, so
    nothing has to be saved.

    ``wsd`` (warm-up, stable, decay; Hu et al. 2024, MiniCPM) holds ``lr`` and falls linearly over
    the last ``decay_fraction``.
    """
    if step <= config.warmup_steps:
        return lr * step / config.warmup_steps
    span = max(steps - config.warmup_steps - 1, 1)
    progress = min((step - config.warmup_steps - 1) / span, 1.0)
    if config.name == "constant":
        return lr
    if config.name == "linear":
        shape = 1 - progress
    elif config.name == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        shape = min(1.0, (1 - progress) / config.decay_fraction)
    return lr * (config.floor + (1 - config.floor) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of every parameter group: ``lr`` times the group's ``lr_scale``, where it has
    one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018).

    Every rank feeds it the same agreed verdict (finite or not), so every rank holds the same scale
    without communicating. With ``enabled=False`` the scale is 1 forever.
    """

    def __init__(self, enabled: bool, scale: float = 2.0**16, growth_every: int = 1000) -> None:
        self.enabled = enabled
        self.scale = scale if enabled else 1.0
        self.growth_every = growth_every
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halves the scale after a non-finite step, doubles it after ``growth_every`` finite ones
        in a row."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.growth_every == 0:
            self.scale = min(self.scale * 2, 2.0**24)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])

"""The learning rate as a function of the step (`learning_rate`), and the fp16 loss scale
(`LossScaler`)."""

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
    if config.name == "constant":
        return lr
    # From 0 in the first step after the warm-up to 1 in the last step of the run.
    done = step - config.warmup_steps - 1
    span = max(steps - config.warmup_steps - 1, 1)
    progress = min(done / span, 1.0)
    # Falls from `lr` to `floor * lr` as the shape falls from 1 to 0.
    shape = _decay(progress, config)
    return lr * (config.floor + (1 - config.floor) * shape)


def _decay(progress: float, config: SchedulerConfig) -> float:
    if config.name == "linear":
        return 1 - progress
    if config.name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    # wsd: the line is above 1, and so without effect, until the last `decay_fraction` begins.
    line = (1 - progress) / config.decay_fraction
    return min(1.0, line)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of every parameter group: ``lr`` times the group's ``lr_scale``, where it has
    one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018).

    All ranks first agree whether a step was finite and call `update` with the same answer, so every
    rank holds the same scale without communicating. With ``enabled=False`` the scale is 1 forever.
    """

    def __init__(self, enabled: bool, scale: float = 2.0**16, growth_every: int = 1000) -> None:
        self.enabled = enabled
        self.scale = 1.0
        if enabled:
            self.scale = scale
        self.growth_every = growth_every
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halves the scale after a non-finite step, doubles it after ``growth_every`` finite ones
        in a row."""
        if not self.enabled:
            return
        if not finite:
            self.good_steps = 0
            self.scale = max(self.scale / 2, 1.0)
            return
        self.good_steps += 1
        if self.good_steps % self.growth_every == 0:
            self.scale = min(self.scale * 2, 2.0**24)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])

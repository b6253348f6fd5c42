"""The optimizer of a parallelized model, and the learning rate. Start at `build_optimizer`.

It returns a ``torch.optim.Optimizer`` whose update is that of a single process on any layout.
AdamW, Adam and SGD update each element on its own and so are torch's; Muon needs whole matrices,
and is in `muon.py`. Somebody's own is built by a function on the same parameter groups; one that
needs whole matrices is wrapped by `whole_matrices`.
"""

from __future__ import annotations

import logging
import math
from itertools import chain
from typing import Any

import torch
from torch import nn

from parallel2d.base.config import OptimizerConfig, SchedulerConfig
from parallel2d.base.config.checks import check_optimizer
from parallel2d.base.config.options import call_reference
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.methods.method import needs_closure
from parallel2d.training.optimizer.groups import muon_names, plan_groups
from parallel2d.training.optimizer.muon import Muon
from parallel2d.training.optimizer.whole_matrices import whole_matrices

log = logging.getLogger(__name__)

__all__ = [
    "LossScaler",
    "Muon",
    "build_optimizer",
    "learning_rate",
    "muon_names",
    "plan_groups",
    "set_learning_rate",
    "whole_matrices",
]


# The arguments by which torch's optimizers choose among their implementations.
_IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of ``config`` over the trainable parameters of ``model``: parallelized, or
    plain on one process.

    Raises `ConfigError` for a ``config`` that is none, for a word or number that it may not have,
    without trainable parameters, for a pattern of ``config.groups`` that matches nothing, and where
    Muon cannot tell hidden matrices from others.
    """
    if not isinstance(config, OptimizerConfig):
        raise ConfigError(
            "the second argument of build_optimizer is an OptimizerConfig, such as "
            f"OptimizerConfig('adamw', lr=3e-4); got {config!r}"
        )
    check_optimizer(config)
    optimizer = _new_optimizer(plan_groups(model, config), config)
    # A plain model on one process has no engine.
    for engine in engines_in(model):
        engine.updates.attach(optimizer)
    return optimizer


def _new_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    for group in groups:
        algorithm = f"{group['algorithm']}, " if "algorithm" in group else ""
        elements = sum(parameter.numel() for parameter in group["params"])
        log.info(
            f"optimizer: {len(group['params'])} tensors, {elements:,} parameters: {algorithm}"
            f"weight decay {group['weight_decay']:g}, learning rate x {group['lr_scale']:g}"
        )
    beta1, beta2 = config.betas
    implementation = _IMPLEMENTATIONS[config.implementation]
    adam: dict[str, Any] = {
        "lr": config.lr,
        "betas": (beta1, beta2),
        "eps": config.eps,
        "amsgrad": config.amsgrad,
        **implementation,
    }
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **adam)
    if config.name == "adam":
        return torch.optim.Adam(groups, **adam)
    if config.name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            **implementation,
        )
    if config.name == "custom":
        return _own_optimizer(groups, config)
    return Muon(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.newton_schulz_steps,
        adjust_lr_fn=config.adjust_lr,
        betas=(beta1, beta2),
        adamw_eps=config.eps,
        **implementation,
    )


def _own_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """What ``config.target`` builds. Raises `ConfigError` for what cannot be trained with."""
    assert config.target is not None
    what = f"optimizer.target={config.target}"
    optimizer = call_reference("optimizer.target", config.target, groups, **config.arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(f"{what} returned {kind}, not a torch.optim.Optimizer")
    if needs_closure(type(optimizer)):
        raise ConfigError(
            f"{what}: the step of {type(optimizer).__name__} needs a closure, and training gives "
            "none; build another optimizer"
        )
    given = _ids_in(groups)
    taken = _ids_in(optimizer.param_groups)
    if given != taken:
        raise ConfigError(
            f"{what} trains {len(taken)} tensors and was given {len(given)}: build the optimizer "
            "on the groups as they are"
        )
    for group in optimizer.param_groups:
        # A rate that the function has given is its own, which the schedule scales.
        if "lr" in group and group["lr"] != config.lr * group.get("lr_scale", 1.0):
            group["lr_scale"] = group["lr"] / config.lr
    if config.weight_decay and "weight_decay" not in optimizer.defaults:
        raise ConfigError(
            f"optimizer.weight_decay={config.weight_decay} has no effect: "
            f"{type(optimizer).__name__} of optimizer.target has no weight_decay"
        )
    return optimizer


def _ids_in(groups: list[dict[str, Any]]) -> set[int]:
    return {id(each) for each in chain.from_iterable(group["params"] for group in groups)}


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
    shape = 1 - progress
    if config.name == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.name == "wsd":
        # The line is above 1, and so without effect, until the last `decay_fraction` begins.
        shape = min(1.0, shape / config.decay_fraction)
    return lr * (config.floor + (1 - config.floor) * shape)


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

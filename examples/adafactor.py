"""Adafactor (Shazeer and Stern 2018) as a custom optimizer of the train command.

    PYTHONPATH=examples python -m parallel2d.train optimizer=custom \
        optimizer.target=adafactor:build optimizer.lr=1e-2 optimizer.arguments.beta2_decay=-0.8

The update equals ``torch.optim.Adafactor``, which does not run on sharded parameters. `DTensor`
computes the sums over rows, columns and matrices, with up to five small all-reduces per parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def build(groups: list[dict[str, Any]], **arguments: Any) -> torch.optim.Optimizer:
    """Return the optimizer. ``groups`` are parameter groups with lr and weight decay."""
    return Adafactor(groups, **arguments)


class Adafactor(torch.optim.Optimizer):
    """Adafactor with its state from the start: a checkpoint can be loaded before the first step."""

    def __init__(
        self,
        groups: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps2: float = 1e-3,
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"beta2_decay": beta2_decay, "eps2": eps2, "clip_threshold": clip_threshold}
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, **settings})
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = torch.tensor(0.0)
                if parameter.ndim > 1:
                    state["row_var"] = torch.zeros_like(mean(parameter.detach(), -1))
                    state["col_var"] = torch.zeros_like(mean(parameter.detach(), -2))
                else:
                    state["variance"] = torch.zeros_like(parameter.detach())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update all parameters. Collective if parameters are sharded."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, eps = self.state[parameter], torch.finfo(parameter.dtype).eps
        state["step"] += 1
        step = state["step"].item()
        rate = min(group["lr"], step**-0.5) * max(group["eps2"], root_mean_square(parameter))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        # The weight of the new squares; 1 in the first step, which replaces the initial zeros.
        new = step ** group["beta2_decay"]
        squared = gradient.square()
        if parameter.ndim > 1:
            row, column = state["row_var"], state["col_var"]
            row.lerp_(mean(squared, -1), new)
            column.lerp_(mean(squared, -2), new)
            variance = row * column / mean(row, -2).clamp(min=eps)
        else:
            variance = state["variance"].lerp_(squared, new)
        update = gradient * variance.clamp(min=eps * eps).rsqrt()
        clipping = max(1.0, root_mean_square(update) / group["clip_threshold"])
        parameter.add_(update, alpha=-rate / clipping)


def mean(tensor: Tensor, dim: int) -> Tensor:
    """Return the mean over ``dim``, which keeps size 1."""
    return full_sum(tensor.sum(dim, keepdim=True)) / tensor.shape[dim]


def root_mean_square(tensor: Tensor) -> float:
    return (full_sum(tensor.square().sum()).item() / max(tensor.numel(), 1)) ** 0.5


def full_sum(tensor: Tensor) -> Tensor:
    """Return the sum with all partial sums of other ranks added."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Replicate() if each.is_partial() else each for each in tensor.placements]
    return tensor.redistribute(placements=placements)

"""Exponential moving averages (EMA) of what all replicas have of a model's weights, with
``sync=diloco`` the outer parameters. `WeightAverage` is that of ``train.ema``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from parallel2d.parallel.sync.engine.replica_reducer import reducers_in
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.parallel.weights.named_tensors import parameters_by_name, reshard

_AVERAGE = "_parallel2d_average"  # an attribute of the model


def common_values(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> parameter as all replicas have it; a shared one once, under its first name."""
    # Parameters that a forward has gathered would hide the sharded ones.
    reshard(model)
    found: dict[str, Tensor] = {**parameters_by_name(model)}
    for engine in reducers_in(model):
        found |= engine.updates.shared_values()
    return {name: value.detach() for name, value in found.items()}


@torch.no_grad()
def move_averages(averages: Mapping[str, Tensor], model: nn.Module, decay: float) -> None:
    """Makes each of ``averages``, by FQN and split as the parameters of ``model``, ``decay`` times
    itself plus ``1 - decay`` times the parameter."""
    values = common_values(model)
    for name, average in averages.items():
        local = local_part(average)
        local.lerp_(local_part(values[name]).to(local), 1 - decay)


class WeightAverage:
    """The averages of the trained parameters of ``model`` by FQN, in fp32 at least."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values: dict[str, Tensor] = {}
        parameters = parameters_by_name(model)
        for name, value in common_values(model).items():
            wide = torch.promote_types(value.dtype, torch.float32)
            if parameters[name].requires_grad:
                self.values[name] = value.clone().to(wide)
        vars(model)[_AVERAGE] = self

    def update(self, decay: float) -> None:
        """As `move_averages`; with 0 the averages begin anew."""
        move_averages(self.values, self._model, decay)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the model has the averages. Memory: a copy of this rank's parts."""
        parameters = parameters_by_name(self._model)
        own = [local_part(parameters[name].detach()) for name in self.values]
        kept = [local.clone() for local in own]
        try:
            for local, average in zip(own, self.values.values(), strict=True):
                local.copy_(local_part(average))
            yield
        finally:
            for local, before in zip(own, kept, strict=True):
                local.copy_(before)


def average_of(model: nn.Module) -> WeightAverage | None:
    """What ``train.ema`` keeps for ``model``; None without it."""
    found: WeightAverage | None = vars(model).get(_AVERAGE)
    return found

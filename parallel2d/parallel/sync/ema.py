"""Exponential moving averages (EMA) of weights: `EMAWeights` has those of ``train.ema``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.parallel.weights.named_tensors import (
    equal,
    masters_in,
    parameters_by_name,
    reshard,
)

_AVERAGE = "_parallel2d_average"  # an attribute of the model


def trained_values(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> trained parameter as all replicas have it: with ``sync=diloco`` the outer one."""
    # Parameters that a forward has gathered would hide the sharded ones.
    reshard(model)
    parameters = parameters_by_name(model)
    found = {name: each.detach() for name, each in parameters.items() if each.requires_grad}
    for engine in engines_in(model):
        found |= engine.updates.shared_values()
    return found


@torch.no_grad()
def update_ema(averages: Mapping[str, Tensor], model: nn.Module, decay: float) -> None:
    """Makes each of ``averages``, split as the parameter of ``model`` with its FQN, ``decay`` times
    itself plus ``1 - decay`` times the parameter."""
    for name, value in trained_values(model).items():
        if name in averages:
            average = local_part(averages[name])
            average.lerp_(local_part(value.detach()).to(average), 1 - decay)


class EMAWeights:
    """Averages of the trained parameters of ``model``, split as these are, in fp32 at least."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values: dict[str, Tensor] = {}
        for name, value in trained_values(model).items():
            wide = torch.promote_types(value.dtype, torch.float32)
            self.values[name] = value.detach().clone().to(wide)
        vars(model)[_AVERAGE] = self

    def update(self, decay: float) -> None:
        """As `update_ema`; with 0 they begin anew."""
        update_ema(self.values, self._model, decay)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the model has the averages, which are saved too. Memory: a copy of this rank's
        parts."""
        parameters = parameters_by_name(self._model)
        own = [local_part(parameters[name].detach()) for name in self.values]
        averages = map(local_part, self.values.values())
        with ExitStack() as stack:
            stack.enter_context(equal(zip(own, averages, strict=True)))
            for masters in masters_in(self._model):
                stack.enter_context(masters.as_parameters())
            yield


def ema_of(model: nn.Module) -> EMAWeights | None:
    """What ``train.ema`` keeps for ``model``; None without it."""
    found: EMAWeights | None = vars(model).get(_AVERAGE)
    return found

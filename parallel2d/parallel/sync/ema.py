"""Exponential moving averages (EMA) of weights: `EMAWeights` implements ``train.ema``."""

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

_AVERAGE = "_parallel2d_average"  # attribute of the model


def trained_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by FQN; with ``sync=diloco`` the outer parameters."""
    # Reshard, because the modules may hold unsharded parameters after a forward.
    reshard(model)
    parameters = parameters_by_name(model)
    found = {}
    for name, each in parameters.items():
        if each.requires_grad:
            found[name] = each.detach()
    for engine in engines_in(model):
        found |= engine.updates.shared_values()
    return found


@torch.no_grad()
def update_ema(averages: Mapping[str, Tensor], model: nn.Module, decay: float) -> None:
    """Set each average to ``decay * average + (1 - decay) * parameter``, in place.

    ``averages`` maps FQNs to tensors that are sharded like the parameters of ``model``.
    """
    for name, value in trained_values(model).items():
        if name in averages:
            average = local_part(averages[name])
            average.lerp_(local_part(value.detach()).to(average), 1 - decay)


class EMAWeights:
    """EMA weights of the trained parameters, sharded like the parameters, in fp32 or wider."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values: dict[str, Tensor] = {}
        for name, value in trained_values(model).items():
            wide = torch.promote_types(value.dtype, torch.float32)
            self.values[name] = value.detach().clone().to(wide)
        vars(model)[_AVERAGE] = self

    def update(self, decay: float) -> None:
        """Update the EMA weights by `update_ema`. ``decay=0`` copies the parameters to the EMA
        weights."""
        update_ema(self.values, self._model, decay)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Replace the parameters of the model by the EMA weights inside of this context.

        A state that is saved inside contains the EMA weights. Needs the memory of a copy of this
        rank's local shards.
        """
        parameters = parameters_by_name(self._model)
        own = []
        for name in self.values:
            own.append(local_part(parameters[name].detach()))
        averages = map(local_part, self.values.values())
        with ExitStack() as stack:
            stack.enter_context(equal(zip(own, averages, strict=True)))
            for masters in masters_in(self._model):
                stack.enter_context(masters.as_parameters())
            yield


def ema_of(model: nn.Module) -> EMAWeights | None:
    """Return the `EMAWeights` of ``model``; None if there are none."""
    found: EMAWeights | None = vars(model).get(_AVERAGE)
    return found

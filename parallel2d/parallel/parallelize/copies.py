"""Copies of a parallelized model on the same layout: `sharded_copy`, frozen, and
``copy.deepcopy(model)``. Hooks and groups of a sharded model refer to it, so what is copied is its
structure as it was before the transforms, which are applied again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.parallel.model_structure import fqn_of
from parallel2d.parallel.parallelize.layout import without_storage
from parallel2d.parallel.sync.average import common_values, move_averages
from parallel2d.parallel.sync.engine.replica_reducer import engine_of
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.parallel.weights.named_tensors import all_tensors, parameters_by_name, reshard
from parallel2d.parallel.weights.source import WeightSource

_COPY = "_parallel2d_copy"  # an attribute of the model
Copier = Callable[[bool], nn.Module]  # makes a copy, frozen or not


def copier(model: nn.Module, transforms: Callable[[nn.Module, WeightSource], nn.Module]) -> Copier:
    """What copies ``model``, which is plain now and to which ``transforms`` are applied next."""
    blueprint: Any = None
    reason = f"deepcopy: {type(model).__name__} cannot be copied: "
    try:
        blueprint = without_storage(model)
    except Exception as error:  # a module may hold anything, such as a lock
        reason += str(error)

    def make(frozen: bool) -> nn.Module:
        if blueprint is None:
            raise ConfigError(reason)
        twin: nn.Module = copy.deepcopy(blueprint)
        trained = {name: each.requires_grad for name, each in parameters_by_name(model).items()}
        for name, parameter in parameters_by_name(twin).items():
            # Before the transforms: what training needs is not allocated for frozen ones.
            parameter.requires_grad_(trained.get(name, False) and not frozen)
        values = {**all_tensors(model), **common_values(model)}
        here = {(name, each.shape) for name, each in values.items()}
        changed = here ^ {(name, each.shape) for name, each in all_tensors(twin).items()}
        if changed:
            names = first_five(sorted({name for name, _ in changed}), ", ")
            raise ConfigError(f"deepcopy: {names} changed after parallelize; change it before")

        @torch.no_grad()
        def give(sharded: nn.Module) -> Container[str]:
            for name, tensor in all_tensors(sharded).items():
                local_part(tensor).copy_(local_part(values[name]))
            return values

        transforms(twin, WeightSource(twin, seed=0, init=None, broadcast_from=None, given=give))
        modes = {fqn_of(name): module.training for name, module in model.named_modules()}
        for name, module in twin.named_modules():
            module.training = modes[fqn_of(name)] and not frozen
        twin.register_forward_hook(_free_if_frozen)
        return twin

    return make


def _free_if_frozen(module: nn.Module, *_: Any) -> None:
    """After a forward, frees gathered parameters that no backward pass would free: averages are
    taken of the sharded ones."""
    is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if not is_trained:
        reshard(module)


def allow_copies(model: nn.Module, make: Copier) -> None:
    """Lets `sharded_copy` and ``copy.deepcopy`` find the `copier` of the sharded ``model``."""
    vars(model)[_COPY] = make
    # `fully_shard` has given the class one that raises.
    vars(model)["__deepcopy__"] = lambda _memo: make(False)


class ShardedCopy:
    """See `sharded_copy`. Calling it calls ``module``, the copy itself, in evaluation mode."""

    def __init__(self, model: nn.Module) -> None:
        engine_of(model)  # raises for another model
        self._model = model
        self.module: nn.Module = vars(model)[_COPY](True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Makes each parameter ``decay`` times itself plus ``1 - decay`` times the model's; copies
        buffers. No communication. Raises `ConfigError` for an average in 16 bits, which would stand
        still, and for a ``decay`` that is not within [0, 1]."""
        averages = common_values(self.module)
        narrow = [name for name, each in averages.items() if each.dtype.itemsize < 4]
        if not 0 <= decay <= 1 or (decay and narrow):
            raise ConfigError(
                f"sharded_copy: update({decay}) needs a decay in [0, 1] and precision.storage=fp32"
            )
        move_averages(averages, self._model, decay)
        for here, there in zip(self.module.buffers(), self._model.buffers(), strict=True):
            here.copy_(there)


def sharded_copy(model: nn.Module) -> ShardedCopy:
    """A frozen copy of ``model``, from `parallel2d.parallelize`, with the values that all replicas
    have: ``ema(x)`` evaluates it, ``ema.update(0.999)`` moves it, ``ema.module`` is the module, to
    be saved like any other.

    Memory: this rank's parts once more. Collective, because groups are made. Hooks set after
    `parallelize` are not copied. Raises `ConfigError` for what cannot be copied.
    """
    return ShardedCopy(model)

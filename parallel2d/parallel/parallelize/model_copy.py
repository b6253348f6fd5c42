"""Sharded copies of a parallelized model: `sharded_copy` (frozen) and ``copy.deepcopy``.

The hooks and FSDP groups of a model refer to that model, so hooks and groups cannot be copied.
Therefore a meta copy of the model is made before the transforms of `parallelize`. To make a sharded
copy, the meta copy is copied, and the transforms are applied to this copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.exchange import among
from parallel2d.parallel.model_structure import fqn_of, without_storage
from parallel2d.parallel.parallelize.running_statistics import take_over_statistics
from parallel2d.parallel.sync.ema import trained_values, update_ema
from parallel2d.parallel.sync.engine.replica_reducer import engine_of
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.parallel.weights.named_tensors import (
    all_tensors,
    parameters_by_name,
    part_of,
    reshard,
)
from parallel2d.parallel.weights.source import WeightSource

DEEPCOPY = "__deepcopy__"  # attribute of the model under which `copy.deepcopy` finds its `copier`
Transforms = Callable[[nn.Module, WeightSource], nn.Module]


def refuse_copy(name: str, _memo: Any) -> None:
    """Raise `ConfigError` for a deep copy of one module of a sharded model.

    The hooks of the module refer to the model, so the module cannot be copied without the model.
    """
    raise ConfigError(
        f"deepcopy: {name} is a module of a sharded model: copy the whole model by copy.deepcopy "
        f"and take its {name}, or copy {name} before parallelize"
    )


def copier(model: nn.Module, transforms: Transforms) -> Callable[..., nn.Module]:
    """Return a function that copies ``model``, and freezes the copy if its argument ``frozen`` is
    True.

    Call `copier` before ``transforms`` change the model.
    """
    blueprint: Any = None
    reason = f"deepcopy: {type(model).__name__} cannot be copied: "
    try:
        blueprint = without_storage(model)
    except Exception as error:  # a module may hold anything, such as a lock
        reason += str(error)

    @torch.no_grad()
    def give(twin: nn.Module) -> Container[str]:
        values, here = {**all_tensors(model), **trained_values(model)}, all_tensors(twin)
        shapes = []
        for one in (values, here):
            shapes.append({(name, each.shape) for name, each in one.items()})
        changed = sorted({name for name, _ in shapes[0] ^ shapes[1]})
        if changed:
            names = first_five(changed, ", ")
            raise ConfigError(f"deepcopy: {names} changed after parallelize; change it before")
        for name, tensor in here.items():
            local_part(tensor).copy_(local_part(values[name]))
        return here

    def make(_memo: Any, *, frozen: bool = False) -> nn.Module:
        if blueprint is None:
            raise ConfigError(reason)
        twin: nn.Module = copy.deepcopy(blueprint)
        trained = {name for name, each in parameters_by_name(model).items() if each.requires_grad}
        for name, parameter in parameters_by_name(twin).items():
            # Freeze before the transforms, because they allocate buffers for training only for
            # trained parameters.
            parameter.requires_grad_(name in trained and not frozen)
        with among(part_of(model)):
            # ``give`` fills all tensors, so no tensor is initialized. Initialization would be
            # collective, and a script may copy the model on some ranks only.
            source = WeightSource(
                twin, seed=0, init=lambda *_: None, broadcast_from=None, given=give
            )
            transforms(twin, source)
        take_over_statistics(twin, model)
        modes = {fqn_of(name): module.training for name, module in model.named_modules()}
        for name, module in twin.named_modules():
            module.training = modes[fqn_of(name)] and not frozen
        twin.register_forward_hook(_free_if_frozen)
        return twin

    return make


def _free_if_frozen(module: nn.Module, *_: Any) -> None:
    """Reshard ``module`` after a forward without backward, because `ShardedCopy.update` needs local
    shards. Forward hook."""
    is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if not is_trained:
        reshard(module)


class ShardedCopy:
    """Result of `sharded_copy`. ``module`` is the copy, in evaluation mode."""

    def __init__(self, model: nn.Module) -> None:
        engine_of(model)  # raises for another model
        self._model = model
        self.module: nn.Module = vars(model)[DEEPCOPY](None, frozen=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Look up all other attributes on the module: ``ema.eval()``, ``ema.state_dict()``."""
        if name == "module":  # the constructor has not set it yet
            raise AttributeError(name)
        return getattr(self.module, name)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set each trained parameter to ``decay * self + (1 - decay) * model``, and copy buffers.

        No communication. Raises `ConfigError` for a ``decay`` outside of [0, 1], and for 16-bit
        parameters with ``decay > 0``, because rounding would remove the small changes.
        """
        reshard(self.module)
        here = parameters_by_name(self.module)
        averages = {}
        for name in trained_values(self._model):
            averages[name] = here[name].detach()
        is_narrow = any(each.dtype.itemsize < 4 for each in averages.values())
        if not 0 <= decay <= 1 or (decay and is_narrow):
            raise ConfigError(
                f"sharded_copy: update({decay}) needs a decay in [0, 1] and precision.storage=fp32"
            )
        update_ema(averages, self._model, decay)
        for own, buffer in zip(self.module.buffers(), self._model.buffers(), strict=True):
            own.copy_(buffer)
        take_over_statistics(self.module, self._model)


def sharded_copy(model: nn.Module) -> ShardedCopy:
    """Return a frozen copy of ``model``, from `parallel2d.parallelize`, sharded like the model.

    Collective. The copy starts from the last state that all replicas share. With
    ``ema = sharded_copy(model)``, ``ema(x)`` evaluates the copy, ``ema.update(0.999)`` updates its
    EMA weights, and ``ema.module`` is the module to save. Hooks that were registered after
    `parallelize` are not copied. Raises `ConfigError` for a model that cannot be copied.
    """
    return ShardedCopy(model)

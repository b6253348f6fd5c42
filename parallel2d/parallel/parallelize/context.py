"""Builds a model without ever holding it whole on a rank: `model_sharded_context`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import ParallelConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.parallelize import parallelize
from parallel2d.parallel.weights.construction import build_on_meta
from parallel2d.parallel.weights.initial_values import Initializer


@contextmanager
def model_sharded_context(
    mesh: DeviceMesh,
    config: ParallelConfig | None = None,
    *,
    seed: int,
    init: Initializer | None = None,
    tensor_plan: Mapping[str, object] | Callable[[nn.Module], Mapping[str, object]] | None = None,
) -> Iterator[None]:
    """Inside, modules are built without weights; at the end each outermost one with parameters is
    parallelized over ``mesh``. Collective. ::

        with model_sharded_context(mesh, ParallelConfig("hybrid"), seed=0):
            model = MyModel(...)
        optimizer = build_optimizer(model, ...)

    Args:
        mesh, config, seed, init: as of `parallel2d.parallelize`, for every outermost module alike.
            ``init`` is called after the context, so
            ``lambda module, name: model.init_weights(module, name)`` may name a model that is built
            inside.
        tensor_plan: also a function of the module that returns the plan, because the module does
            not exist before.

    A module that is built and dropped inside, or put into another one, is not outermost. After an
    exception inside nothing is parallelized.

    Raises:
        ConfigError: nothing with parameters was built inside, a module was given weights that are
            not on meta (built outside), or what `parallel2d.parallelize` raises; of several
            outermost modules, those before the one it refuses are parallelized.
    """
    with build_on_meta() as built:
        yield
    outermost = _outermost(built)
    if not outermost:
        raise ConfigError(
            "model_sharded_context: no module with parameters was built inside; call the model's "
            "constructor inside the context and keep the model in a variable"
        )
    for module in outermost:
        plan = tensor_plan(module) if callable(tensor_plan) else tensor_plan
        parallelize(module, mesh, config, seed=seed, init=init, tensor_plan=plan)


def _outermost(built: Sequence[weakref.ref[nn.Module]]) -> list[nn.Module]:
    """Selects the modules that still exist, have parameters and are in no other one, in the order
    in which they were built."""
    # A constructor may have been called twice.
    modules = dict.fromkeys(reference() for reference in built)
    alive = [module for module in modules if module is not None]
    # The first of its modules is a module itself.
    inner = set(chain.from_iterable(list(module.modules())[1:] for module in alive))
    outermost = [module for module in alive if module not in inner]
    return [module for module in outermost if next(module.parameters(), None) is not None]

"""What `parallelize` refuses before it changes anything. Start at `check`."""

from __future__ import annotations

import gc
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel2d.base.config import ParallelConfig
from parallel2d.base.config.checks import validated
from parallel2d.base.config.parallel import AUTOMATIC
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh import check_placement, mesh_shape
from parallel2d.parallel.parallelize.float8 import check_float8
from parallel2d.parallel.parallelize.sharding import check_offload


def check(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, topology: Topology) -> None:
    """Raises `ConfigError` for a model, mesh or configuration that cannot work. Collective."""
    # The configuration, and whether this mesh and these devices allow it.
    validated(config)
    shape = mesh_shape(mesh)
    shape.spec().refuse_contradiction(config.strategy)
    ranks = mesh.mesh.reshape(shape.replicate, shape.shard, shape.tensor)
    check_placement(ranks, topology, config.allow_cross_node)
    check_offload(config.cpu_offload, mesh.device_type, shape.replicate)
    check_float8(config.precision, mesh.device_type)
    # What no setting names: the ranks' software, and the state of the model.
    check_same_torch()
    check_no_optimizer(model)
    check_parameters(model)


def check_arguments(model: nn.Module, mesh: object, config: object) -> None:
    """Raises `ConfigError` for a mesh or configuration of another kind, and for a model that is
    sharded already."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            "the second argument of parallelize is the mesh, from parallel2d.build_mesh; got "
            f"{mesh!r}"
        )
    if not isinstance(config, ParallelConfig | None):
        raise ConfigError(
            "the third argument of parallelize is a ParallelConfig, such as "
            f"ParallelConfig('zero3'); got {config!r}"
        )
    if config is not None and config.strategy.name == AUTOMATIC:
        raise ConfigError("strategy=auto is resolved by the train command: in code, name one")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "the model is sharded already, by parallelize or fully_shard: give the plain one, once"
        )


def check_same_torch() -> None:
    """Raises `ConfigError` on every rank, naming hosts and versions, when ranks run different torch
    versions. Collective."""
    ranks = all_gather((str(torch.__version__), socket.gethostname()))
    versions = {version for version, _ in ranks}
    if len(versions) > 1:
        found = sorted({f"{host}: torch {version}" for version, host in ranks})
        raise ConfigError(
            f"ranks run different torch versions ({', '.join(found)}): collectives would hang or "
            "mix; install the same one"
        )


def check_no_optimizer(model: nn.Module) -> None:
    """Raises `ConfigError` when a live optimizer holds parameters of ``model``: sharding replaces
    them, so it would train nothing."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for found in gc.get_objects():
        # Not isinstance, which reads __class__: on a proxy that may run code.
        if not issubclass(type(found), torch.optim.Optimizer):
            continue
        # Optimizers of other models may be alive, and are fine.
        if _holds_any(found, parameters):
            raise ConfigError(
                f"{type(found).__name__} was built before parallelize: it holds parameters that "
                "sharding replaces, and would train nothing; build it after, on the parameters of "
                "the model that parallelize returns"
            )


def _holds_any(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> bool:
    """Whether ``optimizer`` has one of the parameters with these ids."""
    for group in optimizer.param_groups:
        if any(id(parameter) in parameters for parameter in group["params"]):
            return True
    return False


def check_parameters(model: nn.Module) -> None:
    """Raises `ConfigError`, with the name, for a parameter of which sharding would lose something
    without an error: a hook, a copy of the reference, an update that its module writes. And for one
    without a size."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        _check_size(name, parameter)
        _check_hooks(name, parameter)
    for name, module in model.named_modules():
        _check_max_norm(name, module)
        _check_references(name, module, names)


def _check_size(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigError(
            f"{name} has no size yet: run one forward pass of the model before parallelize, or "
            "give its sizes"
        )


def _check_hooks(name: str, parameter: nn.Parameter) -> None:
    # A tensor has hooks of two kinds; those of the second run when its gradient is complete.
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ConfigError(
            f"{name} has a gradient hook, which would never be called, because sharding replaces "
            "the parameter: call register_post_accumulate_grad_hook on the parameters of the model "
            "that parallelize returns"
        )


def _check_max_norm(name: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return
    if module.max_norm is not None:
        called = name or "the model"
        raise ConfigError(
            f"{called} has max_norm={module.max_norm}: it rescales rows of its weight in forward, "
            "which writes to a gathered copy and is lost; use max_norm=None and rescale the weight "
            "after the optimizer's step"
        )


def _check_references(name: str, module: nn.Module, names: Mapping[int, str]) -> None:
    """Raises `ConfigError` when a plain attribute of ``module`` holds parameters.

    ``names``: of the model's parameters, by id.
    """
    if type(module).__setattr__ is not nn.Module.__setattr__:
        return  # it keeps its own references up to date, as recurrent layers do
    for attribute, value in vars(module).items():
        # Where torch keeps what is registered, which sharding replaces properly.
        if attribute in ("_parameters", "_modules", "_buffers"):
            continue
        _check_attribute(f"{name}.{attribute}".removeprefix("."), value, names)


def _check_attribute(path: str, value: Any, names: Mapping[int, str]) -> None:
    """The part of `_check_references` for one attribute, ``path`` in the model, and its value."""
    for held in _parameters_in(value):
        # A frozen one that the model does not have stays as it is: sharding leaves it alone.
        if id(held) not in names and not held.requires_grad:
            continue
        known = names.get(id(held), "a parameter that the model does not know")
        raise ConfigError(
            f"{path} holds {known} in a plain {type(value).__name__}: it would keep the value of "
            "today, because sharding replaces parameters; use nn.ParameterList or "
            "nn.ParameterDict, or ask the module that owns it"
        )


def _parameters_in(value: Any, outer: frozenset[int] = frozenset()) -> Iterator[nn.Parameter]:
    """The parameters in ``value`` and in the plain containers inside it. ``outer``: ids of the
    containers that it is in, one of which it may be itself."""
    if isinstance(value, nn.Parameter):
        yield value
        return
    # Other objects are not opened: they may be anything, and have attributes that run code.
    if not isinstance(value, dict | list | tuple | set) or id(value) in outer:
        return
    inside = outer | {id(value)}
    for inner in value.values() if isinstance(value, dict) else value:
        yield from _parameters_in(inner, inside)

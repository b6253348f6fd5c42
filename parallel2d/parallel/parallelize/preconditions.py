"""What `parallelize` refuses before it changes anything: `check`, and the rules of a `Layout`."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel2d.base.config import ParallelConfig
from parallel2d.base.config.checks import validated
from parallel2d.base.config.parallel import AUTOMATIC
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh import check_placement, has_cpu_backend, mesh_shape
from parallel2d.parallel.model_structure import is_called
from parallel2d.parallel.parallelize.float8 import check_float8


def check(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, topology: Topology) -> None:
    """Raises `ConfigError` for what a `Layout` does not show: where the ranks are, what their
    devices can do, which software they run, and what else holds the model's parameters.
    Collective."""
    shape = mesh_shape(mesh)
    ranks = mesh.mesh.reshape(shape.replicate, shape.shard, shape.tensor)
    check_placement(ranks, topology, config.allow_cross_node)
    check_float8(config.precision, mesh.device_type)
    _check_same_torch()
    _check_no_optimizer(model)
    check_parameters(model)


def check_arguments(model: nn.Module, mesh: object, config: object) -> None:
    """Raises `ConfigError` for a mesh or configuration of another kind, for settings that
    contradict each other, and for a model that is sharded already."""
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
    if config is not None:
        validated(config)
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and not is_called(model):
        raise ConfigError(
            f"parallelize: a {type(model).__name__} has no forward, in which parameters are "
            "gathered: parallelize each of its members, or a module that calls them"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "the model is sharded already, by parallelize or fully_shard: give the plain one, once"
        )


def _check_same_torch() -> None:
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


def _check_no_optimizer(model: nn.Module) -> None:
    """Raises `ConfigError` when a live optimizer holds parameters of ``model``: sharding replaces
    them, so it would train nothing."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for found in gc.get_objects():
        # Not isinstance, which reads __class__: on a proxy that may run code.
        if not issubclass(type(found), torch.optim.Optimizer):
            continue
        held: set[int] = set()
        for group in found.param_groups:
            held.update(map(id, group["params"]))
        # Optimizers of other models may be alive, and are fine.
        if held & parameters:
            raise ConfigError(
                f"{type(found).__name__} was built before parallelize: it holds parameters that "
                "sharding replaces, and would train nothing; build it after, on the parameters of "
                "the model that parallelize returns"
            )


def check_parameters(model: nn.Module) -> None:
    """Raises `ConfigError`, with the name, for a parameter of which sharding would lose something
    without an error: a hook, a copy of the reference, an update that its module writes. And for one
    without a size."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"{name} has no size yet: run one forward pass of the model before parallelize, or "
                "give its sizes"
            )
        # A tensor has hooks of two kinds; those of the second run when its gradient is complete.
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"{name} has a gradient hook, which would never be called, because sharding "
                "replaces the parameter: call register_post_accumulate_grad_hook on the parameters "
                "of the model that parallelize returns"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            called = name or "the model"
            raise ConfigError(
                f"{called} has max_norm={module.max_norm}: it rescales rows of its "
                "weight in forward, which writes to a gathered copy and is lost; use max_norm=None "
                "and rescale the weight after the optimizer's step"
            )
        # Others keep their own references up to date, as recurrent layers do.
        if type(module).__setattr__ is nn.Module.__setattr__:
            _check_references(name, module, names)


def _check_references(name: str, module: nn.Module, names: Mapping[int, str]) -> None:
    """Raises `ConfigError` when a plain attribute of ``module`` holds parameters.

    ``names``: of the model's parameters, by id.
    """
    # Where torch keeps what is registered, which sharding replaces properly.
    registered = ("_parameters", "_modules", "_buffers")
    plain = [(key, value) for key, value in vars(module).items() if key not in registered]
    for attribute, value in plain:
        for held in _parameters_in(value):
            # A frozen one that the model does not have stays as it is: sharding leaves it alone.
            if id(held) not in names and not held.requires_grad:
                continue
            path = f"{name}.{attribute}".removeprefix(".")
            known = names.get(id(held), "a parameter that the model does not know")
            raise ConfigError(
                f"{path} holds {known} in a plain {type(value).__name__}: it would keep the value "
                "of today, because sharding replaces parameters; use nn.ParameterList or "
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


def check_offload(cpu_offload: bool, device_type: str, replicate: int = 1) -> None:
    """Raises `ConfigError` for ``cpu_offload`` where parameters are on CPU anyway, with replicas,
    and where ranks cannot communicate from CPU: the norm of offloaded gradients, whole parameters
    and checkpoints are collectives of CPU tensors."""
    if not cpu_offload:
        return
    if device_type == "cpu":
        raise ConfigError(
            "cpu_offload=true moves parameters from GPUs to CPU memory, and this runs on CPU: use "
            "cpu_offload=false"
        )
    if replicate > 1:
        raise ConfigError(
            f"cpu_offload=true with {replicate} replicas corrupts gradients in torch 2.13 "
            "(repaired by pytorch pull request 180665, which it does not have): use strategy=zero3 "
            "or zero2, or cpu_offload=false"
        )
    if dist.is_initialized() and not has_cpu_backend():
        raise ConfigError(
            "cpu_offload=true needs a process group with a CPU backend, got "
            f"{dist.get_backend_config()}: initialize it with backend='cpu:gloo,{device_type}:nccl'"
        )

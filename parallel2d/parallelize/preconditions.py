"""What `parallelize` refuses before it changes anything: `check`."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel2d.config import ParallelConfig
from parallel2d.config.checks import validated
from parallel2d.errors import ConfigError
from parallel2d.exchange import all_gather
from parallel2d.mesh import check_placement, mesh_shape
from parallel2d.parallelize.float8 import check_float8
from parallel2d.parallelize.sharding import check_offload
from parallel2d.topology import Topology


def check(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, topology: Topology) -> None:
    """Raises `ConfigError` for a model, mesh or configuration that cannot work. Collective."""
    validated(config)
    shape = mesh_shape(mesh)
    shape.spec().refuse_contradiction(config.strategy)
    ranks = mesh.mesh.reshape(shape.replicate, shape.shard, shape.tensor)
    check_placement(ranks, topology, config.allow_cross_node)
    check_offload(config.cpu_offload, mesh.device_type, shape.replicate)
    check_float8(config.precision, mesh.device_type)
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
    if config is not None and not isinstance(config, ParallelConfig):
        raise ConfigError(
            "the third argument of parallelize is a ParallelConfig, such as "
            f"ParallelConfig('zero3'); got {config!r}"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "the model is sharded already, by parallelize or fully_shard: give the plain one, once"
        )


def check_same_torch() -> None:
    """Raises `ConfigError` on every rank, naming hosts and versions, when ranks run different torch
    versions. Collective."""
    versions = all_gather((str(torch.__version__), socket.gethostname()))
    if len({version for version, _ in versions}) > 1:
        found = sorted({f"{host}: torch {version}" for version, host in versions})
        raise ConfigError(
            f"ranks run different torch versions ({', '.join(found)}): collectives would hang or "
            "mix; install the same one"
        )


def check_no_optimizer(model: nn.Module) -> None:
    """Raises `ConfigError` when a live optimizer holds parameters of ``model``: sharding replaces
    them, so it would train nothing."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for found in gc.get_objects():
        if not issubclass(type(found), torch.optim.Optimizer):
            continue
        if any(
            id(parameter) in parameters
            for group in found.param_groups
            for parameter in group["params"]
        ):
            raise ConfigError(
                f"{type(found).__name__} was built before parallelize: it holds parameters that "
                "sharding replaces, and would "
                "train nothing; build it after, on the parameters of the model that parallelize "
                "returns"
            )


def check_parameters(model: nn.Module) -> None:
    """Raises `ConfigError`, with the name, for a parameter of which sharding would lose something
    without a word: a hook, a copy of the reference, an update that its module writes. And for one
    without a size."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"{name} has no size yet: run one forward pass of the model before parallelize, "
                "or give its sizes"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"{name} has a gradient hook, which would never be called, because sharding "
                "replaces the parameter: call "
                "register_post_accumulate_grad_hook on the parameters of the model that "
                "parallelize returns"
            )
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{prefix or 'the model'} has max_norm={module.max_norm}: it rescales rows of its "
                "weight in forward, which writes to a "
                "gathered copy and is lost; use max_norm=None and rescale the weight after the "
                "optimizer's step"
            )
        if type(module).__setattr__ is not nn.Module.__setattr__:
            continue  # it keeps its own references up to date, as recurrent layers do
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_modules", "_buffers"):
                continue
            for held in _parameters_in(value):
                if id(held) in names or held.requires_grad:
                    known = names.get(id(held), "a parameter that the model does not know")
                    raise ConfigError(
                        f"{prefix + '.' if prefix else ''}{attribute} holds {known} in a plain "
                        f"{type(value).__name__}: it would keep "
                        "the value of today, because sharding replaces parameters; use "
                        "nn.ParameterList or nn.ParameterDict, or ask "
                        "the module that owns it"
                    )


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    """Those in ``value`` and in the plain containers inside it."""
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _parameters_in(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _parameters_in(inner)

"""Checks that `parallelize` and `Layout` run before the model changes."""

from __future__ import annotations

import gc
import socket
from collections import defaultdict
from collections.abc import Container, Mapping
from itertools import chain, combinations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.spectral_norm import SpectralNorm

from parallel2d.base.config import ParallelConfig
from parallel2d.base.config.checks import validated
from parallel2d.base.config.parallel import AUTOMATIC, AXES
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.base.topology import Topology
from parallel2d.parallel.fsdp_internals.tensors import SHARDED_AS, storage_of
from parallel2d.parallel.mesh import axis_names, has_cpu_backend, mesh_shape, ranks_of
from parallel2d.parallel.mesh_sizes import check_placement
from parallel2d.parallel.model_structure import (
    fqn_of,
    is_called,
    names_by_id,
    plain_attributes,
    tensors_in,
)
from parallel2d.parallel.parallelize.float8 import check_float8
from parallel2d.parallel.weights.named_tensors import stepped_by


def mark_sharded(model: nn.Module, ignored: Container[str]) -> None:
    """Mark the parameters of ``model``, so that `check_parameters` rejects them in another model.

    Parameters with FQNs in ``ignored`` may be shared with another model and are not marked.
    """
    for name, parameter in model.named_parameters():
        if fqn_of(name) not in ignored:
            setattr(parameter, SHARDED_AS, name)


def check(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, topology: Topology) -> None:
    """Raise `ConfigError` for problems that cannot be found from a `Layout`. Collective.

    Checks the hosts of the ranks, the capabilities of their devices, their torch versions, and
    other references to the model's parameters.
    """
    check_placement(ranks_of(mesh), topology, config.allow_cross_node)
    check_float8(config.precision, mesh.device_type)
    ranks = all_gather((str(torch.__version__), socket.gethostname()))
    if len({version for version, _ in ranks}) > 1:
        found = sorted({f"{host}: torch {version}" for version, host in ranks})
        raise ConfigError(
            f"ranks run different torch versions ({', '.join(found)}): collectives would hang or "
            "mix; install the same one"
        )
    _check_no_optimizer(model)
    check_parameters(model)


def check_arguments(model: nn.Module, mesh: object, config: object) -> None:
    """Raise `ConfigError` for invalid arguments of `parallelize`.

    Examples are a mesh or configuration of a wrong type, settings that contradict each other, and a
    model that is already sharded.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            "the second argument of parallelize is the mesh, from parallel2d.build_mesh; got "
            f"{mesh!r}"
        )
    _check_axes(mesh)
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the mesh, which has ranks "
            f"{mesh.mesh.flatten().tolist()}: call parallelize on these only"
        )
    if mesh_shape(mesh).context > 1 and mesh.size() < dist.get_world_size():
        raise ConfigError(
            "a mesh over a part of the ranks cannot have the axis context: use all ranks, or "
            "shard instead"
        )
    if not isinstance(config, ParallelConfig | None):
        raise ConfigError(
            "the third argument of parallelize is a ParallelConfig, such as "
            f"ParallelConfig('zero3'); got {config!r}"
        )
    if config is not None and config.strategy.name == AUTOMATIC:
        raise ConfigError("strategy=auto is resolved by the train command: in code, name one")
    if config is not None and config.precision.name == AUTOMATIC:
        raise ConfigError("precision=auto is resolved by the train command: in code, name one")
    if config is not None:
        validated(config)
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and not is_called(model):
        raise ConfigError(
            f"parallelize: a {type(model).__name__} has no forward to gather its "
            "parameters in: parallelize each of its members, or a module that calls them"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "the model is sharded already, by parallelize or fully_shard: pass the plain model"
        )


def _check_axes(mesh: DeviceMesh) -> None:
    """Raise `ConfigError` for a missing shard axis, or for an optional axis of size 1."""
    sizes = dict(zip(axis_names(mesh), mesh.shape, strict=False))
    absent = []
    for axis in AXES[:2]:
        if axis not in sizes:
            absent.append(axis)
    # If the mesh has no axis names, `mesh_shape` raises an error that lists the required names.
    if "replicate" in sizes and absent:
        raise ConfigError(
            f"the mesh has no axis {absent[0]}: give it one of size 1, as build_mesh does, such as "
            f"init_device_mesh(..., ({mesh.size()}, 1), mesh_dim_names=('replicate', 'shard'))"
        )
    for axis in AXES[2:]:
        if sizes.get(axis) == 1:
            raise ConfigError(f"the mesh has an axis {axis} of size 1: omit it, as build_mesh does")


def _check_no_optimizer(model: nn.Module) -> None:
    """Raise `ConfigError` when an existing optimizer holds parameters of ``model``.

    Sharding replaces the parameters, so the optimizer would not train the model.
    """
    parameters = set(map(id, model.parameters()))
    for found in gc.get_objects():
        # Use `type` and not `isinstance`, which reads __class__ and may run code of a proxy object.
        if not issubclass(type(found), torch.optim.Optimizer):
            continue
        # The optimizer may belong to another model.
        if parameters.intersection(map(id, stepped_by(found))):
            raise ConfigError(
                f"{type(found).__name__} was built before parallelize: it holds parameters that "
                "sharding replaces, and would train nothing; build it after, on the parameters of "
                "the model that parallelize returns"
            )


def check_parameters(model: nn.Module) -> None:
    """Raise `ConfigError` for a parameter that would train wrongly after sharding.

    Such a parameter has a gradient hook, is referenced by an attribute of a module, shares memory
    with another tensor, is changed by its module in forward (``max_norm``), has no size yet, is
    missing in ``named_parameters()``, or belongs to another parallelized model.
    """
    names = names_by_id(model.named_parameters())
    for name, parameter in nn.Module.named_parameters(model):
        if id(parameter) not in names:
            raise ConfigError(
                f"{type(model).__name__}.named_parameters() omits {name}, which must be sharded "
                "too: rename the method that selects parameters"
            )
        _check_parameter(name, parameter)
    by_storage: dict[int | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        by_storage[storage_of(parameter)].append(parameter)
    by_storage.pop(None, None)
    for one, other in chain.from_iterable(combinations(same, 2) for same in by_storage.values()):
        if _overlap(one, other):
            raise ConfigError(
                f"{names[id(one)]} and {names[id(other)]} are two parameters in the same memory, "
                "which sharding would separate: keep one, and take views of it in forward"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            called = name or "the model"
            raise ConfigError(
                f"{called} has max_norm={module.max_norm}: it rescales rows of its "
                "weight in forward, which writes to an unsharded copy and is lost; use "
                "max_norm=None and rescale the weight after the optimizer's step"
            )
        _check_references(name, module, names, by_storage)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    earlier = getattr(parameter, SHARDED_AS, None)
    # Two models may share a frozen parameter that is not a `DTensor` yet.
    if earlier is not None and (parameter.requires_grad or isinstance(parameter, DTensor)):
        raise ConfigError(
            f"{name} is {earlier} of another model, which parallelize has sharded: the two "
            "models would train separate parameters; put both into one nn.Module and parallelize "
            "that, or use a copy here"
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigError(
            f"{name} has no size yet: run one forward pass of the model before parallelize, or "
            "give its sizes"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ConfigError(
            f"{name} has a gradient hook, which would never be called, because sharding "
            "replaces the parameter: call register_post_accumulate_grad_hook on the parameters "
            "of the model that parallelize returns"
        )


def _check_references(
    name: str,
    module: nn.Module,
    names: Mapping[int, str],
    by_storage: Mapping[int | None, list[nn.Parameter]],
) -> None:
    """Raise `ConfigError` when an attribute or a buffer of ``module`` aliases a parameter.

    ``names`` maps the id of each parameter of the model to its FQN.
    """
    for attribute, value in plain_attributes(module):
        if _is_computed_in_forward(module, attribute):
            continue
        for held in tensors_in(value):
            known = ""
            # A frozen parameter that is not registered in the model is not sharded and stays valid.
            if isinstance(held, nn.Parameter) and (id(held) in names or held.requires_grad):
                known = names.get(id(held), "a parameter that the model does not know")
            elif not isinstance(held, nn.Parameter):
                for parameter in by_storage.get(storage_of(held), ()):
                    # A view of a frozen parameter stays valid, unless the parameter is on meta: its
                    # values are set later, in other memory.
                    changes = parameter.requires_grad or parameter.is_meta
                    if changes and _overlap(held, parameter):
                        known = f"the memory of {names[id(parameter)]}"
            if known:
                path = f"{name}.{attribute}".removeprefix(".")
                raise ConfigError(
                    f"{path} holds {known} in a plain {type(value).__name__}: it would keep the "
                    "current value, because sharding replaces parameters; use nn.ParameterList or "
                    "nn.ParameterDict, or ask the module that owns it"
                )


def _is_computed_in_forward(module: nn.Module, attribute: str) -> bool:
    """Return True for the weight that `torch.nn.utils.spectral_norm` sets before each forward."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm) and hook.name == attribute:
            return True
    return False


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if the memory ranges of two tensors of one storage overlap.

    Tensors of one storage need not overlap: a memory-mapped file holds many tensors in one storage.
    """
    ranges = []
    for tensor in (one, other):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = 1 + sum((size - 1) * stride for size, stride in steps)
        begin = tensor.storage_offset() * tensor.itemsize
        ranges.append((begin, begin + length * tensor.itemsize))
    return bool(max(ranges)[0] < min(ranges)[1]) and 0 not in (one.numel(), other.numel())


def check_symmetric_memory(symmetric_memory: bool, device_type: str) -> None:
    """Raise `ConfigError` for ``symmetric_memory`` on a CPU, where NCCL does not run."""
    if symmetric_memory and device_type == "cpu":
        raise ConfigError(
            "fsdp.symmetric_memory=true needs GPUs with NCCL, and this runs on CPU: use "
            "fsdp.symmetric_memory=false"
        )


def check_offload(cpu_offload: bool, device_type: str, replicate: int = 1) -> None:
    """Raise `ConfigError` for ``cpu_offload`` if it would have no effect or would fail.

    Offload needs an accelerator, a single replica, and a process group with a CPU backend. The CPU
    backend runs the collectives on CPU tensors: for the gradient norm, for unsharding parameters,
    and for checkpoints.
    """
    if not cpu_offload:
        return
    if device_type == "cpu":
        raise ConfigError(
            "cpu_offload=true moves parameters from GPUs to CPU memory, and this runs on CPU: use "
            "cpu_offload=false"
        )
    if replicate > 1:
        raise ConfigError(
            f"cpu_offload=true with {replicate} replicas may corrupt gradients: torch does not "
            "order their copies to the host before the next reduce-scatter (pytorch pull request "
            "180665); use strategy=zero3 or zero2, or cpu_offload=false"
        )
    if dist.is_initialized() and not has_cpu_backend():
        raise ConfigError(
            "cpu_offload=true needs a process group with a CPU backend, got "
            f"{dist.get_backend_config()}: initialize it with backend='cpu:gloo,{device_type}:nccl'"
        )

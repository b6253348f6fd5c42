"""Shards inside the ``shard`` axis and reduces over ``replicate``, both by FSDP2's `fully_shard`.

[Note: one engine for every strategy] A mesh with replicate > 1 goes to `fully_shard` as two axes (hybrid sharding: reduce-scatter,
then all-reduce of the shard); with shard = 1 that is plain replication; with replicate = 1 only the ``shard`` axis goes in and
no all-reduce exists. So ``ddp``, ``zero2``, ``zero3`` and the hybrids are five readings of one code path, with one set of hooks and
one kind of parameter. Gradients are averaged over the data ranks, as everywhere in PyTorch; `parallel2d.loss` builds on it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from parallel2d.config import ConfigError, PrecisionConfig, ResolvedParallelConfig
from parallel2d.mesh import mesh_shape
from parallel2d.parallelize.outputs import own_outputs
from parallel2d.parallelize.structure import candidate_classes, owns_itself

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast_storage(model: nn.Module, precision: PrecisionConfig, fp32: Collection[int] = ()) -> nn.Module:
    """Casts floating-point parameters to the storage dtype, and buffers to theirs.

    ``fp32``: ids of modules whose own parameters are stored in fp32 at least. Buffers keep the dtype they were built with unless
    ``precision.buffers`` names one or storage is fp64, in which they are widened.
    """
    tied: dict[int, nn.Parameter] = {}
    buffers = precision.buffers or ("fp64" if precision.storage == "fp64" else None)
    for module in model.modules():
        storage = DTYPES[precision.storage]
        if id(module) in fp32:
            storage = torch.promote_types(storage, torch.float32)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != storage:
                if id(parameter) not in tied:
                    tied[id(parameter)] = nn.Parameter(parameter.detach().to(storage), parameter.requires_grad)
                module._parameters[name] = tied[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffers is not None:
                module._buffers[name] = buffer.to(DTYPES[buffers])
    return model


def fp32_modules(model: nn.Module, precision: PrecisionConfig) -> set[int]:
    """Ids of the modules whose classes `precision.fp32_modules` names. Raises `ConfigError`, with candidates, for a class that
    matches no module with parameters of its own alone."""
    wanted = set(precision.fp32_modules)
    found = {id(m): type(m).__name__ for m in model.modules() if type(m).__name__ in wanted and any(True for _ in m.parameters())}
    if missing := wanted - set(found.values()):
        raise ConfigError(
            f"precision.fp32_modules={list(precision.fp32_modules)}: no module of class {', '.join(sorted(missing))} with "
            f"parameters in {type(model).__name__}; candidates: {candidate_classes(model)}"
        )
    return {id(inner) for outer in model.modules() if id(outer) in found for inner in outer.modules() if owns_itself(inner)}


def mixed_precision(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """The policy for `fully_shard`; a dtype that equals the one it would have anyway is left out."""
    storage, param, reduce = (DTYPES[name] for name in (precision.storage, precision.param, precision.reduce))
    return MixedPrecisionPolicy(
        param_dtype=param if param != storage else None,
        reduce_dtype=reduce if reduce != param else None,
        cast_forward_inputs=precision.cast_forward_inputs,
    )


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that `fully_shard` sees; see [Note: one engine for every strategy]."""
    if mesh_shape(mesh).replicate > 1:
        return mesh["replicate", "shard"]
    return mesh["shard"]


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    groups: Sequence[Sequence[nn.Module]],
    settings: ResolvedParallelConfig,
    fp32: Collection[int] = (),
    ignored: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Applies `fully_shard` to each group, innermost first, and to the root for all that is left.

    ``fp32``: ids of modules, each a group of its own, that compute in fp32 and hand over what ``precision.param`` says.
    ``ignored``: parameters that stay as they are.
    """
    sharding = sharding_mesh(mesh)
    precision = settings.precision
    policy = mixed_precision(precision)
    in_fp32 = MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=DTYPES[precision.param])
    root = dataclasses.replace(policy, output_dtype=DTYPES[precision.output]) if precision.output else policy
    reshard = settings.strategy.reshard_after_forward
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if settings.cpu_offload else OffloadPolicy()
    common: dict[str, Any] = {
        "mesh": sharding,
        "reshard_after_forward": reshard,
        "offload_policy": offload,
        "ignored_params": ignored or None,
    }
    for group in groups:
        modules = group[0] if len(group) == 1 else list(group)
        chosen = in_fp32 if len(group) == 1 and id(group[0]) in fp32 else policy
        for module in group:
            own_outputs(module)
        fully_shard(modules, mp_policy=chosen, **common)
    own_outputs(model)
    fully_shard(model, mp_policy=root, **common)
    if precision.keep_low_precision_gradients:
        _keep_gradients_in(model, DTYPES[precision.reduce])
    return model


def check_offload(cpu_offload: bool, device_type: str) -> None:
    """Raises `ConfigError` for ``cpu_offload`` where parameters are on CPU anyway, and where ranks cannot communicate from CPU:
    the norm of offloaded gradients, whole parameters and checkpoints are collectives of CPU tensors."""
    if not cpu_offload:
        return
    if device_type == "cpu":
        raise ConfigError(
            "cpu_offload=true moves parameters from GPUs to CPU memory, and this runs on CPU: use cpu_offload=false"
        )
    if dist.is_initialized() and not _has_cpu_backend():
        raise ConfigError(
            f"cpu_offload=true needs a process group with a CPU backend, got {dist.get_backend_config()}: initialize it with "
            f"backend='cpu:gloo,{device_type}:nccl'"
        )


def _has_cpu_backend() -> bool:
    return torch.device("cpu") in dist.distributed_c10d._get_default_group()._device_types


def _keep_gradients_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Leaves reduced gradients in ``dtype``: the engine casts them to the dtype that a group believes its parameters are stored
    in, which it looks up once, before the first forward."""

    def look_up(group: Any, original: Callable[[], None]) -> None:
        original()
        if group._reduce_dtype == dtype or (group._reduce_dtype is None and group._orig_dtype is not None):
            group._orig_dtype = dtype
            for parameter in group.fsdp_params:  # as they are now: allocation replaced those that `shard` saw
                if parameter.sharded_param.requires_grad:
                    parameter.sharded_param.grad_dtype = dtype

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._init_mp_dtypes = functools.partial(look_up, group, group._init_mp_dtypes)  # type: ignore[method-assign]

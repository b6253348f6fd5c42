"""Shards inside the ``shard`` axis by FSDP2's `fully_shard`, and has gradients reduced over
``replicate``.

[Note: one engine for every strategy] A mesh with replicate > 1 goes to `fully_shard` as two axes,
and parameters are placed on both; with shard = 1 that is plain replication; with replicate = 1 only
the ``shard`` axis goes in. The engine gathers and reduces over the shard axis, `parallel2d.sync`
reduces over the replicas. So ``ddp``, ``zero2``, ``zero3`` and the hybrids are five readings of one
code path, with one set of hooks and one kind of parameter. Gradients are averaged over the data
ranks, as everywhere in PyTorch; `parallel2d.loss` builds on it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from parallel2d.config import ConfigError, PrecisionConfig, ResolvedParallelConfig
from parallel2d.mesh import Topology, has_cpu_backend, mesh_shape
from parallel2d.parallelize import fsdp_internals
from parallel2d.parallelize.collective_order import (
    CollectiveOrder,
    OrderedAllGather,
    OrderedReduceScatter,
)
from parallel2d.parallelize.outputs import own_outputs
from parallel2d.parallelize.scalars import Scalar
from parallel2d.parallelize.structure import (
    candidate_classes,
    canonical_name,
    own_parameters,
    owning_modules,
)
from parallel2d.sync import GradientSync, TorchSync

log = logging.getLogger(__name__)

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def cast_storage(
    model: nn.Module, precision: PrecisionConfig, fp32: Collection[int] = ()
) -> nn.Module:
    """Casts parameters to the storage dtype, complex ones to the complex dtype of its width, and
    buffers to theirs. Makes them contiguous.

    ``fp32``: ids of modules whose own parameters are stored in fp32 at least. Buffers keep the
    dtype they were built with unless ``precision.buffers`` names one or storage is fp64, in which
    they are widened. Raises `ConfigError` for complex parameters in fewer than 32 bits, which no
    such dtype can hold.
    """
    cast: dict[nn.Parameter, nn.Parameter] = {}
    buffers = precision.buffers or ("fp64" if precision.storage == "fp64" else None)
    wide = {
        id(own)
        for module in model.modules()
        if id(module) in fp32
        for own in own_parameters(module)
    }
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            _check_complex(name, precision)
        elif not parameter.is_floating_point():
            continue
        storage = DTYPES[precision.storage]
        if id(parameter) in wide:
            storage = torch.promote_types(storage, torch.float32)
        value = parameter.detach()
        stored = value.to(storage.to_complex() if parameter.is_complex() else storage).contiguous()
        if stored is not value:
            cast[parameter] = nn.Parameter(stored, parameter.requires_grad)
    for module in model.modules():
        for name, held in list(module._parameters.items()):
            if held in cast:
                setattr(module, name, cast[held])
        if buffers is not None:
            _cast_buffers(module, DTYPES[buffers])
    return model


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Complex ones only to a dtype of 32 bits or more."""
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)
        elif buffer.is_complex() and dtype.itemsize >= 4:
            module._buffers[name] = buffer.to(dtype.to_complex())


def _check_complex(name: str, precision: PrecisionConfig) -> None:
    """Raises `ConfigError` where ``precision`` has fewer than 32 bits for the complex parameter
    ``name``."""
    for setting in ("storage", "param", "reduce"):
        if DTYPES[getattr(precision, setting)].itemsize < 4:
            raise ConfigError(
                f"precision.{setting}={getattr(precision, setting)}: {name} is complex, and no "
                "complex dtype is that narrow; "
                "use precision=fp32"
            )


def fp32_modules(model: nn.Module, precision: PrecisionConfig) -> set[int]:
    """Ids of the modules whose classes `precision.fp32_modules` names. Raises `ConfigError`, with
    candidates, for a class that matches no module with parameters of its own alone."""
    wanted = set(precision.fp32_modules)
    found = {
        id(m): type(m).__name__
        for m in model.modules()
        if type(m).__name__ in wanted and any(True for _ in m.parameters())
    }
    if missing := wanted - set(found.values()):
        raise ConfigError(
            f"precision.fp32_modules={list(precision.fp32_modules)}: no module of class "
            f"{', '.join(sorted(missing))} with "
            f"parameters in {type(model).__name__}; candidates: {candidate_classes(model)}"
        )
    return {
        id(inner)
        for outer in model.modules()
        if id(outer) in found
        for _, inner in owning_modules(outer)
    }


def mixed_precision(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """The policy for `fully_shard`; a dtype that equals the one it would have anyway is left
    out."""
    storage, param, reduce = (
        DTYPES[name] for name in (precision.storage, precision.param, precision.reduce)
    )
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

    ``fp32``: ids of modules, each a group of its own, that compute in fp32 and hand over what
    ``precision.param`` says. ``ignored``: parameters that stay as they are.
    """
    sharding = sharding_mesh(mesh)
    precision = settings.precision
    policy = mixed_precision(precision)
    in_fp32 = MixedPrecisionPolicy(
        torch.float32, torch.float32, output_dtype=DTYPES[precision.param]
    )
    root = (
        dataclasses.replace(policy, output_dtype=DTYPES[precision.output])
        if precision.output
        else policy
    )
    reshard = settings.strategy.reshard_after_forward
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if settings.cpu_offload
        else OffloadPolicy()
    )
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
    return model


def synchronize(
    model: nn.Module,
    mesh: DeviceMesh,
    settings: ResolvedParallelConfig,
    topology: Topology,
    fp32: Collection[int] = (),
    scalars: Sequence[Scalar] = (),
) -> None:
    """Has the gradients of ``model``, which `shard` has made, reduced over all data ranks.

    ``fp32``: as of `shard`. Raises `ConfigError` for a group whose trained parameters have several
    dtypes, and for what torch's own engine cannot do.
    """
    shape, precision = mesh_shape(mesh), settings.precision
    names = {id(module): canonical_name(name) for name, module in model.named_modules()}
    groups = [
        fsdp_internals.ShardedGroup(
            group, " and ".join(names[id(module)] for module in group.modules)
        )
        for group in reversed(fsdp_internals.groups(model))
    ]
    if settings.sync.engine == "torch":
        if scalars or precision.keep_low_precision_gradients:
            what = (
                "parameters without dimensions are"
                if scalars
                else "precision.keep_low_precision_gradients is"
            )
            raise ConfigError(f"sync.engine=torch: {what} a matter of sync.engine=parallel2d alone")
        log.info(
            "sync.engine=torch: gradients of parameters that ranks or micro-batches use "
            "differently may land in others"
        )
        TorchSync(model, groups)
        return
    if shape.replicate > 1:
        fsdp_internals.reduce_over_shard_alone(model, mesh)
    storage, reduce = DTYPES[precision.storage], DTYPES[precision.reduce]
    wide = torch.promote_types(storage, torch.float32)
    for group in groups:
        in_fp32 = id(group.modules[0]) in fp32
        group.set_dtypes(wide, torch.float32 if in_fp32 else reduce)
    order = None
    if shape.shard > 1:
        ranks = dist.get_process_group_ranks(mesh.get_group("shard"))
        one_host = len({topology.hosts[rank] for rank in ranks}) == 1
        order = CollectiveOrder.of(mesh.get_group("shard"), one_host, mesh.device_type)
    final = reduce if precision.keep_low_precision_gradients else storage
    engine = GradientSync(
        model,
        mesh,
        groups,
        final_dtype=final if final != wide else None,
        scalars=scalars,
        order=order,
        bucket_mib=settings.sync.bucket_mib,
    )
    fsdp_internals.after_backward(model, engine.end_backward)
    if order is not None:
        number = order.add_model([group.called for group in groups])
        for index, group in enumerate(groups):
            for module in group.modules[:1]:
                assert isinstance(module, FSDPModule)
                module.set_custom_all_gather(OrderedAllGather(order, number, index, engine.abandon))
                module.set_custom_reduce_scatter(
                    OrderedReduceScatter(order, number, index, engine.abandon)
                )


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
            "(repaired by pytorch pull request 180665, "
            "which it does not have): use strategy=zero3 or zero2, or cpu_offload=false"
        )
    if dist.is_initialized() and not has_cpu_backend():
        raise ConfigError(
            "cpu_offload=true needs a process group with a CPU backend, got "
            f"{dist.get_backend_config()}: initialize it with "
            f"backend='cpu:gloo,{device_type}:nccl'"
        )

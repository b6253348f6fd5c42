"""Shards inside the ``shard`` axis and reduces over ``replicate``, both by FSDP2's `fully_shard`.

[Note: one engine for every strategy] A mesh with replicate > 1 goes to `fully_shard` as two axes (hybrid sharding: reduce-scatter,
then all-reduce of the shard); with shard = 1 that is plain replication; with replicate = 1 only the ``shard`` axis goes in and
no all-reduce exists. So ``ddp``, ``zero2``, ``zero3`` and the hybrids are five readings of one code path, with one set of hooks and
one kind of parameter. Gradients are averaged over the data ranks, as everywhere in PyTorch; `parallel2d.loss` builds on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallel2d.config import PrecisionConfig, ResolvedParallelConfig
from parallel2d.mesh import mesh_shape

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast_storage(model: nn.Module, precision: PrecisionConfig) -> nn.Module:
    """Casts floating-point parameters to the storage dtype, and buffers too where it is wider than fp32."""
    storage = DTYPES[precision.storage]
    tied: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != storage:
                if id(parameter) not in tied:
                    tied[id(parameter)] = nn.Parameter(parameter.detach().to(storage), parameter.requires_grad)
                module._parameters[name] = tied[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and storage == torch.float64:
                module._buffers[name] = buffer.to(storage)
    return model


def mixed_precision(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """The policy for `fully_shard`; a dtype that equals the one it would have anyway is left out."""
    storage, param, reduce = (DTYPES[name] for name in (precision.storage, precision.param, precision.reduce))
    return MixedPrecisionPolicy(
        param_dtype=param if param != storage else None,
        reduce_dtype=reduce if reduce != param else None,
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
) -> nn.Module:
    """Applies `fully_shard` to each group, innermost first, and to the root for all that is left."""
    sharding = sharding_mesh(mesh)
    policy = mixed_precision(settings.precision)
    reshard = settings.strategy.reshard_after_forward
    for group in groups:
        modules = group[0] if len(group) == 1 else list(group)
        fully_shard(modules, mesh=sharding, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=sharding, mp_policy=policy, reshard_after_forward=reshard)
    return model

"""A differentiable all-gather in the middle of a step, for losses over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather as exchange_all
from parallel2d.parallel.mesh import group_of, mesh_shape

_AXES = ("shard", "replicate")  # from the innermost to the outermost


def all_gather(features: Tensor, mesh: DeviceMesh, *, check_shapes: bool = True) -> Tensor:
    """Return the features of all data ranks, concatenated along dim 0 in the order of
    `parallel2d.data_coordinate`. Differentiable; collective over the data ranks.

    The backward pass sums the gradients that all data ranks have for this rank's features (a
    reduce-scatter). With the average over data ranks that `parallelize` takes, the gradients of
    parameters are those of one process if every rank computes

    * the mean loss of its own samples against all samples, or
    * the same loss of all samples.

    Args:
        features: [samples, ...] of this rank, floating point, of one shape on all data ranks.
            Ranks of a context or tensor axis that share the data hold the same features.
        mesh: of the parallelized model.
        check_shapes: compare the shapes of all ranks first, one small exchange for each axis.

    Returns:
        Tensor [samples of all data ranks, ...].

    Raises:
        ConfigError: features without dimensions, or of different shapes.
    """
    if features.ndim == 0 or not features.is_floating_point():
        raise ConfigError(
            "all_gather: features must be floating point with samples in dim 0, got "
            f"{features.dtype} of shape {tuple(features.shape)}"
        )
    sizes = mesh_shape(mesh)
    gathered = features
    for axis in _AXES:
        if getattr(sizes, axis) > 1:
            group = group_of(mesh, axis)
            if check_shapes:
                _refuse_different(gathered, group)
            gathered = _AllGather.apply(gathered, group)
    return gathered


def _refuse_different(features: Tensor, group: dist.ProcessGroup) -> None:
    """Raise `ConfigError`, on every rank of ``group``, for features of different shapes.
    Collective over the group."""
    found = exchange_all([list(features.shape), str(features.dtype)], group)
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, found, strict=True):
        if other != found[0]:
            raise ConfigError(
                f"all_gather: features of shape {tuple(other[0])} ({other[1]}) on rank {rank}, and "
                f"{tuple(found[0][0])} ({found[0][1]}) on rank {ranks[0]}; pad them to one shape"
            )


class _AllGather(torch.autograd.Function):
    """The all-gather along dim 0 over one group; its backward is a reduce-scatter of sums."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = own.new_empty((group.size() * own.shape[0], *own.shape[1:]))
        dist.all_gather_single(gathered, own.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient, group = gradients[0].contiguous(), ctx.group
        shape: Sequence[int] = (gradient.shape[0] // group.size(), *gradient.shape[1:])
        own = gradient.new_empty(shape)
        dist.reduce_scatter_single(own, gradient, group=group)
        return own, None

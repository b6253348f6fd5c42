"""A differentiable all-gather in the middle of a step, for losses over the samples of all ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather as exchange_all
from parallel2d.parallel.context_axis import gather
from parallel2d.parallel.mesh import mesh_shape

_AXES = ("shard", "replicate")  # from the innermost to the outermost


def all_gather(features: Tensor, mesh: DeviceMesh, *, check_shapes: bool = True) -> Tensor:
    """Return the features of all data ranks, concatenated along dim 0 in the order of
    `parallel2d.data_coordinate`. Differentiable; collective over the data ranks.

    The backward pass sums the gradients that all data ranks have for this rank's features. With the
    average over data ranks that `parallelize` takes, parameters have the gradients of one process
    if every rank computes

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
            group = mesh.get_group(axis)
            if check_shapes:
                _refuse_different(gathered, group)
            gathered = gather(gathered, group).flatten(0, 1)
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

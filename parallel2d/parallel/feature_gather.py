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

    Backward sums the gradients of all data ranks for this rank's features, and `parallelize`
    averages the gradients of parameters over the data ranks. The result equals the gradient of one
    process in two cases:

    * every rank computes the mean loss of its samples against all samples, or
    * every rank computes the same loss of all samples.

    Args:
        features: floating-point [samples, ...] of this rank, with equal shapes on all data ranks.
            Context and tensor ranks that share the data must pass equal features.
        mesh: the mesh of the model.
        check_shapes: True to compare the shapes of all ranks first: a small all-gather per axis.

    Returns:
        Tensor [samples of all data ranks, ...].

    Raises:
        ConfigError: features without dims, of a dtype that is not floating point, or of different
            shapes or dtypes on the ranks.
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
    """Raise `ConfigError` on every rank of ``group`` if shapes or dtypes differ. Collective."""
    found = exchange_all([list(features.shape), str(features.dtype)], group)
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, found, strict=True):
        if other != found[0]:
            raise ConfigError(
                f"all_gather: features of shape {tuple(other[0])} ({other[1]}) on rank {rank}, and "
                f"{tuple(found[0][0])} ({found[0][1]}) on rank {ranks[0]}; pad them to one shape"
            )

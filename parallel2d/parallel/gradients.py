"""Norm and clipping of gradients on different meshes.

Some gradients of a model are sharded over the shard axis, some over the shard and tensor axes, and
some are replicated. torch's ``clip_grad_norm_`` does not support such a mixture. Here gradients are
grouped by the axes that shard them. The norm of the local shards of a group is reduced over exactly
these axes. Then the norms of the groups are combined, so that the result equals the norm in a
single process. With ``strategy=hybrid_full`` a replica has gradients only for the rows that this
replica updates.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from parallel2d.parallel.fsdp_internals.tensors import part_of, quick_reads
from parallel2d.parallel.model_structure import updated_as

# The axes that split a gradient, each with its size and process group.
_Split = tuple[tuple[int, dist.ProcessGroup], ...]


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the global ``norm_type``-norm of all gradients, equal on every rank. Collective.

    The norm is a scalar tensor in fp32, or in fp64 for fp64 gradients. It is zero if no parameter
    has a gradient. Raises ValueError for a ``norm_type`` that is not above 0.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be above 0, such as 2 or inf")
    infinite = math.isinf(norm_type)
    operation = dist.ReduceOp.SUM
    combine: Callable[[Tensor, Tensor], Tensor] = torch.add
    if infinite:
        operation, combine = dist.ReduceOp.MAX, torch.maximum
    parts: list[Tensor] = []
    dtype = torch.float32
    for split, gradients in _by_split(parameters).items():
        part = _local_part(gradients, norm_type)
        # Reduce only over the axes that shard the gradients. Ranks of other axes have equal sums.
        for _, group in split:
            dist.all_reduce(part, operation, group)
        parts.append(part)
        dtype = torch.promote_types(dtype, gradients[0].dtype)
    total = functools.reduce(combine, parts) if parts else torch.zeros((), dtype=torch.float64)
    if not infinite:
        total = total.pow(1 / norm_type)
    return total.to(dtype)


def squared_norm_share(parameters: Iterable[Tensor], world_size: int) -> Tensor:
    """Return an fp64 scalar whose sum over all ranks is the squared 2-norm of all gradients.

    A caller can add this number to another all-reduce. ``world_size`` is the number of ranks in
    that sum, and the mesh must contain all these ranks.
    """
    shares: list[Tensor] = []
    for split, gradients in _by_split(parameters).items():
        # ``copies`` ranks have the same elements, so each contributes a fraction.
        copies = world_size / math.prod(size for size, _ in split)
        shares.append(_local_part(gradients, 2.0) / copies)
    return functools.reduce(torch.add, shares) if shares else torch.zeros((), dtype=torch.float64)


@torch.no_grad()
def _by_split(parameters: Iterable[Tensor]) -> dict[_Split, list[Tensor]]:
    """Group the local parts of the gradients by the axes that split them."""
    groups: dict[_Split, list[Tensor]] = defaultdict(list)
    known: dict[tuple[DeviceMesh, tuple[Placement, ...]], _Split] = {}
    for gradient in _gradients(parameters):
        if isinstance(gradient, DTensor):
            # The norm of partial sums is not the norm of their sum.
            gradient = without_partial(gradient)
            mesh, placements = gradient.device_mesh, gradient.placements
            if (mesh, placements) not in known:
                known[mesh, placements] = _split_of(mesh, placements)
            groups[known[mesh, placements]].append(part_of(gradient))
        else:
            groups[()].append(gradient)
    return groups


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of ``parameters``, without missing gradients."""
    found = []
    with quick_reads():
        for parameter in parameters:
            gradient = updated_as(parameter).grad
            if gradient is not None:
                found.append(gradient)
    return found


def _split_of(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> _Split:
    split = []
    for axis, placement in enumerate(placements):
        # On an axis of size 1 nothing is split.
        if mesh.size(axis) > 1 and not placement.is_replicate():
            split.append((mesh.size(axis), mesh.get_group(axis)))
    return tuple(split)


def without_partial(gradient: DTensor) -> DTensor:
    """Return ``gradient`` with partial sums reduced; collective if any sum is partial."""
    if not any(map(Placement.is_partial, gradient.placements)):
        return gradient
    whole = [Replicate() if each.is_partial() else each for each in gradient.placements]
    return gradient.redistribute(placements=whole)


def _local_part(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return the sum of ``|x| ** norm_type``, or the maximum of ``|x|``, as an fp64 scalar."""
    # `_foreach` functions take tensors of one dtype; a maximum needs at least one element.
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if gradient.numel():
            by_dtype[gradient.dtype].append(gradient)
    norms: list[Tensor] = []
    for dtype, same in by_dtype.items():
        # A norm in bf16 would have 8 bits of precision, and would depend on the sharding.
        wide = torch.promote_types(dtype, torch.float32)
        norms.append(torch.stack(torch._foreach_norm(same, norm_type, dtype=wide)).double())
    if not norms:
        return gradients[0].new_zeros((), dtype=torch.float64)
    part = torch.cat(norms) if len(norms) > 1 else norms[0]
    if math.isinf(norm_type):
        return part.amax()
    return part.pow(norm_type).sum()


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply every gradient by ``factor`` in place."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in map(part_of, _gradients(parameters)):
        by_dtype[gradient.dtype].append(gradient)
    for dtype, gradients in by_dtype.items():
        # `_foreach_mul_` takes a tensor factor of the same dtype only.
        same = factor.to(dtype) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(gradients, same)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that scales gradients of ``norm`` to a norm of at most ``max_norm``."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_gradient_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale gradients to a global norm of at most ``max_norm``. Collective.

    Returns the norm before scaling. With ``max_norm=inf``, or if the norm is not finite, gradients
    do not change.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type)
    if math.isfinite(max_norm):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # Select on the device: an `if` would make the host wait for the norm.
        scale_gradients(parameters, torch.where(norm.isfinite(), factor, 1.0))
    return norm


@torch.no_grad()
def clip_gradient_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp every element of every gradient to [-max_value, max_value] in place.

    Each rank clamps its local shards; only partial gradients need communication. Call this after
    the last micro-batch, when the gradients are reduced. Raises ValueError for a negative or NaN
    ``max_value``.
    """
    if not max_value >= 0:
        raise ValueError(f"max_value={max_value} must be at least 0")
    for parameter in parameters:
        gradient = updated_as(parameter).grad
        if isinstance(gradient, DTensor):
            # Assign the reduced gradient, so that `clamp_` changes the tensor of the optimizer.
            updated_as(parameter).grad = whole = without_partial(gradient)
            gradient = whole.to_local()
        if gradient is not None:
            gradient.clamp_(-max_value, max_value)

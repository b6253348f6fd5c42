"""Norm and clipping of gradients that live on different meshes.

A gradient may be split over shard, over shard and tensor, or not at all; torch's own
``clip_grad_norm_`` refuses a mixture. Here gradients are grouped by what they are split over, each
group's local part is reduced over exactly those axes, and the parts are combined: the number is the
one a single process gets. Where replicas split updates, a parameter stands for its own part.
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
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from parallel2d.parallel.model_structure import updated_as

# The axes over which a gradient is split, each as its size and its process group.
_Split = tuple[tuple[int, dist.ProcessGroup], ...]


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The global ``norm_type``-norm of all gradients, a scalar tensor equal on every rank.
    Collective.

    fp64 when the gradients are, fp32 otherwise. Zero when no parameter has a gradient. Raises
    ValueError for a ``norm_type`` that is not above 0.
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
        # Over the axes that hold different elements; the others hold copies of the same sum.
        for _, group in split:
            dist.all_reduce(part, operation, group)
        parts.append(part)
        dtype = torch.promote_types(dtype, gradients[0].dtype)
    total = functools.reduce(combine, parts) if parts else torch.zeros((), dtype=torch.float64)
    if not infinite:
        total = total.pow(1 / norm_type)
    return total.to(dtype)


def squared_norm_share(parameters: Iterable[Tensor], world_size: int) -> Tensor:
    """This rank's share of the squared 2-norm: over all ranks of the world they sum to the whole.

    Lets the norm be part of another reduction. An fp64 scalar; the meshes must cover the world.
    """
    shares: list[Tensor] = []
    for split, gradients in _by_split(parameters).items():
        # So many ranks hold the same elements, and each adds its part of them.
        copies = world_size / math.prod(size for size, _ in split)
        shares.append(_local_part(gradients, 2.0) / copies)
    return functools.reduce(torch.add, shares) if shares else torch.zeros((), dtype=torch.float64)


@torch.no_grad()
def _by_split(parameters: Iterable[Tensor]) -> dict[_Split, list[Tensor]]:
    """Local parts of the gradients by the axes over which they are split."""
    groups: dict[_Split, list[Tensor]] = defaultdict(list)
    known: dict[tuple[DeviceMesh, tuple[Placement, ...]], _Split] = {}
    for parameter in parameters:
        gradient = updated_as(parameter).grad
        if isinstance(gradient, DTensor):
            # A norm of summands would not be the norm of their sum.
            gradient = without_partial(gradient)
            mesh, placements = gradient.device_mesh, gradient.placements
            if (mesh, placements) not in known:
                known[mesh, placements] = _split_of(mesh, placements)
            groups[known[mesh, placements]].append(gradient.to_local())
        elif gradient is not None:
            groups[()].append(gradient)
    return groups


def _split_of(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> _Split:
    split = []
    for axis, placement in enumerate(placements):
        # On an axis of size 1 the only rank holds everything.
        if mesh.size(axis) > 1 and not placement.is_replicate():
            split.append((mesh.size(axis), mesh.get_group(axis)))
    return tuple(split)


def without_partial(gradient: DTensor) -> DTensor:
    """``gradient`` itself, or a new one with sums in the place of summands; collective then."""
    if not any(map(Placement.is_partial, gradient.placements)):
        return gradient
    whole = [Replicate() if isinstance(each, Partial) else each for each in gradient.placements]
    return gradient.redistribute(placements=whole)


def _local_part(gradients: list[Tensor], norm_type: float) -> Tensor:
    """fp64 scalar: the sum of absolute values to the power ``norm_type``, or their maximum."""
    # torch's `_foreach` functions take tensors of one dtype; a maximum needs at least one element.
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if gradient.numel():
            by_dtype[gradient.dtype].append(gradient)
    norms: list[Tensor] = []
    for dtype, same in by_dtype.items():
        # A tensor's norm in bf16 would have 8 bits, and so depend on how the tensor is split.
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
    """Multiplies every gradient by ``factor`` in place."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = updated_as(parameter).grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        if gradient is not None:
            by_dtype[gradient.dtype].append(gradient)
    for dtype, gradients in by_dtype.items():
        # torch multiplies a whole list at once only by a factor of the list's dtype.
        same = factor.to(dtype) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(gradients, same)


def clip_gradient_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scales gradients to a global norm of at most ``max_norm``, and returns the norm before.

    Collective. It only measures with ``max_norm=inf``, and where the norm is not finite.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type)
    if math.isfinite(max_norm):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # A choice on the device: an `if` would wait for the norm.
        scale_gradients(parameters, torch.where(norm.isfinite(), factor, 1.0))
    return norm


@torch.no_grad()
def clip_gradient_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Limits every element of every gradient to [-max_value, max_value] in place. No communication:
    each rank clips its part.

    Call it after the last micro-batch, when gradients are reduced: clipping parts of a sum is
    something else. Raises ValueError for a negative or missing limit.
    """
    if not max_value >= 0:
        raise ValueError(f"max_value={max_value} must be at least 0")
    for parameter in parameters:
        gradient = updated_as(parameter).grad
        if isinstance(gradient, DTensor):
            # The clamp below must reach the tensor that the optimizer will use.
            updated_as(parameter).grad = whole = without_partial(gradient)
            gradient = whole.to_local()
        if gradient is not None:
            gradient.clamp_(-max_value, max_value)

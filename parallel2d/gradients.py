"""Norm and clipping of gradients that live on different meshes.

A gradient may be split over shard, over shard and tensor, or not at all; torch's own
``clip_grad_norm_`` refuses a mixture. Here gradients are grouped by what they are split over, each
group's local part is reduced over exactly those axes, and the parts are combined: the number is the
one a single process gets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The global ``norm_type``-norm of all gradients, a scalar tensor equal on every rank.
    Collective.

    fp64 when the gradients are, fp32 otherwise. Zero when no parameter has a gradient. Raises
    ValueError for a ``norm_type`` that is not above 0.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be above 0, such as 2 or inf")
    infinite = math.isinf(norm_type)
    total, dtype = torch.zeros((), dtype=torch.float64), torch.float32
    for split, gradients in _by_split(parameters).items():
        part = _local_part(gradients, norm_type)
        total = total.to(part.device)
        for _, group in split:
            dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group)
        total = torch.maximum(total, part) if infinite else total + part
        dtype = torch.promote_types(dtype, gradients[0].dtype)
    return (total if infinite else total.pow(1 / norm_type)).to(dtype)


def squared_norm_share(parameters: Iterable[Tensor], world_size: int) -> Tensor:
    """This rank's share of the squared 2-norm: summed over all ranks of the world it gives the
    whole, each element counted once.

    Lets the norm ride on a reduction that happens anyway. An fp64 scalar; the meshes must cover the
    world.
    """
    total = torch.zeros((), dtype=torch.float64)
    for split, gradients in _by_split(parameters).items():
        copies = world_size / math.prod(size for size, _ in split)
        part = _local_part(gradients, 2.0) / copies
        total = total.to(part.device) + part
    return total


def _by_split(
    parameters: Iterable[Tensor],
) -> dict[tuple[tuple[int, dist.ProcessGroup], ...], list[Tensor]]:
    """Local parts of the gradients by the axes, as (size, group), over which they are split."""
    groups: dict[tuple[tuple[int, dist.ProcessGroup], ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor):
            groups[()].append(gradient)
            continue
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
            gradient = gradient.redistribute(placements=whole)
        mesh = gradient.device_mesh
        split = tuple(
            (mesh.size(axis), mesh.get_group(axis))
            for axis, placement in enumerate(gradient.placements)
            if not placement.is_replicate() and mesh.size(axis) > 1
        )
        groups[split].append(gradient.to_local())
    return groups


def _local_part(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Sum of absolute values to the power ``norm_type`` (their maximum for infinity), an fp64
    scalar."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if gradient.numel():
            by_dtype[gradient.dtype].append(gradient)
    # A tensor's norm in bf16 would be rounded to 8 bits, and so depend on how the tensor is split.
    norms = [
        norm
        for dtype, same in by_dtype.items()
        for norm in torch._foreach_norm(
            same, norm_type, dtype=torch.promote_types(dtype, torch.float32)
        )
    ]
    part = (
        torch.stack([norm.double() for norm in norms])
        if norms
        else gradients[0].new_zeros(1, dtype=torch.float64)
    )
    return part.amax() if math.isinf(norm_type) else part.pow(norm_type).sum()


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiplies every gradient by ``factor`` in place."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            by_dtype[local.dtype].append(local)
    for dtype, gradients in by_dtype.items():
        torch._foreach_mul_(gradients, factor.to(dtype) if isinstance(factor, Tensor) else factor)


def clip_gradient_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scales all gradients so that their global norm is at most ``max_norm``; returns the norm
    before. Collective.

    With ``max_norm=inf`` it only measures. A non-finite norm is returned as it is and nothing is
    scaled.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type)
    if math.isfinite(max_norm):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
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
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor) and any(
            isinstance(placement, Partial) for placement in gradient.placements
        ):
            whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
            gradient = parameter.grad = gradient.redistribute(placements=whole)
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clamp_(
            -max_value, max_value
        )

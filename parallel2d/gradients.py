"""Norm and clipping of gradients that live on different meshes.

A gradient may be split over shard, over shard and tensor, or not at all; torch's own ``clip_grad_norm_`` refuses a mixture. Here
gradients are grouped by what they are split over, each group's local part is reduced over exactly those axes, and the parts
are combined: the number is the one a single process gets.
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
    """The global ``norm_type``-norm of all gradients, a scalar tensor equal on every rank. Collective.

    fp64 when the gradients are, fp32 otherwise. Zero when no parameter has a gradient.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    device = torch.device("cpu")
    for parameter in parameters:
        gradient = parameter.grad
        device = parameter.device
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                gradient = gradient.redistribute(
                    placements=[p if not isinstance(p, Partial) else Replicate() for p in gradient.placements]
                )
            mesh = gradient.device_mesh
            split = tuple(
                mesh.get_group(axis)
                for axis, placement in enumerate(gradient.placements)
                if not placement.is_replicate() and mesh.size(axis) > 1
            )
            groups[split].append(gradient.to_local())
        else:
            groups[()].append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    infinite = math.isinf(norm_type)
    dtype = torch.float32
    for split, gradients in groups.items():
        if gradients[0].dtype == torch.float64:
            dtype = torch.float64
        present = [gradient for gradient in gradients if gradient.numel()]
        norms = torch._foreach_norm(present, norm_type) if present else []
        part = torch.stack([norm.double() for norm in norms]) if norms else total.new_zeros(1)
        part = part.amax() if infinite else part.pow(norm_type).sum()
        for group in split:
            dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group)
        total = torch.maximum(total, part) if infinite else total + part
    return (total if infinite else total.pow(1 / norm_type)).to(dtype)


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


def clip_gradient_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients so that their global norm is at most ``max_norm``; returns the norm before. Collective.

    With ``max_norm=inf`` it only measures. A non-finite norm is returned as it is and nothing is scaled.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type)
    if math.isfinite(max_norm):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_gradients(parameters, torch.where(norm.isfinite(), factor, 1.0))
    return norm



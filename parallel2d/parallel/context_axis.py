"""The ranks that share sequences, each with an equal slice of their positions: `ContextAxis`.

[Note: gradients over the context axis] What is computed from whole sequences is computed on every
rank of the axis, and gradients are averaged over the axis like any others. So on each rank a
gradient stands for its mean over the ranks. Where a tensor is cut, a rank gives back the gradient
of its own slice and zeros; where slices are joined, a slice gets the *sum* of what the ranks have
for it. Then the mean is the gradient that one process computes, for every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.parallel.mesh import group_of, mesh_shape


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts, [ranks, ...]. Backward sends each part back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """The slices of all ranks, [ranks, ...]. In backward a slice gets the sum over the ranks, in
    fp32 at least; gloo has no reduce-scatter worth having, so parts are exchanged and added."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
        dist.all_gather_single(whole, own.contiguous(), group=group)
        return whole.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = _Exchange.apply(gradients[0], ctx.group)
        wide = torch.promote_types(parts.dtype, torch.float32)
        return parts.sum(0, dtype=wide).to(parts.dtype), None


class _Sum(torch.autograd.Function):
    """The sum of what the ranks have of their own slices, whole on each of them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.ranks, None


class ContextAxis:
    """``size`` ranks of one ``group``, of which this one is number ``rank``."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = group_of(mesh, "context")
        # The ranks that may hold parts of a slice (sequence parallelism)
        self.tensor = group_of(mesh, "tensor") if mesh_shape(mesh).tensor > 1 else None
        self.size = self.group.size()
        self.rank = mesh.get_local_rank("context")
        # Whether the last block's output is joined. A head that computes its loss from slices
        # sets it, for the time of a forward.
        self.joins = True
        # Whether forwards run in order to learn what can be cut
        self.is_learning = False

    def cut(self, whole: Tensor, dim: int, in_parts: bool = False) -> Tensor:
        """This rank's slice, a view. ``in_parts``: of the whole and of the slice the ranks of the
        tensor axis have a part each."""
        if in_parts:
            return self._own_part(self.cut(self._all_parts(whole, dim), dim), dim)
        part = whole.shape[dim] // self.size
        return whole.narrow(dim, self.rank * part, part)

    def join(self, own: Tensor, dim: int, in_parts: bool = False) -> Tensor:
        """The slices of all ranks, one after the other along ``dim``; the inverse of `cut`."""
        if in_parts:
            return self._own_part(self.join(self._all_parts(own, dim), dim), dim)
        parts: Tensor = _Gather.apply(own, self.group)
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def join_mask(self, own: Tensor, dim: int) -> Tensor:
        """As `join`, of a mask; not every backend sends bool."""
        sent = own.to(torch.uint8) if own.dtype == torch.bool else own
        return self.join(sent, dim % own.ndim).to(own.dtype)

    def _all_parts(self, own: Tensor, dim: int) -> Tensor:
        parts: Tensor = _Gather.apply(own, self.tensor)
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def _own_part(self, whole: Tensor, dim: int) -> Tensor:
        assert self.tensor is not None
        return whole.chunk(self.tensor.size(), dim)[self.tensor.rank()]

    def sum(self, own: Tensor) -> Tensor:
        """The sum of what each rank has of its slice, such as a loss."""
        total: Tensor = _Sum.apply(own, self.group)
        return total

    def heads_of_all(self, own: Tensor) -> Tensor:
        """[batch, heads, slice, dim] to [batch, heads / ranks, whole, dim]."""
        parts = _Exchange.apply(own.unflatten(1, (self.size, -1)).movedim(1, 0), self.group)
        whole: Tensor = parts.movedim(0, 2).flatten(2, 3)
        return whole

    def slices_of_all(self, whole: Tensor) -> Tensor:
        """The inverse of `heads_of_all`."""
        parts = _Exchange.apply(whole.unflatten(2, (self.size, -1)).movedim(2, 0), self.group)
        own: Tensor = parts.movedim(0, 1).flatten(1, 2)
        return own

    @contextmanager
    def without_join(self) -> Iterator[None]:
        """Inside, what the blocks return stays a slice."""
        self.joins = False
        try:
            yield
        finally:
            self.joins = True


# An attribute of the model
_AXIS = "_parallel2d_context_axis"


def register_axis(model: nn.Module, axis: ContextAxis) -> None:
    """Makes ``axis`` that over which the blocks of ``model`` are split."""
    vars(model)[_AXIS] = axis


def context_axis_of(model: nn.Module) -> ContextAxis | None:
    """The axis over which the blocks of ``model`` are split; None where they are not."""
    found: ContextAxis | None = vars(model).get(_AXIS)
    return found

"""The context axis: ranks that share sequences, each with an equal slice of the positions.

[Note: gradients over the context axis] Modules outside of the blocks compute full sequences on
every rank of the axis. Gradients are averaged over the axis, as over a data axis, so the mean of
the ranks' gradients must equal the gradient of a single process. Therefore the backward of a cut
returns the gradient of this rank's slice and zeros elsewhere, and the backward of a join gives each
slice the *sum* of its gradients from all ranks.
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
    """An all-to-all of equal parts [ranks, ...]. Its backward is also an all-to-all."""

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
    """An all-gather of slices to [ranks, ...]. Backward sums over the ranks, in fp32 or wider.

    Backward uses an all-to-all and a local sum, because gloo's reduce-scatter costs as much as an
    all-reduce.
    """

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


def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks of ``group`` as [ranks, ...]. Differentiable."""
    gathered: Tensor = _Gather.apply(own, group)
    return gathered


def _exchange_in_graph(parts: Tensor, ranks: int, group: str) -> Tensor:
    """`_Exchange` in compiled code, by a differentiable operator of the graph.

    [Note: equal graphs] Each rank compiles separately, and the compiler chooses the order of
    collectives and the results to recompute in backward. These choices must be equal on all ranks
    of a group. The choices depend only on the operators and shapes of the graph, so all ranks must
    compile graphs with the same operators and shapes.
    """
    once = [1] * ranks
    sent = torch.ops._c10d_functional.all_to_all_single(parts.contiguous(), once, once, group)
    received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return received


class _Sum(torch.autograd.Function):
    """The sum of a value over all ranks. See [Note: gradients over the context axis]."""

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
    """The context axis: a process ``group`` of ``size`` ranks, in which this process is
    ``rank``."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = group_of(mesh, "context")
        # The tensor group, over which a slice may also be split (sequence parallelism)
        self.tensor = group_of(mesh, "tensor") if mesh_shape(mesh).tensor > 1 else None
        self.size = self.group.size()
        self._name = self.group.group_name
        self.rank = mesh.get_local_rank("context")
        # False if the last block must not join its output: `ChunkedHead` computes its loss from the
        # slices.
        self.joins = True
        # True while `ContextCheck` runs
        self.is_learning = False

    def cut(self, whole: Tensor, dim: int, in_parts: bool = False) -> Tensor:
        """Return this rank's slice as a view.

        ``in_parts`` is True if ``whole`` and the slice are split over the tensor axis.
        """
        if in_parts:
            return self._own_part(self.cut(self._all_parts(whole, dim), dim), dim)
        part = whole.shape[dim] // self.size
        return whole.narrow(dim, self.rank * part, part)

    def join(self, own: Tensor, dim: int, in_parts: bool = False) -> Tensor:
        """Concatenate the slices of all ranks along ``dim``; the inverse of `cut`."""
        if in_parts:
            return self._own_part(self.join(self._all_parts(own, dim), dim), dim)
        if torch.compiler.is_compiling():
            # Sends as many bytes as an all-gather. The gradient of `expand` is the sum over ranks.
            gathered = self._exchange(own.expand(self.size, *own.shape))
        else:
            gathered = gather(own, self.group)
        return gathered.movedim(0, dim).flatten(dim, dim + 1)

    def _exchange(self, parts: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _exchange_in_graph(parts, self.size, self._name)
        received: Tensor = _Exchange.apply(parts, self.group)
        return received

    def join_mask(self, own: Tensor, dim: int) -> Tensor:
        """Join slices of a mask. A bool mask is sent as uint8, because not all backends send
        bool."""
        sent = own.to(torch.uint8) if own.dtype == torch.bool else own
        return self.join(sent, dim % own.ndim).to(own.dtype)

    def _all_parts(self, own: Tensor, dim: int) -> Tensor:
        assert self.tensor is not None
        return gather(own, self.tensor).movedim(0, dim).flatten(dim, dim + 1)

    def _own_part(self, whole: Tensor, dim: int) -> Tensor:
        assert self.tensor is not None
        return whole.chunk(self.tensor.size(), dim)[self.tensor.rank()]

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum of the values of all slices, such as a loss."""
        total: Tensor = _Sum.apply(own, self.group)
        return total

    def heads_of_all(self, own: Tensor) -> Tensor:
        """All-to-all from [batch, heads, slice, dim] to [batch, heads / ranks, positions, dim]."""
        parts = self._exchange(own.unflatten(1, (self.size, -1)).movedim(1, 0))
        return parts.movedim(0, 2).flatten(2, 3)

    def slices_of_all(self, whole: Tensor) -> Tensor:
        """All-to-all in the opposite direction of `heads_of_all`."""
        parts = self._exchange(whole.unflatten(2, (self.size, -1)).movedim(2, 0))
        return parts.movedim(0, 1).flatten(1, 2)

    @contextmanager
    def without_join(self) -> Iterator[None]:
        """In this context the last block does not join its output."""
        self.joins = False
        try:
            yield
        finally:
            self.joins = True


# Attribute of the model
_AXIS = "_parallel2d_context_axis"


def register_axis(model: nn.Module, axis: ContextAxis) -> None:
    """Register ``axis`` as the axis that splits the blocks of ``model``."""
    vars(model)[_AXIS] = axis


def context_axis_of(model: nn.Module) -> ContextAxis | None:
    """Return the context axis that splits the blocks of ``model``; None without one."""
    found: ContextAxis | None = vars(model).get(_AXIS)
    return found

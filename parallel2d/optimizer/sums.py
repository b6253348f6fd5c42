"""Sums over the mesh axes that split a tensor: local partial sums of many tensors flow in, whole
sums flow out, batched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel2d.cost.collectives import sent_bytes


def split_axes(tensor: Tensor) -> list[tuple[int, str, int, int]]:
    """(number, name, tensor dim, size) of each mesh axis of more than one rank that splits
    ``tensor``, outermost first."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return [
        (axis, names[axis], placement.dim, mesh.size(axis))  # type: ignore[attr-defined]
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]


class AxisSums:
    """Adds partial sums over mesh axes, all tensors of one dtype in one all-reduce per axis.

    ``count_only``: nothing is sent; `sent` tells what would be.
    """

    def __init__(self, count_only: bool = False) -> None:
        self._count_only = count_only
        self._values: list[Tensor] = []
        self._by_group: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = defaultdict(list)
        self._bytes: dict[str, float] = defaultdict(float)

    def add(self, like: Tensor, part: Tensor, dims: Collection[int]) -> int:
        """Takes this rank's ``part`` of a sum over ``dims`` of a tensor that is split as ``like``.
        Returns a handle for `value`.

        Calls must be made in the same order on every rank.
        """
        self._values.append(part)
        for axis, name, dim, size in split_axes(like):
            if dim in dims:
                assert isinstance(like, DTensor)
                self._bytes[name] += sent_bytes(
                    "all_reduce", part.nbytes, size, like.device_mesh.device_type
                )
                if not self._count_only:
                    self._by_group[like.device_mesh.get_group(axis), part.dtype].append(
                        len(self._values) - 1
                    )
        return len(self._values) - 1

    def reduce(self) -> None:
        """Runs the all-reduces: one per mesh axis and dtype. Collective."""
        for (group, _), handles in self._by_group.items():
            flat = torch.cat([self._values[handle].reshape(-1) for handle in handles])
            dist.all_reduce(flat, group=group)
            lengths = [self._values[handle].numel() for handle in handles]
            for handle, whole in zip(handles, flat.split(lengths), strict=True):
                self._values[handle] = whole.view(self._values[handle].shape)

    def value(self, handle: int) -> Tensor:
        """The whole sum, after `reduce`."""
        return self._values[handle]

    def sent(self) -> dict[str, float]:
        """Bytes that this rank sends per mesh axis."""
        return dict(self._bytes)

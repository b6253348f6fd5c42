"""Sums over the mesh axes that split a tensor, of many tensors at once: `AxisSums`."""

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
    names = mesh.mesh_dim_names
    if not names:  # the axes of a mesh without names are called 0, 1, ...
        names = tuple(map(str, range(mesh.ndim)))
    found = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        ranks = mesh.size(axis)
        # Parameters are never partial, so what is not replicated is a Shard, which has a dim.
        dim = placement.dim  # type: ignore[attr-defined]
        if ranks > 1:
            found.append((axis, names[axis], dim, ranks))
    return found


class AxisSums:
    """Adds partial sums over mesh axes, all tensors of one dtype in one all-reduce per axis.

    Call `add` for each partial sum, `reduce` once, then `value` for each sum. ``count_only``:
    nothing is sent, and `sent` returns what would be.
    """

    def __init__(self, count_only: bool = False) -> None:
        self._count_only = count_only
        self._values: list[Tensor] = []
        # Handles of the values that are added over a group, in the order of `add`.
        self._by_group: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = defaultdict(list)
        self._bytes: dict[str, float] = defaultdict(float)

    def add(self, like: Tensor, part: Tensor, dims: Collection[int]) -> int:
        """Takes this rank's ``part`` of a sum over ``dims`` of a tensor that is split as ``like``.
        Returns a handle for `value`.

        Calls must be made in the same order on every rank.
        """
        handle = len(self._values)
        self._values.append(part)
        for axis, name, dim, ranks in split_axes(like):
            # Over an axis that splits another dim there is nothing to add: ranks hold different
            # sums, each of them whole.
            if dim not in dims:
                continue
            # `split_axes` finds axes of DTensors only.
            assert isinstance(like, DTensor)
            mesh = like.device_mesh
            sent = sent_bytes("all_reduce", part.nbytes, ranks, mesh.device_type)
            self._bytes[name] += sent
            if self._count_only:
                continue
            group = mesh.get_group(axis)
            self._by_group[group, part.dtype].append(handle)
        return handle

    def reduce(self) -> None:
        """Runs the all-reduces: one per mesh axis and dtype. Collective."""
        # In the order of the calls of `add`, and so in the same order on every rank.
        for (group, _), handles in self._by_group.items():
            parts = [self._values[handle] for handle in handles]
            lengths = [part.numel() for part in parts]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=group)
            wholes = flat.split(lengths)
            # Written back, since a value that two axes split is summed again over the second.
            for handle, part, whole in zip(handles, parts, wholes, strict=True):
                self._values[handle] = whole.view(part.shape)

    def value(self, handle: int) -> Tensor:
        """The whole sum, after `reduce`."""
        return self._values[handle]

    def sent(self) -> dict[str, float]:
        """Bytes that this rank sends per mesh axis."""
        return dict(self._bytes)

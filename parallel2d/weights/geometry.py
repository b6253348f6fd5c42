"""Which rectangle of a tensor this rank holds: `local_region`. No communication.

Tensors are resharded by intersecting the rectangles of one layout with those of the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)

from parallel2d.exchange import sendable
from parallel2d.mesh import axis_names, axis_positions


@sendable
@dataclass(frozen=True)
class Region:
    """A rectangle inside a tensor: per dim where it starts and how long it is. A scalar has no
    dims."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def intersect(self, other: Region) -> Region | None:
        """The common part, or None when there is none."""
        offsets = []
        lengths = []
        for ours, our_length, theirs, their_length in zip(
            self.offsets, self.lengths, other.offsets, other.lengths, strict=True
        ):
            begin = max(ours, theirs)
            end = min(ours + our_length, theirs + their_length)
            offsets.append(begin)
            lengths.append(end - begin)
        # Two scalars, which have no dims, have their one value in common.
        if min(lengths, default=1) <= 0:
            return None
        return Region(tuple(offsets), tuple(lengths))

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Indexes a tensor that holds ``outer``, giving this region, which must lie inside."""
        slices = []
        for begin, base, length in zip(self.offsets, outer.offsets, self.lengths, strict=True):
            start = begin - base
            slices.append(slice(start, start + length))
        return tuple(slices)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indexes the whole tensor, giving this region."""
        return self.slices_in(Region.whole([0] * len(self.offsets)))


def local_region(tensor: Tensor) -> Region:
    """The rectangle of the whole tensor that ``tensor`` holds on this rank; everything when it is
    no `DTensor`.

    Raises ValueError for placements that are no split of the tensor (partial sums).
    """
    if not isinstance(tensor, DTensor):
        return Region.whole(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a tensor placed as {tensor.placements} cannot be saved: a partial sum is no split"
        )
    # torch has no public name for this; its own distributed checkpoints rely on it too.
    lengths, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Region(tuple(offsets), tuple(lengths))


def split_dims(tensor: Tensor) -> dict[str, int]:
    """By mesh axis the dim of ``tensor`` along which its ranks hold different parts. Axes of one
    rank count too; empty for a tensor without a mesh."""
    found: dict[str, int] = {}
    if not isinstance(tensor, DTensor):
        return found
    for name, placement in zip(axis_names(tensor.device_mesh), tensor.placements, strict=True):
        if not placement.is_replicate():
            # Parameters are never partial, so this is a Shard, which has a dim.
            found[name] = placement.dim  # type: ignore[attr-defined]
    return found


def region_of_replica(tensor: DTensor, replica: int) -> Region:
    """As `local_region`, for the rank in this rank's place of another ``replica``."""
    mesh = tensor.device_mesh
    positions = axis_positions(mesh) | {"replicate": replica}
    # torch has no public name for this.
    lengths, offsets = _compute_local_shape_and_global_offset(
        tensor.shape, mesh.shape, list(positions.values()), tensor.placements
    )
    return Region(tuple(offsets), tuple(lengths))


def first_position(tensor: Tensor) -> int:
    """The position of this rank's first value in the whole tensor, flattened."""
    position = 0
    for offset, length in zip(local_region(tensor).offsets, tensor.shape, strict=True):
        position = position * length + offset
    return position


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a view of real numbers; any other one itself."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def pieces_of(flat: Tensor, shapes: Iterable[torch.Size]) -> Iterator[Tensor]:
    """Views of the flat tensor ``flat``, one after the other, of these shapes."""
    begin = 0
    for shape in shapes:
        end = begin + shape.numel()
        yield flat[begin:end].view(shape)
        begin = end


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: everything when it is no `DTensor`."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


@torch.no_grad()
def copy_slice(parameter: Tensor, full: Tensor) -> None:
    """Copies this rank's rectangle of ``full`` (the whole tensor, on any device) into
    ``parameter``. No communication."""
    local = local_part(parameter)
    part = full[local_region(parameter).slices]
    local.copy_(part.reshape(local.shape))

"""Regions: the rectangle of an unsharded tensor that a rank's local shard covers (`local_region`).

Resharding intersects the regions of one layout with the regions of another layout.

[Note: blocks of rows] Quantized optimizer state has one scale per block of values. A block is a
part of one row of the unsharded tensor (a row has all dims after the first), so sharding by rows
cuts no block. The block length is the largest power of two, from 32 to 256, that divides an eighth
of the row length, so that tensor parallelism over up to eight ranks cuts no block either. If no
power of two from 32 divides an eighth of the row length, the block length is 32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# These functions are private. torch's distributed checkpoints also use the second function.
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)

from parallel2d.base.exchange import sendable
from parallel2d.parallel.mesh import axis_names


@sendable
@dataclass(frozen=True)
class Region:
    """A rectangle inside a tensor: an offset and a length for each dim. A scalar has no dims."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.offsets, self.lengths))

    def intersect(self, other: Region) -> Region | None:
        """Return the intersection of two regions; None if it is empty."""
        assert len(self.offsets) == len(other.offsets)
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        lengths = tuple(map(operator.sub, ends, offsets))
        # The regions of scalars have no dims and always intersect, therefore default=1.
        if min(lengths, default=1) <= 0:
            return None
        return Region(offsets, lengths)

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Return the index of this region in a tensor that contains the values of ``outer``."""
        inside = self.seen_from(outer.offsets)
        return tuple(map(slice, inside.offsets, inside.ends))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this region in the unsharded tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    def seen_from(self, origin: Sequence[int]) -> Region:
        """Return the same rectangle with offsets relative to ``origin``."""
        return Region(tuple(map(operator.sub, self.offsets, origin)), self.lengths)

    def position_in(self, shape: Sequence[int]) -> int:
        """Return the position of the region's first value in a flattened tensor of ``shape``."""
        position = 0
        for offset, length in zip(self.offsets, shape, strict=True):
            position = position * length + offset
        return position

    def pieces(self, shape: Sequence[int], most: int) -> Iterator[Region]:
        """Yield regions of at most ``most`` values that together cover this region.

        Each is contiguous in a tensor of ``shape``: complete rows, or a part of one row. They may
        contain values outside of this region.
        """
        if not self.numel:
            return
        # A scalar has no rows.
        if not shape:
            yield self
            return
        begin, end = self.offsets[0], self.ends[0]
        row = math.prod(shape[1:])
        # A row with more than ``most`` values is split like a tensor with one dim less.
        if row > most and len(shape) > 1:
            inside = Region(self.offsets[1:], self.lengths[1:])
            for index in range(begin, end):
                for piece in inside.pieces(shape[1:], most):
                    yield Region((index, *piece.offsets), (1, *piece.lengths))
            return
        rows = max(1, most // row)
        for first in range(begin, end, rows):
            length = min(rows, end - first)
            yield Region((first, *[0] * (len(shape) - 1)), (length, *shape[1:]))


def local_region(tensor: Tensor, positions: Mapping[str, int] | None = None) -> Region:
    """Return the region of this rank's local shard in the unsharded tensor.

    For a ``torch.Tensor`` this is the complete tensor. With ``positions`` (axis -> position) it is
    the region of the rank at these positions, which has this rank's positions on all other axes.

    Raises ValueError for partial placements.
    """
    if not isinstance(tensor, DTensor):
        return Region.of_shape(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a tensor placed as {tensor.placements} cannot be saved: a partial sum is not a shard"
        )
    mesh = tensor.device_mesh
    if positions:
        own = zip(axis_names(mesh), mesh.get_coordinate() or (), strict=True)
        coordinate = []
        for name, position in own:
            coordinate.append(positions.get(name, position))
        lengths, offsets = _compute_local_shape_and_global_offset(
            tensor.shape, mesh.shape, coordinate, tensor.placements
        )
    else:
        lengths, offsets = compute_local_shape_and_global_offset(
            tensor.shape, mesh, tensor.placements
        )
    return Region(tuple(offsets), tuple(lengths))


def split_dims(tensor: Tensor) -> dict[str, int]:
    """Map each mesh axis that splits ``tensor`` to the split dim, including axes of one rank.

    Empty if ``tensor`` is not a `DTensor`.
    """
    if not isinstance(tensor, DTensor):
        return {}
    found = {}
    for name, placement in zip(axis_names(tensor.device_mesh), tensor.placements, strict=True):
        # Parameters are never partial, so this is `Shard` or `_StridedShard`, which have a dim.
        if not placement.is_replicate():
            found[name] = placement.dim  # type: ignore[attr-defined]
    return found


def first_position(tensor: Tensor) -> int:
    """Return the position of this rank's first value in the flattened unsharded tensor."""
    return local_region(tensor).position_in(tensor.shape)


def block_length(columns: int) -> int:
    """Return the block length for rows of ``columns`` values; see [Note: blocks of rows]."""
    block = 256
    while block > 32 and columns % (8 * block):
        block //= 2
    return block


def scales_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scales of a tensor with two or more dims: [rows, blocks per row]."""
    columns = math.prod(shape[1:])
    return shape[0], -(-columns // block_length(columns))


def scales_region(tensor: Tensor) -> Region:
    """Return the region of the scales that belong to this rank's local shard of ``tensor``.

    Raises ValueError if the sharding of ``tensor`` cuts blocks.
    """
    region = local_region(tensor)
    shape, inner = scales_shape(tensor.shape), math.prod(tensor.shape[2:])
    columns = tensor.shape[1] * inner
    block = block_length(columns)
    begin, end = region.offsets[1] * inner, region.ends[1] * inner
    is_cut = region.lengths[2:] != tuple(tensor.shape[2:])
    is_cut |= bool(begin % block) or bool(end % block and end != columns)
    found = Region((region.offsets[0], begin // block), (region.lengths[0], -(-end // block)))
    found = Region(found.offsets, (found.lengths[0], found.lengths[1] - found.offsets[1]))
    # The scales are a `DTensor` with the placements of ``tensor``, so torch must shard them the
    # same way.
    if is_cut or (region.numel and local_region(_split_like(tensor, shape, found)) != found):
        raise ValueError(
            f"its rows of {columns} values are cut inside of blocks of {block}, from value {begin} "
            f"to {end}"
        )
    return found


def scales_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros for the scales of ``tensor``, with the same placements. Raises like
    `scales_region`."""
    meta = _split_like(tensor, scales_shape(tensor.shape), scales_region(tensor))
    return torch.zeros_like(meta, dtype=dtype, device=local_part(tensor).device)


def _split_like(tensor: Tensor, shape: Sequence[int], held: Region) -> Tensor:
    """Return a meta tensor of ``shape`` with the placements of ``tensor`` and the local region
    ``held``."""
    local = torch.empty(held.lengths, device="meta")
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )


def as_part(local: Tensor, whole: DTensor) -> DTensor:
    """Return a `DTensor` with the local shard ``local`` and the shape and placements of
    ``whole``."""
    # `from_local` would move the tensor to the device of the mesh. The state of offloaded
    # parameters must stay in CPU memory, where the optimizer runs.
    if local.device.type not in ("meta", whole.device_mesh.device_type):
        with torch.no_grad():
            held = torch.empty_like(whole, dtype=local.dtype, device=local.device)
            assert isinstance(held, DTensor)
            held.to_local().copy_(local)
        return held
    # Pass the shape, because torch would assume equal local shards on all ranks.
    return DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a `DTensor`, or another ``tensor`` unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex ``tensor`` as a view of real numbers, or a real ``tensor`` unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def pieces_of(flat: Tensor, shapes: Iterable[torch.Size]) -> Iterator[Tensor]:
    """Yield consecutive views of the flat tensor ``flat`` with these shapes."""
    begin = 0
    for shape in shapes:
        end = begin + shape.numel()
        yield flat[begin:end].view(shape)
        begin = end

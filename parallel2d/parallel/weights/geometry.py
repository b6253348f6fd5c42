"""The rectangle of a tensor that this rank holds: `local_region`. Tensors are resharded by
intersecting the rectangles of one layout with those of the other."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# torch has no public name for it; its own distributed checkpoints rely on it too.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from parallel2d.base.exchange import sendable
from parallel2d.parallel.mesh import axis_names


@sendable
@dataclass(frozen=True)
class Region:
    """A rectangle inside a tensor: per dim where it starts and how long it is. A scalar has no
    dims."""

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
        """The common part, or None when there is none."""
        assert len(self.offsets) == len(other.offsets)
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        lengths = tuple(map(operator.sub, ends, offsets))
        # Two scalars, which have no dims, have their one value in common.
        if min(lengths, default=1) <= 0:
            return None
        return Region(offsets, lengths)

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Indexes a tensor that holds ``outer``, giving this region, which must lie inside."""
        inside = self.seen_from(outer.offsets)
        return tuple(map(slice, inside.offsets, inside.ends))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indexes the whole tensor, giving this region."""
        return tuple(map(slice, self.offsets, self.ends))

    def seen_from(self, origin: Sequence[int]) -> Region:
        """The same rectangle with offsets counted from ``origin``."""
        return Region(tuple(map(operator.sub, self.offsets, origin)), self.lengths)

    def position_in(self, shape: Sequence[int]) -> int:
        """The position of its first value in a flattened tensor of ``shape``."""
        position = 0
        for offset, length in zip(self.offsets, shape, strict=True):
            position = position * length + offset
        return position

    def pieces(self, shape: Sequence[int], most: int) -> Iterator[Region]:
        """Rectangles of at most ``most`` values that together hold this region of a tensor of
        ``shape``. Each is contiguous in the whole tensor: full rows, or parts of one row."""
        if not self.numel:
            return
        # A scalar has no rows.
        if not shape:
            yield self
            return
        begin, end = self.offsets[0], self.ends[0]
        row = math.prod(shape[1:])
        # A row that is larger than a piece is split like a tensor with one dim less.
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


def local_region(tensor: Tensor) -> Region:
    """The rectangle of the whole tensor that ``tensor`` holds on this rank; everything when it is
    no `DTensor`.

    Raises ValueError for placements that are no split of the tensor (partial sums).
    """
    if not isinstance(tensor, DTensor):
        return Region.of_shape(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a tensor placed as {tensor.placements} cannot be saved: a partial sum is no split"
        )
    lengths, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Region(tuple(offsets), tuple(lengths))


def split_dims(tensor: Tensor) -> dict[str, int]:
    """The dim of ``tensor``, by mesh axis, along which its ranks hold different parts. Axes of one
    rank count too; empty for a tensor without a mesh."""
    if not isinstance(tensor, DTensor):
        return {}
    found = {}
    for name, placement in zip(axis_names(tensor.device_mesh), tensor.placements, strict=True):
        # Parameters are never partial, so this is a Shard or a strided one, which have a dim.
        if not placement.is_replicate():
            found[name] = placement.dim  # type: ignore[attr-defined]
    return found


def first_position(tensor: Tensor) -> int:
    """The position of this rank's first value in the whole tensor, flattened."""
    return local_region(tensor).position_in(tensor.shape)


def as_part(local: Tensor, whole: DTensor) -> DTensor:
    """``local`` as this rank's shard of a tensor that has the shape and placements of ``whole``."""
    # `from_local` moves to the device of the mesh. The state of offloaded parameters stays with
    # them in CPU memory, where the optimizer runs.
    if local.device.type not in ("meta", whole.device_mesh.device_type):
        with torch.no_grad():
            held = torch.empty_like(whole, dtype=local.dtype, device=local.device)
            assert isinstance(held, DTensor)
            held.to_local().copy_(local)
        return held
    # The shape is given, since torch would take the parts of all ranks to be equal in size.
    return DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def local_part(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds: everything when it is no `DTensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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

"""Which rectangle of a tensor this rank holds, and which of the ranks that hold the same rectangle
writes it.

Tensors (plain or `DTensor`) and the job's mesh flow in; `Region`s in the coordinates of the whole
tensor flow out. No communication: every rank computes the same from placements and mesh
coordinates.

[Note: a local shard is a rectangle] Each mesh axis that splits a dim cuts it as ``torch.chunk``
does, one axis after the other, so what is left is an interval on every dim. Plain `Shard` axes cut
from the outermost inwards. A strided shard marks an axis that cuts last although it stands further
out (sharding applied to what tensor parallelism has split already); several of those cut from the
innermost outwards. Rectangles of one layout meet those of another by intersection alone: that is
all of resharding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel2d.exchange import sendable

# a rectangle of at least this size is written in equal parts by all of its holders
SPLIT_BYTES = 16 * 2**20


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
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + b, c + d)
            for a, b, c, d in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        ]
        lengths = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
        return Region(offsets, lengths) if all(length > 0 for length in lengths) else None

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Indexes a tensor that holds ``outer``, giving this region, which must lie inside."""
        return tuple(
            slice(begin - base, begin - base + length)
            for begin, base, length in zip(self.offsets, outer.offsets, self.lengths, strict=True)
        )


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of part ``index`` when ``torch.chunk`` cuts ``length`` in ``parts``; the
    last may be empty."""
    size = -(-length // parts)
    begin = min(index * size, length)
    return begin, min(size, length - begin)


def local_region(tensor: Tensor) -> Region:
    """The rectangle of the whole tensor that ``tensor`` holds on this rank; everything when it is
    no `DTensor`.

    Raises ValueError for placements that are no split of the tensor (partial sums).
    """
    if not isinstance(tensor, DTensor):
        return Region.whole(tensor.shape)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the tensor's mesh"
    plain, strided = [], []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if isinstance(placement, Shard):
            plain.append(axis)
        elif hasattr(placement, "split_factor"):
            strided.append(axis)
        else:
            raise ValueError(
                f"a tensor placed as {tensor.placements} cannot be saved: {placement} is no split"
            )
    offsets, lengths = [0] * tensor.ndim, list(tensor.shape)
    for axis in [*plain, *reversed(strided)]:
        dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
        begin, lengths[dim] = _chunk(lengths[dim], mesh.size(axis), coordinate[axis])
        offsets[dim] += begin
    region = Region(tuple(offsets), tuple(lengths))
    assert region.numel == tensor.to_local().numel(), (
        tensor.placements,
        region,
        tensor.to_local().shape,
    )
    return region


def _holders(tensor: Tensor, mesh: DeviceMesh | None) -> tuple[tuple[str, ...], list[int]]:
    """The mesh axes along which ranks hold the same rectangle, and the ranks that hold this one, in
    the same order on each of them.

    A mesh axis that the tensor's own mesh does not have (a layer outside the tensor-parallel plan)
    repeats it too.
    """
    if mesh is None:
        return (), [0]
    split = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        split = {
            name
            for name, placement in zip(names, tensor.placements, strict=True)
            if not placement.is_replicate()
        }
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert mesh.mesh_dim_names is not None
    axes = tuple(name for name in mesh.mesh_dim_names if name not in split)
    place = tuple(
        slice(None) if name in axes else coordinate[axis]
        for axis, name in enumerate(mesh.mesh_dim_names)
    )
    return axes, mesh.mesh[place].flatten().tolist()


def plan_writes(
    tensors: Iterable[tuple[str, Tensor]],
    mesh: DeviceMesh | None,
    nodes: Sequence[int] | None = None,
) -> Iterator[tuple[str, Region, Tensor]]:
    """Yields (name, region, local values) for what this rank writes.

    Over all ranks every element is written exactly once; with ``nodes``, the node of each rank,
    exactly once by every node whose ranks hold it. Rectangles that several ranks hold are dealt out
    by size, large ones cut in equal parts, so that the bytes are even over ranks. ``tensors`` must
    come in the same order on every rank.
    """
    loads: dict[tuple[str, ...], list[int]] = {}
    rank = mesh.get_rank() if mesh is not None else 0
    for name, tensor in tensors:
        region = local_region(tensor)
        axes, holders = _holders(tensor, mesh)
        local = (
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor)
            .detach()
            .reshape(region.lengths)
        )
        # Sizes differ by a row between shards; the mean is the same on every rank, so all deal out
        # alike.
        splits = (mesh.size() if mesh is not None else 1) // len(holders)
        size = tensor.numel() * tensor.element_size() // splits
        if nodes is not None:
            holders = [holder for holder in holders if nodes[holder] == nodes[rank]]
        count, index = len(holders), holders.index(rank)
        if count > 1 and size >= SPLIT_BYTES:
            begin, length = _chunk(region.lengths[0], count, index)
            local = local.narrow(0, begin, length)
            region = Region(
                (region.offsets[0] + begin, *region.offsets[1:]), (length, *region.lengths[1:])
            )
        else:
            load = loads.setdefault(axes, [0] * count)
            writer = load.index(min(load))
            load[writer] += size + 1
            if index != writer:
                continue
        if region.numel:
            yield name, region, local

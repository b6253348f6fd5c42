"""Which of the ranks that hold the same rectangle of a tensor writes it: `plan_writes`.

No communication: every rank computes the same from placements and mesh coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.mesh import axis_positions, without_replicas
from parallel2d.weights.geometry import (
    Region,
    local_part,
    local_region,
    region_of_replica,
    split_dims,
)

# A rectangle of at least this size is written in equal parts by all of its holders.
SPLIT_BYTES = 16 * 2**20


def plan_all(
    shared: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
    nodes: Sequence[int] | None = None,
) -> Iterator[tuple[str, Region, Tensor]]:
    """`plan_writes` of ``shared``, and of ``own``, which only the ranks of this replica have."""
    yield from plan_writes(shared.items(), mesh, nodes)
    if own and mesh is not None:
        yield from plan_writes(own.items(), without_replicas(mesh), nodes)


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
    for name, held, written, tensor in _plan(tensors, mesh, nodes, local_region):
        # Empty where there are more ranks than rows.
        if written.numel:
            values = local_part(tensor).detach().reshape(held.lengths)
            yield name, written, values[written.slices_in(held)]


def plan_of_replica(
    tensors: Iterable[tuple[str, Tensor]],
    mesh: DeviceMesh,
    nodes: Sequence[int] | None,
    replica: int,
) -> Iterator[tuple[str, Region, Region, Tensor]]:
    """Yields (name, rectangle held, part of it written, tensor) for what the rank in this rank's
    place of ``replica`` writes of tensors that are split over the replicas. As `plan_writes`, where
    nodes are alike."""
    split = [(name, tensor) for name, tensor in tensors if "replicate" in split_dims(tensor)]

    def region_of(tensor: Tensor) -> Region:
        assert isinstance(tensor, DTensor)
        return region_of_replica(tensor, replica)

    for name, held, written, tensor in _plan(split, mesh, nodes, region_of):
        if written.numel:
            yield name, held, written, tensor


def _plan(
    tensors: Iterable[tuple[str, Tensor]],
    mesh: DeviceMesh | None,
    nodes: Sequence[int] | None,
    region_of: Callable[[Tensor], Region],
) -> Iterator[tuple[str, Region, Region, Tensor]]:
    """Yields (name, rectangle held, part of it written, tensor) for each tensor of which this rank
    writes something."""
    # Bytes dealt out so far to each of the ranks that hold the same rectangles.
    loads: dict[tuple[str, ...], list[int]] = {}
    rank = 0
    ranks = 1
    if mesh is not None:
        rank = mesh.get_rank()
        ranks = mesh.size()
    for name, tensor in tensors:
        axes, holders = _holders(tensor, mesh)
        # Sizes differ by a row between shards; the mean is the same on every rank, so all deal out
        # alike.
        shards = ranks // len(holders)
        size = tensor.numel() * tensor.element_size() // shards
        # Every node keeps a copy: its ranks share the work among themselves.
        if nodes is not None:
            holders = [holder for holder in holders if nodes[holder] == nodes[rank]]
        held = region_of(tensor)
        written = held
        if len(holders) > 1 and size >= SPLIT_BYTES:
            written = _equal_part(held, len(holders), holders.index(rank))
        else:
            # Too small to cut: all of it goes to the rank that has least to write.
            load = loads.setdefault(axes, [0] * len(holders))
            writer = _least_loaded(load, size)
            if holders[writer] != rank:
                continue
        yield name, held, written, tensor


def _holders(tensor: Tensor, mesh: DeviceMesh | None) -> tuple[tuple[str, ...], list[int]]:
    """The mesh axes along which ranks hold the same rectangle, and the ranks that hold this one, in
    the same order on each of them.

    A mesh axis that the tensor's own mesh does not have (a layer outside the tensor-parallel plan)
    repeats it too.
    """
    if mesh is None:
        return (), [0]
    positions = axis_positions(mesh)
    split = split_dims(tensor)
    axes = tuple(name for name in positions if name not in split)
    # Along a split axis the position of this rank, along the others all positions.
    index: dict[str, int | slice] = {**positions, **dict.fromkeys(axes, slice(None))}
    return axes, mesh.mesh[tuple(index.values())].flatten().tolist()


def _least_loaded(load: list[int], size: int) -> int:
    """Index of the rank with the fewest bytes, to which ``size`` bytes are added."""
    writer = load.index(min(load))
    # One more, so that empty and tiny rectangles are spread over ranks too.
    load[writer] += size + 1
    return writer


def _equal_part(region: Region, parts: int, index: int) -> Region:
    """Part ``index`` of ``region`` cut along dim 0."""
    begin, length = _chunk(region.lengths[0], parts, index)
    offsets = (region.offsets[0] + begin, *region.offsets[1:])
    return Region(offsets, (length, *region.lengths[1:]))


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of part ``index`` when ``torch.chunk`` cuts ``length`` in ``parts``; the
    last may be empty."""
    # Rounded up.
    size = -(-length // parts)
    begin = min(index * size, length)
    return begin, min(size, length - begin)

"""Which of the ranks that hold the same rectangle of a tensor writes it: `plan_writes`.

No communication: every rank computes the same from placements and mesh coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.weights.geometry import Region, local_region

# A rectangle of at least this size is written in equal parts by all of its holders.
SPLIT_BYTES = 16 * 2**20


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


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of part ``index`` when ``torch.chunk`` cuts ``length`` in ``parts``; the
    last may be empty."""
    size = -(-length // parts)
    begin = min(index * size, length)
    return begin, min(size, length - begin)

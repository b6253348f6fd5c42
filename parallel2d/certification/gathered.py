"""Whole tensors of a parallel model on rank 0, by plain sends between ranks: `gather_whole`.

The collectives of the layout under examination have no part in it, but for the small messages of
`parallel2d.exchange`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from parallel2d import exchange
from parallel2d.checkpoint.save import plan_writes
from parallel2d.mesh import mesh_shape, without_replicas
from parallel2d.sync.one_process import Cut
from parallel2d.weights.geometry import Region, local_region

_Piece = tuple[str, Region, Tensor]


@torch.no_grad()
def gather_whole(
    tensors: Mapping[str, Tensor], mesh: DeviceMesh, replica: int | None = 0
) -> dict[str, Tensor]:
    """``tensors`` made whole on rank 0, on its device; empty elsewhere. Collective over the world.

    ``tensors``: by name, in the same order on every rank. ``replica``: whose values these are; None
    where replicas hold different parts of one tensor.
    """
    pieces = _own_pieces(tensors, mesh, replica)
    heads = exchange.gather([(name, region) for name, region, _ in pieces])
    if dist.get_rank() != 0:
        if pieces:
            c10d.send(_as_bytes([values for _, _, values in pieces]), dst=0)
        return {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for rank, regions in enumerate(heads):
        if not regions:
            continue
        if rank == 0:
            received = [values for _, _, values in pieces]
        else:
            received = _received(regions, whole, rank)
        for (name, region), values in zip(regions, received, strict=True):
            whole[name][region.slices] = values
    return whole


def cuts_of(parameters: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, Cut]:
    """By name, the rectangles in which the ranks of a replica cut a parameter, on every rank.
    Collective."""
    own = {name: local_region(tensor) for name, tensor in parameters.items()}
    ranks = exchange.all_gather((_replica_of(mesh), own))
    found: dict[str, Cut] = {}
    for name in parameters:
        # Several ranks may have the same one; empty ones are nobody's.
        regions = {each[name] for replica, each in ranks if replica == 0 and each[name].numel}
        found[name] = [region.slices for region in sorted(regions, key=lambda r: r.offsets)]
    return found


def _replica_of(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank("replicate") if mesh_shape(mesh).replicate > 1 else 0


def _own_pieces(
    tensors: Mapping[str, Tensor], mesh: DeviceMesh, replica: int | None
) -> list[_Piece]:
    """What this rank sends: nothing where it belongs to another replica."""
    if replica is None or mesh_shape(mesh).replicate == 1:
        return list(plan_writes(tensors.items(), mesh))
    if _replica_of(mesh) != replica:
        return []
    return list(plan_writes(tensors.items(), without_replicas(mesh)))


def _received(
    regions: list[tuple[str, Region]], whole: Mapping[str, Tensor], rank: int
) -> list[Tensor]:
    """The values of ``regions``, which ``rank`` sends."""
    sizes = [region.numel * whole[name].element_size() for name, region in regions]
    device = whole[regions[0][0]].device
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    c10d.recv(buffer, src=rank)
    found: list[Tensor] = []
    for (name, region), part in zip(regions, buffer.split(sizes), strict=True):
        # A copy, because a view of another dtype must begin at a multiple of its size.
        found.append(part.clone().view(whole[name].dtype).view(region.lengths))
    return found


def _as_bytes(values: list[Tensor]) -> Tensor:
    return torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in values])

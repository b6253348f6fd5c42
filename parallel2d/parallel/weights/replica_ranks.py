"""Divide the initialization of weights over the ranks of a replica (`deal`), and send the values to
the local shards (`ReplicaRanks`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import exchange
from parallel2d.base.device import current_device
from parallel2d.parallel.mesh import axis_positions, mesh_shape, ranks_of
from parallel2d.parallel.weights.geometry import Region, local_part, local_region
from parallel2d.parallel.weights.unsharded_tensors import copy_part

HELD_VALUES = 2**28  # maximum number of values that a rank stores before a send: 1 GiB in fp32
SENT_BYTES = 2**26  # bytes that a rank sends at a time
_ALIGNMENT = 16  # bytes; a multiple of every itemsize


def deal(sizes: Sequence[int], ranks: int) -> Iterator[list[list[int]]]:
    """Distribute pieces of work over the ranks, in rounds.

    In each round all ranks get about equally many values. A rank gets at most `HELD_VALUES` values,
    or one larger piece.

    Args:
        sizes: the number of values of each piece of work.
        ranks: the number of ranks.

    Yields:
        One list per rank with the indices of its pieces in this round.
    """
    # Assign pieces in order of decreasing size, each to the rank with the fewest values.
    order = sorted(range(len(sizes)), key=lambda each: -sizes[each])
    begin = 0
    while begin < len(order):
        most = max(HELD_VALUES, sizes[order[begin]])
        loads = [(0, rank) for rank in range(ranks)]
        dealt: list[list[int]] = []
        for _ in loads:
            dealt.append([])
        while begin < len(order):
            number = order[begin]
            load, rank = loads[0]
            if load + sizes[number] > most:
                break
            heapq.heapreplace(loads, (load + sizes[number], rank))
            dealt[rank].append(number)
            begin += 1
        yield dealt


class _Piece(NamedTuple):
    """A region of a tensor that is sent in one message."""

    number: int  # index of the tensor among the tensors of the sending rank
    tensor: Tensor  # the tensor to fill
    region: Region  # in the unsharded tensor


class ReplicaRanks:
    """The ranks of this rank's replica: number = shard position * tensor ranks + tensor position.

    Args:
        mesh: the mesh of the parameters; None: only this rank.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._shards = self._tensors = 1
        self._shard = self._tensor = 0
        self._device = torch.device("cpu")
        if mesh is not None:
            shape, at = mesh_shape(mesh), axis_positions(mesh)
            self._shards, self._tensors = shape.shard, shape.tensor
            self._shard, self._tensor = at.get("shard", 0), at.get("tensor", 0)
            self._ranks = ranks_of(mesh)[at.get("replicate", 0), :, 0].tolist()
            self._device = current_device(mesh.device_type)
        self._mesh: Any = mesh
        # (id of a tensor, position along the shard axis) -> region, during `fill`
        self._regions: dict[tuple[int, int], Region] = {}
        self.size = self._shards * self._tensors
        self.own = self._shard * self._tensors + self._tensor

    def all_gather(self, value: Any) -> dict[int, Any]:
        """Return rank -> value for the ranks of the replica. Collective."""
        found = {dist.get_rank() if dist.is_initialized() else 0: value}
        for axis, count in (("tensor", self._tensors), ("shard", self._shards)):
            if count > 1:
                gathered = exchange.all_gather(found, self._mesh.get_group(axis))
                found = {}
                for part in gathered:
                    found |= part
        return found

    @torch.no_grad()
    def fill(self, targets: Sequence[Sequence[Tensor]], values: Sequence[Tensor]) -> None:
        """Fill local shards from the unsharded values of each rank. Collective.

        Args:
            targets: for each rank of the replica, the tensors for which the rank has values.
            values: the unsharded values of this rank's tensors in ``targets``, on CPU.
        """
        if self.size == 1:
            for target, value in zip(targets[0], values, strict=True):
                copy_part(target, value)
            return
        steps = [list(self._steps(each)) for each in targets]
        for number in range(max(map(len, steps))):
            now = []
            for each in steps:
                now.append(each[number] if number < len(each) else [])
            self._exchange(now, values)
        self._regions.clear()

    def _steps(self, targets: Sequence[Tensor]) -> Iterator[list[_Piece]]:
        """Yield the pieces of ``targets`` that are sent together."""
        step: list[_Piece] = []
        free = SENT_BYTES
        for number, tensor in enumerate(targets):
            whole = Region.of_shape(tensor.shape)
            # A replicated tensor is sent to each rank of the shard group.
            copies = self._shards if self._region(tensor, 0) == whole else 1
            size = tensor.dtype.itemsize * copies
            for region in whole.pieces(tensor.shape, max(1, SENT_BYTES // size)):
                if step and region.numel * size > free:
                    yield step
                    step, free = [], SENT_BYTES
                step.append(_Piece(number, tensor, region))
                free -= region.numel * size
        if step:
            yield step

    def _region(self, tensor: Tensor, shard: int) -> Region:
        """Return the local region of the rank at position ``shard`` of this rank's shard group."""
        key = id(tensor), shard
        if key not in self._regions:
            self._regions[key] = local_region(tensor, {"shard": shard})
        return self._regions[key]

    def _exchange(self, pieces: Sequence[Sequence[_Piece]], values: Sequence[Tensor]) -> None:
        """Send ``pieces`` (a list for each sending rank) to the local shards.

        First each sender broadcasts its pieces in its tensor group. Then every rank of this group
        sends, in its shard group, each other rank the values of that rank's local shard.
        """
        held = self._in_tensor_group(pieces, values)
        sent: list[Tensor] = []
        counts = []
        for shard in range(self._shards):
            parts = []
            for piece, view in held:
                common = self._region(piece.tensor, shard).intersect(piece.region)
                if common is not None:
                    parts.append(view[common.slices_in(piece.region)])
            counts.append(sum(_bytes(part.dtype, part.numel()) for part in parts))
            sent += parts
        packed = _packed(sent).to(self._device)
        kept: list[tuple[Tensor, Region]] = []
        incoming = []
        for shard in range(self._shards):
            begin = len(kept)
            for owner in range(shard * self._tensors, (shard + 1) * self._tensors):
                for piece in pieces[owner]:
                    common = self._region(piece.tensor, self._shard).intersect(piece.region)
                    if common is not None:
                        kept.append((piece.tensor, common))
            sizes = []
            for tensor, region in kept[begin:]:
                sizes.append(_bytes(tensor.dtype, region.numel))
            incoming.append(sum(sizes))
        received = packed
        if self._shards > 1:
            received = packed.new_empty(sum(incoming))
            dist.all_to_all_single(
                received, packed, incoming, counts, group=self._mesh.get_group("shard")
            )
        shapes = []
        for tensor, region in kept:
            shapes.append((tensor.dtype, region.lengths))
        for (tensor, common), view in zip(kept, _views(received, shapes), strict=True):
            own = self._region(tensor, self._shard)
            local_part(tensor)[common.slices_in(own)].copy_(view)

    def _in_tensor_group(
        self, pieces: Sequence[Sequence[_Piece]], values: Sequence[Tensor]
    ) -> list[tuple[_Piece, Tensor]]:
        """Broadcast in the tensor group. Return the pieces of all its ranks with their values."""
        held: list[tuple[_Piece, Tensor]] = []
        for position in range(self._tensors):
            own = pieces[self._shard * self._tensors + position]
            given: list[Tensor] = []
            if position == self._tensor:
                for piece in own:
                    part = values[piece.number][piece.region.slices]
                    given.append(part.to(piece.tensor.dtype))
            if self._tensors > 1 and own:
                shapes = []
                for piece in own:
                    shapes.append((piece.tensor.dtype, piece.region.lengths))
                size = sum(_bytes(piece.tensor.dtype, piece.region.numel) for piece in own)
                packed = torch.empty(size, dtype=torch.uint8, device=self._device)
                if given:
                    packed.copy_(_packed(given))
                source = self._ranks[self._shard][position]
                dist.broadcast(packed, src=source, group=self._mesh.get_group("tensor"))
                given = list(_views(packed, shapes))
            held += zip(own, given, strict=True)
        return held


def _bytes(dtype: torch.dtype, numel: int) -> int:
    """Return the bytes of a tensor in a message, rounded up to a multiple of `_ALIGNMENT`."""
    return -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Copy ``parts``, which are on one device, into one message of bytes."""
    size = sum(_bytes(part.dtype, part.numel()) for part in parts)
    device = parts[0].device if parts else None
    message = torch.empty(size, dtype=torch.uint8, device=device)
    shapes = []
    for part in parts:
        shapes.append((part.dtype, tuple(part.shape)))
    for view, part in zip(_views(message, shapes), parts, strict=True):
        view.copy_(part)
    return message


def _views(
    message: Tensor, shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> Iterator[Tensor]:
    """Yield views of the tensors in a message."""
    begin = 0
    for dtype, shape in shapes:
        numel = math.prod(shape)
        used = message[begin : begin + numel * dtype.itemsize]
        yield used.view(dtype).view(shape)
        begin += _bytes(dtype, numel)

"""`MatrixOwners` assigns each sharded tensor to a rank, its owner. The tensor is gathered on its
owner, and the result is scattered to all ranks.

[Note: one owner per matrix] The axes are numbered from the inside out: tensor, shard, and, with
``hybrid_full``, also replicate. With the other strategies each replica has its own owners, so that
no matrix crosses the replicate axis. A matrix is sharded axis by axis in this order: each axis
either shards the tensor that the previous axes have left, or replicates it. The gather goes through
the axes in reverse order. For an axis that shards the matrix, its ranks send their shards to the
rank at the owner's position on this axis. An axis that replicates the matrix needs no
communication: only the ranks at the owner's position take part. The scatter goes through the axes
in order: the rank at the owner's position sends every rank of the axis its shard, or a copy. For
each axis, the gather and the scatter are one all-to-all each, for all matrices of a round. Each
all-to-all uses the mesh's process group of the axis, so that the bytes are counted as for other
collectives.

Owners, rounds and the order of collectives depend only on shapes, and are therefore equal on all
ranks. Matrices are assigned in decreasing order of cost, each to the rank with the least work so
far. To bound memory, matrices are processed in rounds: in a round an owner holds at most
`ROUND_BYTES` of unsharded matrices, or a single matrix. The results of a round are scattered in
batches: in a batch a rank receives at most `BATCH_BYTES`, or its shard of a single matrix. Shards
are padded to the size of the largest shard, so that the total bytes on an axis do not depend on the
choice of owners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, zip_longest
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from parallel2d.parallel.mesh import axis_positions
from parallel2d.parallel.weights.geometry import Region, local_region, pieces_of, split_dims

ROUND_BYTES = 64 * 2**20
BATCH_BYTES = 256 * 2**20


class MatrixAxis(NamedTuple):
    """A mesh axis with more than one rank. ``place``: this rank's position on the axis."""

    name: str
    ranks: int
    place: int


class _MatrixPart(NamedTuple):
    """This rank's shard of a matrix after one axis, and all axes before it, have sharded the
    matrix."""

    dim: int | None  # the dim that the axis shards; None if the axis replicates
    # Length of ``dim`` on each rank of the axis; empty if the axis replicates
    lengths: tuple[int, ...]
    held: torch.Size  # the shape of this rank's shard
    padded: torch.Size  # the shape of sent shards: the shape of the largest shard

    def slices(self, place: int) -> tuple[slice, ...]:
        """Return the slices that select the shard of the rank at ``place`` from the padded
        shard."""
        shape = list(self.held)
        if self.dim is not None:
            shape[self.dim] = self.lengths[place]
        return tuple(map(slice, shape))

    def cut(self, before: Tensor, ranks: int) -> Sequence[Tensor]:
        """Return the shard of ``before`` for each of the ``ranks`` of the axis, or ``before`` for
        each if the axis replicates."""
        if self.dim is None:
            return [before] * ranks
        return before.split(self.lengths, self.dim)


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix and the rank that owns it."""

    number: int  # index among the planned matrices
    shape: torch.Size  # unsharded
    owner: tuple[int, ...]  # the owner's position on each axis
    parts: tuple[_MatrixPart, ...]  # this rank's shard after each axis
    itemsize: int  # bytes per sent element

    @property
    def part_bytes(self) -> int:
        """The bytes of the result's shard that a rank receives, with padding."""
        part = self.parts[-1].padded if self.parts else self.shape
        return part.numel() * self.itemsize


@dataclass(eq=False)
class MatrixRound:
    """Matrices that are gathered on their owners at the same time."""

    mesh: DeviceMesh | None
    axes: Sequence[MatrixAxis]
    matrices: Sequence[OwnedMatrix]  # in the same order on every rank
    device: torch.device
    dtype: torch.dtype  # dtype of sent values

    def __post_init__(self) -> None:
        self.batches = _in_pieces(self.matrices, BATCH_BYTES, lambda matrix: matrix.part_bytes)
        self._places = tuple(map(attrgetter("place"), self.axes))

    def is_sent(self, matrix: OwnedMatrix) -> bool:
        """True if the owner receives this rank's shard. Of several equal shards it receives only
        one."""
        for part, owner, place in zip(matrix.parts, matrix.owner, self._places, strict=True):
            if part.dim is None and owner != place:
                return False
        return True

    def gather(self, parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the unsharded matrices that this rank owns, by number. ``parts``: this rank's
        shard of each matrix for which `is_sent` is true. Collective."""
        held = dict(parts)
        for level in reversed(range(len(self.axes))):
            self._gather_over(level, held)
        return held

    def scatter(
        self, batch: Sequence[OwnedMatrix], wholes: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return this rank's shards of the results of ``batch``, by number. ``batch``: one of
        `batches`. ``wholes``: the results of the matrices that this rank owns. Collective."""
        held = {}
        for each in batch:
            if each.number in wholes:
                held[each.number] = wholes[each.number]
        for level in range(len(self.axes)):
            self._scatter_over(level, batch, held)
        return held

    def _gather_over(self, level: int, held: dict[int, Tensor]) -> None:
        """Send the shards in ``held`` to the rank at the owner's position on one axis, and join
        them there. Collective."""
        axis = self.axes[level]
        split = []
        for each in self.matrices:
            if each.parts[level].dim is not None:
                split.append(each)
        by_place = self._by_place(level, filter(self.is_sent, split))
        sent = []
        for matrix in chain.from_iterable(by_place):
            sent.append(_padded(held.pop(matrix.number), matrix.parts[level].padded))
        own = by_place[axis.place]
        sizes = list(map(partial(_numel, level), by_place))
        flat = self._exchange(axis, sent, sizes, [sizes[axis.place]] * axis.ranks)
        shapes = [matrix.parts[level].padded for matrix in own]
        # First the shards of all matrices from the first rank of the axis, then from the second,
        # and so on
        received = list(pieces_of(flat, shapes * axis.ranks))
        for index, matrix in enumerate(own):
            part = matrix.parts[level]
            joined = []
            for place, piece in enumerate(received[index :: len(own)]):
                joined.append(piece[part.slices(place)])
            held[matrix.number] = torch.cat(joined, part.dim or 0)

    def _scatter_over(
        self, level: int, batch: Sequence[OwnedMatrix], held: dict[int, Tensor]
    ) -> None:
        """Send shards of the tensors in ``held`` from the rank at the owner's position to all ranks
        of one axis. Replace the tensors in ``held`` by the shards that this rank receives.
        Collective."""
        axis = self.axes[level]
        by_place = self._by_place(level, batch)
        own = []
        for matrix in by_place[axis.place]:
            part = matrix.parts[level]
            pieces = part.cut(held[matrix.number], axis.ranks)
            own.append([_padded(each, part.padded) for each in pieces])
        # First the shards of all matrices for the first rank of the axis, then for the second, and
        # so on
        sent = list(chain.from_iterable(zip(*own, strict=True)))
        sizes = [_numel(level, matrices) for matrices in by_place]
        flat = self._exchange(axis, sent, [sizes[axis.place]] * axis.ranks, sizes)
        # Ordered by the owner's position
        matrices = list(chain.from_iterable(by_place))
        received = pieces_of(flat, [matrix.parts[level].padded for matrix in matrices])
        for matrix, piece in zip(matrices, received, strict=True):
            held[matrix.number] = piece[matrix.parts[level].slices(axis.place)]

    def _by_place(self, level: int, matrices: Iterable[OwnedMatrix]) -> list[list[OwnedMatrix]]:
        """Group matrices by their owner's position on one axis. Only matrices whose owner has this
        rank's position on all later axes are included, because the others are not sent among these
        ranks."""
        found: list[list[OwnedMatrix]] = [[] for _ in range(self.axes[level].ranks)]
        for matrix in matrices:
            if matrix.owner[level + 1 :] == self._places[level + 1 :]:
                found[matrix.owner[level]].append(matrix)
        return found

    def _exchange(
        self,
        axis: MatrixAxis,
        tensors: Sequence[Tensor],
        sent: Sequence[int],
        received: Sequence[int],
    ) -> Tensor:
        """Run one all-to-all. Collective.

        Args:
            tensors: the tensors to send: first all tensors for the first rank of ``axis``, then for
                the second, and so on.
            sent, received: number of elements sent to, and received from, each rank.
        """
        flat = torch.empty(0, dtype=self.dtype, device=self.device)
        if tensors:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        output = flat.new_empty(sum(received))
        # Either all ranks of the axis send or receive elements here, or none of them does. The
        # numbers follow from shapes that every rank knows, so all ranks skip the same collectives.
        if flat.numel() or output.numel():
            assert self.mesh is not None
            group = self.mesh.get_group(axis.name)
            dist.all_to_all_single(output, flat, list(received), list(sent), group=group)
        return output


class MatrixOwners:
    """Assigns owners. ``mesh``: the mesh of the ranks that share the updates; None for a single
    process."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh
        self._axes: list[MatrixAxis] = []
        if mesh is None:
            return
        # The axes of a mesh are ordered from the outermost to the innermost.
        for name, place in reversed(axis_positions(mesh).items()):
            axis = MatrixAxis(name, mesh[name].size(), place)
            if axis.ranks > 1:
                self._axes.append(axis)

    def assign(self, costs: Sequence[float]) -> list[int]:
        """Return the number of an owner for each entry of ``costs``, which may have any unit."""
        work = [0.0] * math.prod(map(attrgetter("ranks"), self._axes))
        owners = [0] * len(costs)
        # Every rank must compute the same assignment. `sorted` is stable, so equal costs keep their
        # order, and `index` finds the first of several ranks with the least work.
        for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
            owners[number] = work.index(min(work))
            work[owners[number]] += costs[number]
        return owners

    def is_own(self, owner: int) -> bool:
        """True if this rank is the owner with this number."""
        return self._places_of(owner) == tuple(map(attrgetter("place"), self._axes))

    def plan(
        self, matrices: Mapping[int, Tensor], owners: Sequence[int], dtype: torch.dtype
    ) -> list[MatrixRound]:
        """Group ``matrices``, given by number, into rounds. Every rank must pass the same shapes in
        the same order.

        Args:
            owners: the owner of each number, from `assign`.
            dtype: dtype of sent values.
        """
        owned: dict[int, list[OwnedMatrix]] = {}
        for owner in sorted(set(owners)):
            owned[owner] = []
        # Largest matrices first
        for number in sorted(matrices, key=lambda number: -matrices[number].numel()):
            matrix = self._owned(number, matrices[number], owners[number], dtype)
            owned[owners[number]].append(matrix)
        # For each owner, its matrices by round
        turns = []
        for each in owned.values():
            turns.append(
                _in_pieces(each, ROUND_BYTES, lambda matrix: matrix.shape.numel() * matrix.itemsize)
            )
        rounds = []
        for at_once in zip_longest(*turns, fillvalue=[]):
            # The first matrix of each owner, then the second of each, and so on
            alternating = filter(None, chain.from_iterable(zip_longest(*at_once)))
            device = next(iter(matrices.values())).device
            rounds.append(MatrixRound(self._mesh, self._axes, list(alternating), device, dtype))
        return rounds

    def _owned(self, number: int, matrix: Tensor, owner: int, dtype: torch.dtype) -> OwnedMatrix:
        held = list(matrix.shape)
        padded = list(matrix.shape)
        offsets = [0] * matrix.ndim
        parts = []
        dims = split_dims(matrix)
        for axis in self._axes:
            dim = dims.get(axis.name)
            lengths: tuple[int, ...] = ()
            if dim is not None:
                # All shards have the same length, rounded up; the last shards may be shorter or
                # empty.
                size = -(-held[dim] // axis.ranks)
                ends = []
                for place in range(axis.ranks + 1):
                    ends.append(min(held[dim], size * place))
                lengths = tuple(end - begin for begin, end in pairwise(ends))
                offsets[dim] += sum(lengths[: axis.place])
                held[dim] = lengths[axis.place]
                padded[dim] = -(-padded[dim] // axis.ranks)
            parts.append(_MatrixPart(dim, lengths, torch.Size(held), torch.Size(padded)))
        region = local_region(matrix)
        # The offset of an empty shard is arbitrary.
        assert not region.numel or region == Region(tuple(offsets), tuple(held)), (
            f"{matrix.placements} does not split from the inside out"  # type: ignore[attr-defined]
        )
        places = self._places_of(owner)
        return OwnedMatrix(number, matrix.shape, places, tuple(parts), dtype.itemsize)

    def _places_of(self, rank: int) -> tuple[int, ...]:
        """Return the position on each axis of the rank with this number. Consecutive numbers differ
        first in the position on the outermost axis, so that a few matrices are distributed over the
        nodes."""
        places = []
        for axis in reversed(self._axes):
            rank, place = divmod(rank, axis.ranks)
            places.append(place)
        return tuple(reversed(places))


def _padded(part: Tensor, shape: torch.Size) -> Tensor:
    """Return ``part`` padded with zeros at the end of each dim up to ``shape``."""
    if part.shape == shape:
        return part
    # `pad` takes the last dim first.
    padding: list[int] = []
    for before, after in zip(reversed(part.shape), reversed(shape), strict=True):
        padding += 0, after - before
    return pad(part, padding)


def _numel(level: int, matrices: Sequence[OwnedMatrix]) -> int:
    return sum(matrix.parts[level].padded.numel() for matrix in matrices)


def _in_pieces(
    matrices: Sequence[OwnedMatrix], limit: int, size: Callable[[OwnedMatrix], int]
) -> list[list[OwnedMatrix]]:
    pieces: list[list[OwnedMatrix]] = []
    total = 0
    for matrix in matrices:
        total += size(matrix)
        if not pieces or total > limit:
            pieces.append([])
            total = size(matrix)
        pieces[-1].append(matrix)
    return pieces

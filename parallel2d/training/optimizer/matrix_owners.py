"""Brings each sharded tensor whole to the one rank that works on it, and the result back to all:
`MatrixOwners`.

[Note: one owner per matrix] The mesh is taken from the inside out: tensor, shard, and with
``hybrid_full`` replicate, whose ranks otherwise are owners each for themselves: nothing crosses the
slow network. An axis either splits a matrix, and then it splits what the axes before it have left,
or its ranks hold copies. To gather, the ranks of each axis that splits, the last one first, send
their parts to the rank in the owner's place on that axis; of copies, those at the owner's place
alone are sent. To scatter, the axes are gone through in their order: the rank in the owner's place
sends every rank of the axis its part, or a copy. Each of these steps is one all-to-all for all
matrices of a round, in the mesh's own process group of the axis, so the bytes over each axis are
counted as usual.

Owners, rounds and the order of collectives follow from shapes alone, and so are the same on all
ranks. Work, the most expensive first, goes to the rank with the least work so far. In a round an
owner holds at most `ROUND_BYTES` of whole matrices, or one; a batch of results brings a rank at
most `BATCH_BYTES`, or its part of one. Parts are padded to the largest one, so that the bytes that
the ranks of an axis send together do not depend on who owns what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
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
    """A mesh axis of more than one rank. ``place``: of this rank on it."""

    name: str
    ranks: int
    place: int


class _MatrixPart(NamedTuple):
    """What an axis leaves of a matrix."""

    dim: int | None  # that the axis splits; None where its ranks hold copies
    lengths: tuple[int, ...]  # of ``dim``, on each rank of this rank's row; empty for copies
    held: torch.Size  # the shape of this rank's part
    padded: torch.Size  # in which parts are sent: the shape of the largest one of all ranks

    def slices(self, place: int) -> tuple[slice, ...]:
        """Indexes the padded part of the rank in ``place``, giving what that rank holds."""
        shape = list(self.held)
        if self.dim is not None:
            shape[self.dim] = self.lengths[place]
        return tuple(map(slice, shape))

    def cut(self, before: Tensor, ranks: int) -> Sequence[Tensor]:
        """What each of the ``ranks`` of the axis gets of ``before``: its part, or a copy."""
        if self.dim is None:
            return [before] * ranks
        return before.split(self.lengths, self.dim)


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix and the rank that works on it."""

    number: int  # its place among those that were planned
    shape: torch.Size  # of the whole
    owner: tuple[int, ...]  # the owner's place on each axis
    parts: tuple[_MatrixPart, ...]  # what each axis leaves to this rank
    itemsize: int  # bytes of an element that is sent

    @property
    def part_bytes(self) -> int:
        """Bytes that a rank gets of the result, with padding."""
        part = self.parts[-1].padded if self.parts else self.shape
        return part.numel() * self.itemsize


@dataclass(eq=False)
class MatrixRound:
    """Matrices that are whole on their owners at the same time."""

    mesh: DeviceMesh | None
    axes: Sequence[MatrixAxis]
    matrices: Sequence[OwnedMatrix]  # in the same order on every rank
    device: torch.device
    dtype: torch.dtype  # in which they are sent

    def __post_init__(self) -> None:
        self.batches = _in_pieces(self.matrices, BATCH_BYTES, lambda matrix: matrix.part_bytes)
        self._places = tuple(axis.place for axis in self.axes)

    def is_sent(self, matrix: OwnedMatrix) -> bool:
        """Whether the owner gets this rank's part: of copies it gets one."""
        for part, owner, place in zip(matrix.parts, matrix.owner, self._places, strict=True):
            if part.dim is None and owner != place:
                return False
        return True

    def gather(self, parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The whole matrices that this rank owns, by number. ``parts``: this rank's part of each
        matrix for which `is_sent` is true. Collective."""
        held = dict(parts)
        for level in reversed(range(len(self.axes))):
            self._gather_over(level, held)
        return held

    def scatter(
        self, batch: Sequence[OwnedMatrix], wholes: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """This rank's parts of the results of ``batch``, one of `batches`, by number. ``wholes``:
        the results of the matrices that this rank owns. Collective."""
        held = {each.number: wholes[each.number] for each in batch if each.number in wholes}
        for level in range(len(self.axes)):
            self._scatter_over(level, batch, held)
        return held

    def _gather_over(self, level: int, held: dict[int, Tensor]) -> None:
        """Joins parts in the owner's place on one axis, in ``held``. Collective."""
        axis = self.axes[level]
        split = [each for each in self.matrices if each.parts[level].dim is not None]
        by_place = self._by_place(level, filter(self.is_sent, split))
        sent = []
        for matrix in chain.from_iterable(by_place):
            sent.append(_padded(held.pop(matrix.number), matrix.parts[level].padded))
        own = by_place[axis.place]
        sizes = [_numel(level, matrices) for matrices in by_place]
        flat = self._exchange(axis, sent, sizes, [sizes[axis.place]] * axis.ranks)
        shapes = [matrix.parts[level].padded for matrix in own]
        # The matrices of the first rank of the axis, then those of the second, ...
        received = list(pieces_of(flat, shapes * axis.ranks))
        for index, matrix in enumerate(own):
            part = matrix.parts[level]
            pieces = enumerate(received[index :: len(own)])
            joined = [piece[part.slices(place)] for place, piece in pieces]
            held[matrix.number] = torch.cat(joined, part.dim or 0)

    def _scatter_over(
        self, level: int, batch: Sequence[OwnedMatrix], held: dict[int, Tensor]
    ) -> None:
        """Sends what ``held`` has, in the owner's place on one axis, to all ranks of the axis, and
        replaces it by what this rank gets. Collective."""
        axis = self.axes[level]
        by_place = self._by_place(level, batch)
        own = []
        for matrix in by_place[axis.place]:
            part = matrix.parts[level]
            pieces = part.cut(held[matrix.number], axis.ranks)
            own.append([_padded(each, part.padded) for each in pieces])
        # All that the first rank of the axis gets, then what the second gets, ...
        sent = list(chain.from_iterable(zip(*own, strict=True)))
        sizes = [_numel(level, matrices) for matrices in by_place]
        flat = self._exchange(axis, sent, [sizes[axis.place]] * axis.ranks, sizes)
        # By the owner's place
        matrices = list(chain.from_iterable(by_place))
        received = pieces_of(flat, [matrix.parts[level].padded for matrix in matrices])
        for matrix, piece in zip(matrices, received, strict=True):
            held[matrix.number] = piece[matrix.parts[level].slices(axis.place)]

    def _by_place(self, level: int, matrices: Iterable[OwnedMatrix]) -> list[list[OwnedMatrix]]:
        """By the owner's place on an axis, those that pass along this rank's row of it: the owner
        is in this rank's place on all axes after it."""
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
        """One all-to-all. ``tensors``: for the first rank of ``axis``, then for the second, ...;
        ``sent``, ``received``: numbers of elements to and from each. Collective."""
        flat = torch.empty(0, dtype=self.dtype, device=self.device)
        if tensors:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        output = flat.new_empty(sum(received))
        # Either all ranks of the axis have something to send or receive here, or none has.
        if flat.numel() or output.numel():
            assert self.mesh is not None
            group = self.mesh.get_group(axis.name)
            dist.all_to_all_single(output, flat, list(received), list(sent), group=group)
        return output


class MatrixOwners:
    """Chooses the owners. ``mesh``: the ranks that make the same updates; None on one process."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh
        self._axes: list[MatrixAxis] = []
        if mesh is None:
            return
        # The axes of a mesh are in this order, the outermost first.
        for name, place in reversed(axis_positions(mesh).items()):
            axis = MatrixAxis(name, mesh[name].size(), place)
            if axis.ranks > 1:
                self._axes.append(axis)

    def assign(self, costs: Sequence[float]) -> list[int]:
        """The number of the owner of each piece of work. ``costs``: in any unit."""
        work = [0.0] * math.prod(axis.ranks for axis in self._axes)
        owners = [0] * len(costs)
        # Equal ones stay in their order, and `index` finds the first of equal ranks.
        for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
            owners[number] = work.index(min(work))
            work[owners[number]] += costs[number]
        return owners

    def is_own(self, owner: int) -> bool:
        """Whether this rank is the owner of this number."""
        return self._places_of(owner) == tuple(axis.place for axis in self._axes)

    def plan(
        self, matrices: Mapping[int, Tensor], owners: Sequence[int], dtype: torch.dtype
    ) -> list[MatrixRound]:
        """Puts the matrices, by number, in rounds. ``owners``: of all numbers, by `assign`.
        ``dtype``: in which they are sent. Every rank must give the same shapes in the same order.
        """
        owned: dict[int, list[OwnedMatrix]] = {owner: [] for owner in sorted(set(owners))}
        # The largest first
        for number in sorted(matrices, key=lambda number: -matrices[number].numel()):
            matrix = self._owned(number, matrices[number], owners[number], dtype)
            owned[owners[number]].append(matrix)
        # By owner, then by round
        turns = []
        for each in owned.values():
            turns.append(
                _in_pieces(each, ROUND_BYTES, lambda matrix: matrix.shape.numel() * matrix.itemsize)
            )
        rounds = []
        for at_once in zip_longest(*turns, fillvalue=[]):
            # The first matrix of each owner, then the second of each, ...
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
                # Equal parts, rounded up; the last ones are shorter or empty.
                size = -(-held[dim] // axis.ranks)
                ends = [min(held[dim], size * place) for place in range(axis.ranks + 1)]
                lengths = tuple(end - begin for begin, end in pairwise(ends))
                offsets[dim] += sum(lengths[: axis.place])
                held[dim] = lengths[axis.place]
                padded[dim] = -(-padded[dim] // axis.ranks)
            parts.append(_MatrixPart(dim, lengths, torch.Size(held), torch.Size(padded)))
        region = local_region(matrix)
        # Where an empty part begins does not matter.
        assert not region.numel or region == Region(tuple(offsets), tuple(held)), (
            f"{matrix.placements} does not split from the inside out"  # type: ignore[attr-defined]
        )
        places = self._places_of(owner)
        return OwnedMatrix(number, matrix.shape, places, tuple(parts), dtype.itemsize)

    def _places_of(self, rank: int) -> tuple[int, ...]:
        """The place on each axis of the rank of this number. Numbers run along the replicas first,
        so that few matrices are spread over the nodes."""
        places = []
        for axis in reversed(self._axes):
            rank, place = divmod(rank, axis.ranks)
            places.append(place)
        return tuple(reversed(places))


def _padded(part: Tensor, shape: torch.Size) -> Tensor:
    """``part`` with zeros at the end of each dim up to ``shape``."""
    if part.shape == shape:
        return part
    # The last dim comes first.
    missing = [after - before for before, after in zip(part.shape, shape, strict=True)]
    return pad(part, list(chain.from_iterable((0, each) for each in reversed(missing))))


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

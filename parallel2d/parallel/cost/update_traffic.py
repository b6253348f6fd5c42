"""Bytes that the optimizer itself sends per update, from shapes: `predict_updates`.

AdamW, Adam and SGD send nothing. Adafactor adds its statistics over the axes that split a
parameter, Muon sends each matrix to one rank and the result to all (`owner_bytes`). The same as
`optimizer.update_bytes` counts on a built optimizer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from parallel2d.parallel.cost.collectives import sent_bytes
from parallel2d.parallel.cost.layout import Layout
from parallel2d.parallel.cost.model_shapes import ParameterShape
from parallel2d.parallel.mesh import MeshShape

_SCALAR_BYTES = 8  # sums of squares are in fp64
_MUON_ITEM = 2  # matrices and results are sent in bf16


class _AxisSplit(NamedTuple):
    """A mesh axis that splits dim ``dim``, of ``length``, into parts of ``size``."""

    axis: str
    ranks: int
    dim: int
    length: int
    size: int


def predict_updates(layout: Layout) -> dict[str, float]:
    """Bytes that the first rank, with Muon a rank on average, sends per update over each mesh axis,
    ``{axis: bytes}``; empty when updates are local."""
    found: dict[str, float] = defaultdict(float)
    for group, count in layout.shapes.groups:
        for parameter in group:
            if not parameter.is_trained:
                continue
            sent: dict[str, float] = {}
            if layout.optimizer.name == "adafactor":
                splits = _splits_of(parameter, layout.shape, layout.splits_updates)
                sent = _adafactor(parameter, splits, layout.device_type)
            elif layout.optimizer.name == "muon" and parameter.by_muon:
                sent = owner_bytes(parameter.whole, _axes_of_owners(parameter, layout))
            for axis, size in sent.items():
                found[axis] += count * size
    return dict(found)


def _splits_of(parameter: ParameterShape, shape: MeshShape, owns_rows: bool) -> list[_AxisSplit]:
    """The axes of more than one rank that split the updated part, the one that split the whole
    first."""
    tensor = [("tensor", shape.tensor, parameter.tensor_dim)]
    rows: list[tuple[str, int, int | None]] = [("shard", shape.shard, 0)]
    order: list[tuple[str, int, int | None]] = [*rows, *tensor]
    if owns_rows:
        order = [*tensor, *rows, ("replicate", shape.replicate, 0)]
    elif parameter.tensor_dim == 0:
        # Sharding splits what the tensor axis has left.
        order = [*tensor, *rows]
    lengths = list(parameter.whole)
    found = []
    for axis, ranks, dim in order:
        if ranks == 1 or dim is None:
            continue
        size = -(-lengths[dim] // ranks)
        found.append(_AxisSplit(axis, ranks, dim, lengths[dim], size))
        lengths[dim] = size
    return found


def _local_shape(parameter: ParameterShape, splits: Sequence[_AxisSplit]) -> list[int]:
    lengths = list(parameter.whole)
    for split in splits:
        lengths[split.dim] = split.size
    return lengths


def _axes_of_owners(parameter: ParameterShape, layout: Layout) -> list[tuple[str, int, int | None]]:
    """The axes over which the matrices of Muon are divided, as `owner_bytes` takes them."""
    shape = layout.shape
    axes: list[tuple[str, int, int | None]] = [
        ("tensor", shape.tensor, parameter.tensor_dim),
        ("shard", shape.shard, 0),
    ]
    # Replicas that differ update on their own.
    if layout.method.replicas_equal:
        axes.append(("replicate", shape.replicate, 0 if layout.splits_updates else None))
    return axes


def owner_bytes(
    shape: Sequence[int], axes: Sequence[tuple[str, int, int | None]]
) -> dict[str, float]:
    """Bytes over each axis to bring one matrix to the rank that works on it and the result to all,
    mean over the ranks; see [Note: one owner per matrix] in `optimizer/matrix_owners.py`.

    ``shape``: of the whole. ``axes``: (name, ranks, the dim that the axis splits or None where its
    ranks hold copies), from the inside out.
    """
    ranks = math.prod(size for _, size, _ in axes)
    part = list(shape)
    # Rows of ranks along an axis over which parts are sent, to the owner and from it.
    gathering = scattering = 1
    sent: dict[str, float] = {}
    for name, size, dim in axes:
        rows = scattering
        if dim is not None:
            part[dim] = -(-part[dim] // size)
            rows += gathering
            gathering *= size
        scattering *= size
        if size > 1:
            sent[name] = rows * (size - 1) * math.prod(part) * _MUON_ITEM / ranks
    return sent


def _adafactor(
    parameter: ParameterShape, splits: Sequence[_AxisSplit], device_type: str
) -> dict[str, float]:
    """The sums of three rounds, each over the axes that split a dim that is summed."""
    dims = len(parameter.whole)
    sums: list[tuple[int, Collection[int]]] = [(_SCALAR_BYTES, range(dims))] * 2
    if dims > 1:
        *batch, rows, columns = _local_shape(parameter, splits)
        item = math.prod(batch) * parameter.sum_itemsize
        sums.append((rows * item, [dims - 1]))
        sums.append((columns * item, [dims - 2]))
        sums.append((item, [dims - 2]))  # the mean of the row statistic
    sent: dict[str, float] = defaultdict(float)
    for size, summed in sums:
        for split in splits:
            if split.dim in summed:
                sent[split.axis] += sent_bytes("all_reduce", size, split.ranks, device_type)
    return dict(sent)

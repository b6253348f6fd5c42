"""Bytes that the optimizer itself sends per update, from shapes: `predict_updates`.

AdamW, Adam and SGD send nothing. Muon sends each matrix to one rank and the result to all
(`owner_bytes`). What an optimizer of one's own sends is not known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from parallel2d.parallel.parallelize.layout import Layout, ParameterShape

_MUON_ITEM = 2  # matrices and results are sent in bf16


def predict_updates(layout: Layout) -> dict[str, float]:
    """Bytes that the first rank, with Muon a rank on average, sends per update over each mesh axis,
    ``{axis: bytes}``; empty when updates are local."""
    found: dict[str, float] = defaultdict(float)
    for group, count in layout.equal_groups:
        for parameter in filter(lambda each: each.is_trained, group):
            if layout.workload.optimizer.name != "muon" or not parameter.by_muon:
                continue
            sent = owner_bytes(parameter.whole, _axes_of(parameter, layout))
            for axis, size in sent.items():
                found[axis] += count * size
    return dict(found)


def _axes_of(parameter: ParameterShape, layout: Layout) -> list[tuple[str, int, int | None]]:
    """The axes whose ranks update ``parameter`` together, as `owner_bytes` takes them. The tensor
    axis comes first: sharding splits what it has left."""
    shape = layout.shape.sharding
    axes: list[tuple[str, int, int | None]] = [
        ("tensor", shape.tensor, parameter.tensor_dim),
        ("shard", shape.shard, 0),
    ]
    if layout.method.splits_updates:
        axes.append(("replicate", shape.replicate, 0))
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

"""Bytes that the optimizer itself sends per update, from shapes: `predict_updates`.

AdamW, Adam and SGD send nothing. Muon sends each matrix to one rank and the result to all
(`owner_bytes`). What an optimizer of one's own sends is not known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from parallel2d.parallel.parallelize.layout import Layout

_MUON_ITEM = 2  # matrices and results are sent in bf16


def predict_updates(layout: Layout) -> dict[str, float]:
    """Bytes that the first rank, with Muon a rank on average, sends per update over each mesh axis,
    ``{axis: bytes}``; empty when updates are local."""
    found: dict[str, float] = defaultdict(float)
    if layout.workload.optimizer.name != "muon":
        return found
    shape = layout.shape.sharding
    rows: list[tuple[str, int, int | None]] = [("shard", shape.shard, 0)]
    if layout.method.splits_updates:
        rows.append(("replicate", shape.replicate, 0))
    for group, count in layout.equal_groups:
        for parameter in group:
            if parameter.is_trained and parameter.by_muon:
                # The tensor axis comes first: sharding splits the rest.
                axes = [("tensor", shape.tensor, parameter.tensor_dim), *rows]
                for axis, size in owner_bytes(parameter.whole, axes).items():
                    found[axis] += count * size
    return found


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

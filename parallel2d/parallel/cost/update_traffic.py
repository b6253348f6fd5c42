"""Bytes that the optimizer sends per update, from shapes: `predict_updates`.

AdamW, Adam and SGD send nothing. Muon sends each matrix to one rank and the result to all ranks
(`owner_bytes`). The traffic of a custom optimizer is unknown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from parallel2d.parallel.parallelize.layout import Layout

_MUON_ITEM = 2  # matrices and results are sent in bf16


def predict_updates(layout: Layout) -> dict[str, float]:
    """Return ``{axis: bytes}`` that the first rank sends per update, or with Muon an average rank.

    Empty if updates are local.
    """
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
                # The tensor axis comes first: sharding splits the remaining parts.
                axes = [("tensor", shape.tensor, parameter.tensor_dim), *rows]
                for axis, size in owner_bytes(parameter.whole, axes).items():
                    found[axis] += count * size
    return found


def owner_bytes(
    shape: Sequence[int], axes: Sequence[tuple[str, int, int | None]]
) -> dict[str, float]:
    """Return bytes over each axis to bring one matrix to its owner and the result to all ranks.

    An average over the ranks; see [Note: one owner per matrix] in `optimizer/matrix_owners.py`.

    Args:
        shape: shape of the unsharded matrix.
        axes: (name, ranks, split dim) from the inside out; the dim is None for replicated axes.
    """
    ranks = math.prod(size for _, size, _ in axes)
    part = list(shape)
    # Numbers of groups of this axis that take part in the gather to the owner, and in the scatter
    # from the owner.
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

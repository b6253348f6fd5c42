"""Bytes that the optimizer sends per update, from shapes: `predict_updates`.

AdamW, Adam and SGD do not communicate. Muon sends each matrix to one rank, its owner, and the
result to all ranks (`owner_bytes`). For a custom optimizer the bytes are unknown and not included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from parallel2d.parallel.parallelize.layout import Layout

_MUON_ITEM = 2  # matrices and results are sent in bf16


def predict_updates(layout: Layout) -> dict[str, float]:
    """Return ``{axis: bytes}`` that a rank sends per update, averaged over the ranks.

    Empty if the optimizer does not communicate.
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
                # The tensor axis comes first, because FSDP shards the local tensors of tensor
                # parallelism.
                axes = [("tensor", shape.tensor, parameter.tensor_dim), *rows]
                for axis, size in owner_bytes(parameter.whole, axes).items():
                    found[axis] += count * size
    return found


def owner_bytes(
    shape: Sequence[int], axes: Sequence[tuple[str, int, int | None]]
) -> dict[str, float]:
    """Return the bytes over each axis to send one matrix to its owner and the result to all ranks.

    The bytes are an average over the ranks. See [Note: one owner per matrix] in
    `optimizer/matrix_owners.py`.

    Args:
        shape: shape of the unsharded matrix.
        axes: (name, number of ranks, sharded dim), innermost first; the dim is None for axes over
            which the matrix is replicated.
    """
    ranks = math.prod(size for _, size, _ in axes)
    part = list(shape)
    # Number of groups along the axis that take part in the gather to the owner, and in the scatter
    # from the owner
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

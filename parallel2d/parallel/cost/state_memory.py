"""Bytes of what a rank keeps from step to step: parameters, gradients, optimizer state, buffers.

`state_bytes` computes those of the fullest rank ([Note: the fullest rank] in `model_shapes.py`)
from shapes alone. Activations, gathered parameters and memory of collectives are not in them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from parallel2d.base.config import OptimizerConfig
from parallel2d.parallel.cost.layout import Layout
from parallel2d.parallel.cost.model_shapes import ModelShapes, ParameterShape, first_part

_STEP_BYTES = 4  # torch's optimizers count the steps of each parameter in an fp32 tensor


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank, when gradients are there and before they are dropped.

    ``masters``: with ``hybrid_full`` and ``sync.wire=bf16``, the unrounded rows that this replica
    updates. ``outer``: with ``sync=diloco``, the parameters that replicas share, their momentum and
    what was not sent yet. With ``cpu_offload`` parameters, gradients, optimizer state and outer
    parameters are in the memory of the host.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    outer: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def state_bytes(layout: Layout) -> StateBytes:
    """What the fullest rank keeps.

    Every trained parameter is taken to have a gradient, and the optimizer to have made a step: one
    that no rank ever uses has neither.
    """
    shape, method = layout.shape, layout.method
    parameters = masters = gradients = state = outer = 0
    for parameter, count, is_split in _parameters(layout.shapes):
        held = updated = parameter.shape
        if is_split:
            held = updated = first_part(parameter.shape, shape.shard)
            if layout.splits_updates:
                updated = first_part(held, shape.replicate)
        parameters += count * math.prod(held) * parameter.stored
        if not parameter.is_trained:
            continue
        if method.keeps_masters and is_split:
            masters += count * math.prod(updated) * parameter.stored
        gradients += count * math.prod(updated) * parameter.gradient
        state += count * _optimizer_bytes(updated, parameter, layout.optimizer)
        outer += count * method.shared_copies * math.prod(held) * parameter.sum_itemsize
    return StateBytes(parameters, masters, gradients, state, outer, layout.shapes.buffer_bytes)


def _parameters(shapes: ModelShapes) -> Iterator[tuple[ParameterShape, int, bool]]:
    """(parameter, how many are equal to it, whether axes split it)."""
    for group, count in shapes.groups:
        for parameter in group:
            yield parameter, count, True
    for scalar in shapes.scalars:
        yield scalar, 1, False


def _optimizer_bytes(
    updated: tuple[int, ...], parameter: ParameterShape, optimizer: OptimizerConfig
) -> int:
    """Bytes of the state of one parameter, of which this rank updates a part of this shape."""
    numel = math.prod(updated)
    if optimizer.name == "sgd":
        # The first gradient is copied, in its own dtype.
        return numel * parameter.gradient if optimizer.momentum else 0
    if optimizer.name == "adafactor":
        return _STEP_BYTES + _adafactor_numel(updated) * parameter.stored
    if optimizer.name == "muon" and parameter.by_muon:
        return numel * parameter.gradient
    # Adam, AdamW, and what Muon leaves to AdamW: two moments, or three.
    moments = 2
    if optimizer.amsgrad and optimizer.name != "muon":
        moments = 3
    return _STEP_BYTES + moments * numel * parameter.stored


def _adafactor_numel(updated: tuple[int, ...]) -> int:
    """Elements of the row and the column statistics, or of the variance of a vector."""
    if len(updated) < 2:
        return math.prod(updated)
    *batch, rows, columns = updated
    return math.prod(batch) * (rows + columns)

"""Bytes of the persistent state of a rank: parameters, gradients, optimizer state, buffers.

`state_bytes` computes these bytes from shapes, for the peak-memory rank
([Note: the peak-memory rank] in `layout.py`). Activations, unsharded parameters and buffers of
collectives are not included.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from parallel2d.base.config import OptimizerConfig
from parallel2d.parallel.parallelize.layout import Layout, ParameterShape, first_part
from parallel2d.parallel.sync.methods.error_feedback import stored_bytes
from parallel2d.parallel.sync.methods.owned_parameters import owned_shapes
from parallel2d.parallel.weights.geometry import scales_shape

_STEP_BYTES = 4  # torch's optimizers store the step count of each parameter in an fp32 tensor


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the state of one rank at a time when gradients exist.

    With ``cpu_offload`` parameters, gradients, optimizer state and outer parameters are in the
    memory of the host.
    """

    parameters: int
    masters: int  # hybrid_full with rounding: unrounded rows of this replica, and a rounded copy
    gradients: int
    optimizer: int
    outer: int  # diloco: outer parameters, momentum, error feedback; train.ema: EMA weights
    residuals: int  # sync=every_step with sync.wire=int4: error feedback
    buffers: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def state_bytes(layout: Layout) -> StateBytes:
    """Return the bytes of the peak-memory rank.

    Assumes that every trained parameter has a gradient, and that the optimizer has made a step.
    """
    shape, method = layout.shape.sharding, layout.method
    parameters = masters = gradients = state = outer = residuals = 0
    replicated = [(group, 1, 1) for group in layout.replicated]
    sharded = [(group, count, shape.shard) for group, count in layout.equal_groups]
    for group, count, ranks in [*sharded, *replicated, (layout.whole, 1, 1)]:
        is_split = group is not layout.whole
        for parameter in group:
            held = updated = parameter.shape
            if is_split:
                held = updated = first_part(parameter.shape, ranks)
            if is_split and layout.method.splits_updates:
                updated = first_part(held, shape.replicate)
            parameters += count * math.prod(held) * parameter.stored
            if not parameter.is_trained:
                continue
            if method.keeps_masters and is_split:
                masters += 2 * count * math.prod(updated) * parameter.stored
            gradients += count * math.prod(updated) * parameter.gradient
            state += count * _optimizer_bytes(updated, parameter, layout.workload.optimizer)
            copies = method.shared_copies + layout.workload.average
            outer += count * copies * math.prod(held) * parameter.sum_itemsize
            if method.has_error_feedback and parameter.is_hidden:
                owners = shape.replicate if method.splits_updates else 1
                residuals += count * sum(map(stored_bytes, owned_shapes([held], owners)))
    return StateBytes(parameters, masters, gradients, state, outer, residuals, layout.buffer_bytes)


def _optimizer_bytes(
    updated: tuple[int, ...], parameter: ParameterShape, optimizer: OptimizerConfig
) -> int:
    """Return the bytes of the optimizer state of one parameter.

    ``updated`` is the shape of the part of the parameter that this rank updates.
    """
    numel = math.prod(updated)
    if optimizer.state_dtype != "fp32" and len(updated) > 1:
        moments = 1 if optimizer.name == "sgd" else 2
        bytes_each = 2 * numel
        if optimizer.state_dtype == "int8":
            bytes_each = numel + 4 * math.prod(scales_shape(updated))
        return _STEP_BYTES + moments * bytes_each
    match optimizer.name:
        # The momentum buffer is a copy of the first gradient and has its dtype.
        case "sgd":
            return numel * parameter.gradient if optimizer.momentum else 0
        case "muon" if parameter.by_muon:
            return numel * parameter.gradient
        # The state of a custom optimizer is unknown; the plan command reports this.
        case "custom":
            return 0
    # Adam, AdamW, and Muon's AdamW parameters: two moments, or three.
    moments = 3 if optimizer.amsgrad and optimizer.name != "muon" else 2
    return _STEP_BYTES + moments * numel * parameter.stored

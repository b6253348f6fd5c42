"""How far a parallel run may be from one process, from the dtypes alone: `Bounds`.

Where ranks run the same kernels as one process (no tensor axis, no compiler, no 8-bit floats),
their contributions are equal but for the order of sums inside kernels, and what is left is the
rounding of the sums over ranks. Elsewhere partial sums are rounded to the dtype that computes.
"""

from __future__ import annotations

import torch

from parallel2d.instruments.certification.expected_run import Subject
from parallel2d.parallel.parallelize.precision import DTYPES
from parallel2d.training.optimizer import Muon

# What one more rounding costs in the 2-norm of a tensor, in units of the dtype's eps
_ROUNDINGS = 64


class Bounds:
    """Relative errors that are let through in ``subject``."""

    def __init__(self, subject: Subject) -> None:
        config, precision = subject.config, subject.config.precision
        param, reduce = DTYPES[precision.param], DTYPES[precision.reduce]
        storage = DTYPES[precision.storage]
        in_8_bits = precision.float8 != "none"
        same_kernels = config.compile.name == "none" and subject.shape.tensor == 1 and not in_8_bits
        computed = 0.2
        if not in_8_bits:
            computed = _computed(param, same_kernels, subject.mesh.device_type)
        rounding = _ROUNDINGS * torch.finfo(torch.promote_types(storage, torch.float32)).eps
        sent = torch.finfo(reduce).eps * (2 + subject.shape.shard) if reduce.itemsize < 4 else 0.0
        wire = subject.method.named_wire
        coded = wire.bound[0 if same_kernels else 1] if wire is not None else 0.0
        self.loss = (computed + rounding) / 8
        self.gradient = computed + sent + rounding  # of the mean norm of the contributions
        self.norm = rounding / 4
        # Of the update, and 4 units in the last place of the parameter. Muon multiplies in bf16, in
        # another order where a matrix is split.
        self.update = 0.05 if isinstance(subject.optimizer, Muon) else 200 * rounding
        if subject.method.replicas_equal:
            self.gradient += coded
        else:
            self.update += coded
        # An error is measured by this share of what a parameter of its size has on average, at
        # least: some gradients are zero but for rounding.
        self.least_share = 1e-4 if same_kernels else 1e-2


def _computed(param: torch.dtype, same_kernels: bool, device_type: str) -> float:
    """What computing in ``param`` may cost."""
    eps = torch.finfo(param).eps
    if not same_kernels:
        return 1000 * eps if param.itemsize >= 4 else 24 * eps
    if device_type == "cpu":
        # Equal to the bit, but for the order of sums over micro-batches
        return 32 * min(eps, torch.finfo(torch.float32).eps)
    # Some kernels of GPUs add in an order that changes from call to call.
    return 32 * eps if param.itemsize >= 4 else eps / 4

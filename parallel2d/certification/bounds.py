"""How far a parallel run may be from one process, from the dtypes alone: `Bounds`.

Where ranks run the same kernels as one process (no tensor axis, no compiler, no 8-bit floats),
their contributions are equal but for the order of sums inside kernels, and what is left is the
rounding of the sums over ranks. Elsewhere partial sums are rounded to the dtype that computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallel2d.config import ParallelConfig
from parallel2d.mesh import MeshShape
from parallel2d.optimizer import Muon
from parallel2d.parallelize.precision import DTYPES

# What one more rounding costs in the 2-norm of a tensor, in units of the dtype's eps
_ROUNDINGS = 64
# Of the blocks of a code: how often another rounding of a sum changes a whole unit. The first
# number where ranks run the kernels of one process
_WIRES = {
    "auto": (0.0, 0.0),
    "fp32": (0.0, 0.0),
    "bf16": (2e-4, 1e-3),
    "int8": (8e-4, 4e-3),
    "int4": (5e-3, 3e-2),
    "sparse": (1e-2, 3e-2),
}


@dataclass(frozen=True)
class Bounds:
    """Relative errors that are let through. ``words``: where they come from."""

    loss: float
    outputs: float  # norms of what modules return
    gradient: float
    norm: float
    update: float
    outer: float  # of what arrives in an outer step
    same_kernels: bool  # on the ranks and in one process
    # An error is measured by this share of what a parameter of its size has on average, at least:
    # some gradients are zero but for rounding
    least_share: float
    narrow: tuple[torch.dtype, ...]  # that a sum could have been rounded to by mistake
    rounds_gradients: bool  # the policy itself rounds them to fewer than 32 bits
    gathers_bf16: bool  # updated parameters, with split updates
    words: dict[str, str]

    @classmethod
    def of(
        cls,
        config: ParallelConfig,
        shape: MeshShape,
        optimizer: torch.optim.Optimizer,
        device_type: str,
    ) -> Bounds:
        """For ``config`` on a mesh of ``shape``."""
        precision = config.precision
        param, storage = DTYPES[precision.param], DTYPES[precision.storage]
        reduce = DTYPES[precision.reduce]
        sums = torch.promote_types(storage, torch.float32)
        same_kernels = shape.tensor == 1 and config.compile.name == "none"
        same_kernels = same_kernels and precision.float8 == "none"
        compute = _compute_bound(param, same_kernels, device_type)
        if precision.float8 != "none":
            compute = max(compute, 0.2)
        sent = torch.finfo(reduce).eps * (2 + shape.shard) if reduce.itemsize < 4 else 0.0
        wire = _WIRES[config.sync.wire][0 if same_kernels else 1]
        rounding = _ROUNDINGS * torch.finfo(sums).eps
        gradient = compute + sent + rounding + (wire if config.sync.name == "every_step" else 0.0)
        # Muon multiplies in bf16, in another order where a matrix is split.
        update = 0.05 if isinstance(optimizer, Muon) else 200 * rounding
        words = {
            "gradient": f"{gradient:.1e}: kernels {compute:.1e}, sums in {sums} {rounding:.1e}, "
            f"sent in {reduce} {sent:.1e}, sync.wire={config.sync.wire} {wire:.1e}; in units of "
            "the norm of the contributions' magnitudes",
            "update": f"{update:.1e} of the update's norm, and 4 units in the last place",
            "loss": f"{(compute + rounding) / 8:.1e}",
        }
        return cls(
            loss=(compute + rounding) / 8,
            outputs=compute + rounding,
            gradient=gradient,
            norm=16 * torch.finfo(sums).eps,
            update=update,
            outer=update + wire,
            same_kernels=same_kernels,
            least_share=1e-4 if same_kernels else 1e-2,
            # Only where something is in float16 could a sum have been rounded to it.
            narrow=tuple({torch.bfloat16, *{torch.float16}.intersection((param, reduce))}),
            rounds_gradients=_rounds_gradients(config),
            gathers_bf16=config.sync.wire == "bf16",
            words=words,
        )


def _rounds_gradients(config: ParallelConfig) -> bool:
    precision = config.precision
    if config.sync.wire not in ("auto", "fp32") or precision.keep_low_precision_gradients:
        return True
    return min(DTYPES[precision.reduce].itemsize, DTYPES[precision.storage].itemsize) < 4


def _compute_bound(param: torch.dtype, same_kernels: bool, device_type: str) -> float:
    eps = torch.finfo(param).eps
    if same_kernels and device_type == "cpu":
        # Equal to the bit, but for the order of sums over micro-batches
        return 32 * min(eps, torch.finfo(torch.float32).eps)
    if same_kernels:
        # Some kernels of GPUs add in an order that changes from call to call.
        return 32 * eps if param.itemsize >= 4 else eps / 4
    return 1000 * eps if param.itemsize >= 4 else 24 * eps

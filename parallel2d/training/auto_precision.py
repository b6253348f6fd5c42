"""The dtype for ``precision=auto``, chosen for the device: `resolved`.

Training, the planner and the parity check call `resolved` once, on the composed configuration, so
that later code never sees ``auto``. On a CPU the result is fp32. (``compile=auto`` is resolved
later, because it depends on the blocks in the layout.)
"""

from __future__ import annotations

import dataclasses

from parallel2d.base.config import PRECISIONS, TrainConfig
from parallel2d.base.config.parallel import AUTOMATIC
from parallel2d.base.device import accelerator_type, has_fast_bf16
from parallel2d.base.exchange import all_gather


def resolved(config: TrainConfig, *, fast_bf16: bool) -> TrainConfig:
    """Return ``config`` with a concrete precision in place of ``auto``: bf16 with gradient
    reduction in fp32 if ``fast_bf16``, otherwise fp32. If the user has changed
    ``precision.storage`` or ``precision.param``, the name becomes fp32 and these keys keep their
    values.

    Args:
        fast_bf16: True if all devices compute matrix products in bf16 faster than in fp32.
    """
    precision = config.precision
    if precision.name != AUTOMATIC:
        return config
    name, param = "fp32", precision.param
    if fast_bf16 and (precision.storage, param) == ("fp32", "fp32"):
        name, param = "bf16", PRECISIONS["bf16"].param
    return dataclasses.replace(
        config, precision=dataclasses.replace(precision, name=name, param=param)
    )


def resolved_here(config: TrainConfig) -> TrainConfig:
    """Return `resolved` for the accelerator of this process, or for the CPU if it has no
    accelerator."""
    return resolved(config, fast_bf16=has_fast_bf16(accelerator_type()))


def resolved_on_ranks(config: TrainConfig) -> TrainConfig:
    """Return `resolved` for the accelerators of all ranks, with the same result on each rank.
    Collective."""
    return resolved(config, fast_bf16=all(all_gather(has_fast_bf16(accelerator_type()))))


def resolved_for_plan(config: TrainConfig) -> TrainConfig:
    """Return `resolved` for the devices of ``cluster``; for the devices of this machine if
    ``cluster`` does not name its devices."""
    device = config.cluster.device
    if device.type == "auto":
        return resolved_here(config)
    return resolved(config, fast_bf16=device.type != "cpu" and device.peak_tflops.bf16 is not None)

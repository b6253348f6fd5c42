"""`derived` computes values that are written only to TensorBoard. `description` returns the meaning
and unit of each tag."""

from __future__ import annotations

import re
from collections.abc import Mapping

from parallel2d.base.config import AXES
from parallel2d.training.metrics import keys

# Quantity -> (tag in the folder of an axis, factor from the quantity's unit to the tag's unit)
OF_AN_AXIS = {
    "bytes": ("axis/megabytes", 1e-6),
    "seconds": ("axis/seconds", 1.0),
    "exposed_seconds": ("axis/exposed_seconds", 1.0),
    "calls": ("axis/calls", 1.0),
}
percent_key = "time_percent/{}".format  # of a step, by phase
BYTES_BETWEEN_HOSTS_PER_S = "comm/between_hosts/bytes_per_s"
PERCENT_OF_DEVICE = "memory/percent_of_device"

_DESCRIPTIONS = {
    keys.LOSS: "Mean over the valid tokens of the global batch, nats",
    "validation/.*loss": "Mean over the valid tokens of the validation batches, nats",
    keys.GRAD_NORM: "Norm of the gradient before clipping",
    keys.LEARNING_RATE: "Learning rate of the step",
    keys.TOKENS: "Valid targets so far, over all ranks",
    keys.SAMPLES: "Samples so far, over all ranks",
    keys.PADDING: "Share of positions without a token, in the global batch of fitted documents",
    keys.IMBALANCE: "Estimated FLOPs of the busiest rank, divided by the mean over ranks",
    keys.BATCH_HASH: "Sum of the hashes of the samples of the step",
    keys.SKIPPED_STEPS: "Steps so far without an update, because a gradient was not finite",
    keys.STEP_S: "Seconds per step, mean since the last row",
    keys.FIRST_STEP_S: "Seconds of the first step of a process, compilation included",
    "time/(checkpoint|validation|hooks)_s": "Seconds after a step, not part of time/step_s",
    "time/.*_s": "Seconds of this part of a step, mean since the last row",
    percent_key(".*"): "Percent of time/step_s",
    keys.TOKENS_PER_S: "Input tokens per second, over all ranks",
    keys.TOKENS_PER_S_PER_RANK: "Input tokens per second and rank",
    keys.MODEL_TFLOPS_PER_RANK: "TFLOP/s of the model per rank, without recomputation",
    keys.MFU: "FLOP/s of the model, divided by the peak FLOP/s of the device",
    keys.BYTES_BETWEEN_HOSTS: "Bytes that a rank sends between nodes in a step, mean over ranks",
    BYTES_BETWEEN_HOSTS_PER_S: "Bytes that a rank sends between nodes per second, mean over ranks",
    "comm/.*/bytes": "Bytes that a rank sends over the axis in a step, mean over ranks",
    "comm/.*/calls": "Collectives over the axis in a step",
    "comm/.*/exposed_seconds": "Seconds per step of collectives that do not overlap with compute",
    "comm/.*/seconds": "Seconds per step in collectives over the axis",
    "axis/megabytes": "MB that a rank sends over the axis in a step, mean over ranks",
    "axis/calls": "Collectives over the axis in a step",
    "axis/exposed_seconds": "Seconds per step of collectives that do not overlap with compute",
    "axis/seconds": "Seconds per step in collectives over the axis",
    PERCENT_OF_DEVICE: "Percent of the device's memory at the peak, largest rank",
    keys.FRAGMENTATION: "Fraction of reserved memory that is not allocated, largest rank",
    keys.ALLOCATION_RETRIES: "Times that the allocator emptied its cache, largest rank",
    "memory/.*_gib": "GiB, largest rank; rss: of the process, others: of the device",
    keys.SLOWEST_RANK: "Number of the rank that was busy longest",
    keys.SKEW: "Busy seconds of the slowest rank, divided by the mean",
    keys.BUSY_S: "Busy seconds of every rank in the previous step",
    keys.REPLICAS: "Replicas that are alive",
    keys.REPLICAS_LOST_S: "Seconds lost to failures and joins of replicas, so far",
    "replicas/.*": "Number so far, since the last start of all ranks",
    keys.COMPRESSION: "Bytes of exact fp32 gradients, divided by the bytes sent over replicas",
    keys.OUTER_NORM: "Norm of the weight change in the last outer step",
    keys.GOODPUT: "Useful seconds, divided by the seconds since the run first began",
    keys.UNIX_S: "Seconds since 1970",
    "goodput/.*_s": "Seconds since the run first began",
}


def description(tag: str) -> str:
    """Return the meaning of ``tag``, with the unit of its values."""
    found = (text for each, text in _DESCRIPTIONS.items() if re.fullmatch(each, tag))
    return next(found, "Metric of a hook")


def derived(scalars: Mapping[str, float], device_gib: float | None) -> dict[str, float]:
    """Return further values for TensorBoard, computed from the values of a row. ``device_gib``: the
    memory of a rank's device; None without a device."""
    found: dict[str, float] = {}
    step_s = scalars.get(keys.STEP_S)
    if step_s:
        for phase in keys.PHASES:
            seconds = scalars.get(keys.time_key(f"{phase}_s"))
            if seconds is not None:
                found[percent_key(phase)] = 100 * seconds / step_s
        if keys.BYTES_BETWEEN_HOSTS in scalars:
            found[BYTES_BETWEEN_HOSTS_PER_S] = scalars[keys.BYTES_BETWEEN_HOSTS] / step_s
    if device_gib and keys.PEAK_GIB in scalars:
        found[PERCENT_OF_DEVICE] = 100 * scalars[keys.PEAK_GIB] / device_gib
    return found


def of_axis(axis: str, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the measurements of ``axis`` by the tags that are the same for all axes. Empty for the
    first row of a process, which has no such measurements."""
    moved: dict[str, float] = {}
    for quantity, (tag, scale) in OF_AN_AXIS.items():
        key = keys.communication_key(axis, quantity)
        if key in scalars:
            moved[tag] = scale * scalars[key]
    return moved


def of_one_rank(axes: tuple[str, ...]) -> set[str]:
    """Return the tags of all axes of size 1. ``axes``: the axes with more than one rank."""
    single = []
    for axis in AXES:
        if axis not in axes:
            single.append(axis)
    found: set[str] = set()
    for axis in single:
        for quantity in keys.QUANTITIES:
            found.add(keys.communication_key(axis, quantity))
    return found

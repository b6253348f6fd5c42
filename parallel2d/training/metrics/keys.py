"""TensorBoard tags of all measurements, which are also the keys of the rows in ``metrics.jsonl``.
This module does not import torch, because reports do not need torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from parallel2d.base.config import AXES

# OUTER_NORM: norm of the weight change in the last outer step, with sync=diloco. COMPRESSION: bytes
# of exact fp32 gradients, divided by the bytes sent over the replicate axis since the process began
OUTER_NORM = "sync/outer_norm"
COMPRESSION = "sync/compression"

# Progress and quality of training. SEGMENT: number of the start in `segments.jsonl`
STEP = "step"
SEGMENT = "segment"
LOSS = "loss"
VALIDATION_LOSS = "validation/loss"  # of the held-out part of the training data
GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"
TOKENS = "tokens"
SAMPLES = "samples"
BATCH_HASH = "data/batch_hash"
PADDING, IMBALANCE = "data/padding", "data/imbalance"  # only with data.packing=fitted
SKIPPED_STEPS = "skipped_steps"
set_loss_key = "validation/{}/loss".format  # for a named data set of ``data.validation``
_SET_LOSS = re.compile(set_loss_key("(.+)"))


def of_batch(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a global batch by key."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        found[f"data/{name}"] = value
    return found


def set_losses(row: Mapping[str, float]) -> dict[str, float]:
    """Return the losses of the data sets of ``data.validation`` in ``row``, by name."""
    found = filter(None, map(_SET_LOSS.fullmatch, row))
    losses: dict[str, float] = {}
    for match in found:
        losses[match[1]] = row[match[0]]
    return losses


# Seconds of a step, averaged over the steps since the previous row. The first step of a process has
# a separate key and is not part of an average.
PHASES = ("forward_backward", "data", "sync", "optimizer")  # as `Trainer.step` marks them
STEP_S = "time/step_s"
FIRST_STEP_S = "time/first_step_s"
time_key = "time/{}".format  # for the name of a duration, such as ``data_s``

# Traffic per rank and step over each mesh axis, averaged over ranks and steps
QUANTITIES = ("bytes", "calls", "seconds", "exposed_seconds")
BYTES_BETWEEN_HOSTS = "comm/between_hosts/bytes"
communication_key = "comm/{}/{}".format  # for an axis and one of ``QUANTITIES``
COMMUNICATION_KEYS = tuple(
    communication_key(axis, quantity) for axis in AXES for quantity in QUANTITIES
)
COMMUNICATION_SECONDS = tuple(communication_key(axis, "seconds") for axis in AXES)

# Tokens are the input tokens of the global batch, or its samples if the data are not text. FLOPs
# are the FLOPs of the model without recomputation
TOKENS_PER_S = "throughput/tokens_per_s"
TOKENS_PER_S_PER_RANK = "throughput/tokens_per_s_per_rank"
MODEL_TFLOPS_PER_RANK = "throughput/model_tflops_per_rank"
MFU = "throughput/mfu"

# Largest memory of any rank. RSS: of the process; the other keys: of the device
PEAK_RSS_GIB = "memory/peak_rss_gib"
RSS_GIB = "memory/rss_gib"
PEAK_GIB = "memory/peak_gib"
ALLOCATED_GIB = "memory/allocated_gib"
RESERVED_GIB = "memory/reserved_gib"
FRAGMENTATION = "memory/fragmentation"
ALLOCATION_RETRIES = "memory/allocation_retries"

# The rank with the longest busy time in the previous step, and the ratio of this time to the mean
# of all ranks
SLOWEST_RANK = "rank/slowest"
SKEW = "rank/skew"
BUSY_S = "rank/busy_s"  # of every rank: a histogram in TensorBoard, not part of a row

# REPLICAS: live replicas. The others are totals since all replicas last started together.
# REPLICAS_JOINED: replicas that joined. REPEATED_SAMPLES: samples that were computed again.
# REPLICAS_LOST_S: seconds lost to failures and joins. LEFT_OUT_STEPS: steps of failed replicas that
# never reached the other replicas
REPLICAS = "replicas/present"
REPLICAS_JOINED = "replicas/joined"
REPEATED_SAMPLES = "replicas/repeated_samples"
REPLICAS_LOST_S = "replicas/lost_s"
LEFT_OUT_STEPS = "replicas/left_out_steps"

# Totals since the first start of the run
GOODPUT = "goodput/fraction"
USEFUL_S = "goodput/useful_s"
WALL_S = "goodput/wall_s"
UNIX_S = "goodput/unix_s"
LOSSES = ("first_step", "data", "checkpoint", "validation", "restart", "repeated", "replicas")
lost_key = "goodput/lost_{}_s".format  # for one of ``LOSSES``

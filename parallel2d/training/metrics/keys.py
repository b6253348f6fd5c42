"""Names of what a run measures: the keys of the rows in ``metrics.jsonl``, which are the tags in
TensorBoard too. Does not load torch, so that reports are made without it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from parallel2d.base.config import AXES

# Norm of the change that replicas shared last, with sync=diloco; and how many times fewer bytes
# crossed the replicate axis since the process began than exact fp32 gradients would have taken
OUTER_NORM = "sync/outer_norm"
COMPRESSION = "sync/compression"

# How far training is, and how well it goes. A segment is a start of the run: `segments.jsonl`
STEP = "step"
SEGMENT = "segment"
LOSS = "loss"
VALIDATION_LOSS = "validation/loss"  # of the held-out part of the training data
GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"
TOKENS = "tokens"
SAMPLES = "samples"
BATCH_HASH = "data/batch_hash"
SKIPPED_STEPS = "skipped_steps"
set_loss_key = "validation/{}/loss".format  # of a set of ``data.validation`` by its name
_SET_LOSS = re.compile(set_loss_key("(.+)"))


def set_losses(row: Mapping[str, float]) -> dict[str, float]:
    """By name, the losses of sets of ``data.validation`` that ``row`` holds."""
    found = filter(None, map(_SET_LOSS.fullmatch, row))
    return {match[1]: row[match[0]] for match in found}


# Seconds of a step: the mean over the steps since the row before. The first step of a process has
# a key of its own and counts in no mean.
PHASES = ("forward_backward", "data", "sync", "optimizer")  # as `Trainer.step` marks them
STEP_S = "time/step_s"
FIRST_STEP_S = "time/first_step_s"
time_key = "time/{}".format  # of seconds by their name, such as ``data_s``

# What a rank sends over each axis of the mesh in a step: the mean over ranks and steps
QUANTITIES = ("bytes", "calls", "seconds", "exposed_seconds")
BYTES_BETWEEN_HOSTS = "comm/between_hosts/bytes"
communication_key = "comm/{}/{}".format  # of an axis and one of ``QUANTITIES``
COMMUNICATION_KEYS = tuple(
    communication_key(axis, quantity) for axis in AXES for quantity in QUANTITIES
)
COMMUNICATION_SECONDS = tuple(communication_key(axis, "seconds") for axis in AXES)

# Tokens count as targets of a global batch, or images; FLOPs are the model's, without recomputation
TOKENS_PER_S = "throughput/tokens_per_s"
TOKENS_PER_S_PER_RANK = "throughput/tokens_per_s_per_rank"
MODEL_TFLOPS_PER_RANK = "throughput/model_tflops_per_rank"
MFU = "throughput/mfu"

# Memory of the rank that has most: of the process, then of its device
PEAK_RSS_GIB = "memory/peak_rss_gib"
RSS_GIB = "memory/rss_gib"
PEAK_GIB = "memory/peak_gib"
ALLOCATED_GIB = "memory/allocated_gib"
RESERVED_GIB = "memory/reserved_gib"
FRAGMENTATION = "memory/fragmentation"
ALLOCATION_RETRIES = "memory/allocation_retries"

# The rank that was busy longest in the step before, and its busy time over the mean of the ranks
SLOWEST_RANK = "rank/slowest"
SKEW = "rank/skew"
BUSY_S = "rank/busy_s"  # of every rank: a histogram in TensorBoard, in no row

# Replicas that are there; totals since the last start of all: replicas that have come back, samples
# computed again, seconds that the others waited when one was lost
REPLICAS = "replicas/present"
REPLICAS_JOINED = "replicas/joined"
REPEATED_SAMPLES = "replicas/repeated_samples"
REPLICAS_LOST_S = "replicas/lost_s"
LEFT_OUT_STEPS = "replicas/left_out_steps"

# Totals since the run first began
GOODPUT = "goodput/fraction"
USEFUL_S = "goodput/useful_s"
WALL_S = "goodput/wall_s"
UNIX_S = "goodput/unix_s"
LOSSES = ("first_step", "data", "checkpoint", "validation", "restart", "repeated")
lost_key = "goodput/lost_{}_s".format  # of the seconds lost to one of ``LOSSES``

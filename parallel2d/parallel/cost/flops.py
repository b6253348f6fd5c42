"""FLOPs of one training step, counted from the operators of the model on the meta device."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from parallel2d.base.device import name_of
from parallel2d.parallel.cost.equal_blocks import by_blocks
from parallel2d.parallel.cost.meta_copy import ALL_AT_ONCE, LossOfBatch, cast, on_fake_tensors
from parallel2d.parallel.loss import loss_chunks

log = logging.getLogger(__name__)

# Dense bf16 peak of a device in FLOP/s, from data sheets, by a part of the device name in torch.
_PEAK_BF16 = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "V100": 125e12,
}


def count_flops(
    model: nn.Module,
    example: Callable[[str], tuple[Any, Any]],
    loss: LossOfBatch,
) -> int | None:
    """Return the FLOPs of forward and backward of ``loss`` for one sample.

    None if the model cannot run without storage. Recomputation by activation checkpointing is not
    counted (model FLOPs). Only few of equal blocks run; see [Note: few of the equal blocks].

    Args:
        model: the model on meta, without FSDP.
        example: ``example(device)`` returns inputs and targets of one sample.
        loss: the loss of a model, inputs and targets.
    """
    counted = by_blocks(model, functools.partial(_count, example=example, loss=loss))
    if counted is None:
        log.info("the model's FLOPs are not known: it does not run on tensors without storage")
        return None
    return int(counted["flops"])


def _count(
    model: nn.Module,
    example: Callable[[str], tuple[Any, Any]],
    loss: LossOfBatch,
) -> dict[str, float] | None:
    """Return the FLOPs of all blocks of ``model``; None if the model does not run."""
    # Try meta tensors first, which are twice as fast. Some models run only on fake tensors.
    for fake in (False, True):
        try:
            copied = copy.deepcopy(model).to("meta")
            mode = on_fake_tensors(copied, "meta") if fake else nullcontext()
            with mode, loss_chunks(ALL_AT_ONCE), FlopCounterMode(display=False) as counter:
                # FLOPs do not depend on the compute dtype of training.
                dtypes = (each.dtype for each in copied.parameters() if each.is_floating_point())
                inputs, targets = cast(example("meta"), next(dtypes, None))
                loss(copied, inputs, targets).backward()
            return {"flops": counter.get_total_flops()}
        # A model may read values, which meta and fake tensors do not have.
        except Exception:
            continue
    return None


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak FLOP/s of ``device`` for matrix products in ``dtype``; None if unknown."""
    if device.type != "cuda" or dtype not in ("bf16", "fp16"):
        return None
    name = name_of(device)
    return next((peak for part, peak in _PEAK_BF16.items() if part in name), None)

"""What the loop says about itself: where the run stands, and what one step came to. Read by metrics
and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from parallel2d.files import printable

LARGEST_COUNT = 2**53  # whole numbers up to here are exact as floats too
LARGEST_SCALE = 2.0**24  # of a loss


@dataclass
class Progress:
    """Where a run stands: what a checkpoint needs to know beside tensors."""

    step: int = 0  # finished steps
    samples: int = 0  # consumed, over all ranks: the position in the data
    tokens: int = 0  # valid targets consumed, over all ranks
    skipped: int = 0  # steps whose update was left out because something was not finite
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class StepOutcome:
    """One step, as all ranks agree on it."""

    loss: float  # mean over the valid tokens of the global batch
    grad_norm: float
    tokens: int
    batch_hash: int
    finite: bool
    preempted: bool  # some rank was told to save and end
    save_is_due: bool  # by some rank's clock, beside the interval in steps
    ranks: list[list[float]]  # by rank: what `measure_rank` said after the step before


def problems_of_state(state: Mapping[str, Any], step: int) -> list[str]:
    """What is wrong with ``state``, which a checkpoint of ``step`` says `Trainer.state_dict` has
    given it; empty if nothing.

    Numbers must be finite, in range, and possible together.
    """
    problems = [f"{key} is missing" for key in ("scaler", "data_fingerprint") if key not in state]
    for item in fields(Progress):
        value = state.get(item.name)
        if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
            problems.append(
                f"{item.name} is {printable(repr(value), 40)}, no whole number from 0 to 2**53"
            )
    if problems:
        return problems
    if state["step"] != step:
        problems.append(f"step is {state['step']}, and the checkpoint is of step {step}")
    if not state["skipped_in_a_row"] <= state["skipped"] <= state["step"] <= state["samples"]:
        counts = ", ".join(
            f"{name} {state[name]}" for name in ("skipped_in_a_row", "skipped", "step", "samples")
        )
        problems.append(f"its counts contradict each other: {counts}")
    scaler, fingerprint = state["scaler"], state["data_fingerprint"]
    if not isinstance(fingerprint, str) or len(fingerprint) > 1000:
        problems.append("data_fingerprint is no text")
    if not isinstance(scaler, Mapping) or set(scaler) != {"scale", "good_steps"}:
        problems.append("scaler is not scale and good_steps")
    else:
        scale, good = scaler["scale"], scaler["good_steps"]
        if (
            type(scale) not in (int, float)
            or not 1 <= scale <= LARGEST_SCALE
            or not math.isfinite(scale)
        ):
            problems.append(f"scale is {printable(repr(scale), 40)}, no number from 1 to 2**24")
        if type(good) is not int or not 0 <= good <= step:
            problems.append(
                f"good_steps is {printable(repr(good), 40)}, no whole number from 0 to {step}"
            )
    return problems

"""What the loop, the metrics and the checkpoints pass to each other: where a run stands
(`Progress`), what one step came to (`StepOutcome`), what one rank measured (`RankReport`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from parallel2d.best_metric import problems_of_best
from parallel2d.files import is_count, is_number, printable

LARGEST_COUNT = 2**53  # whole numbers up to here are exact as floats too
LARGEST_SCALE = 2.0**24  # of a loss


@dataclass
class Progress:
    """Where a run stands: what a checkpoint needs beside tensors."""

    step: int = 0  # finished steps
    samples: int = 0  # consumed, over all ranks: the position in the data
    tokens: int = 0  # valid targets consumed, over all ranks
    skipped: int = 0  # steps whose update was left out because something was not finite
    skipped_in_a_row: int = 0


# Not frozen: a step makes one for every rank, and a frozen one takes four times as long to make.
@dataclass(slots=True)
class RankReport:
    """What one rank measured in a step. All ranks get it in the agreement of the next step, as a
    list of floats; see [Note: one agreement per step] in `step_agreement.py`."""

    busy_s: float  # in which the rank worked, waits for other ranks left out
    # By the keys of `parallel2d.metrics.keys`, which are the same on every rank
    memory: Mapping[str, float]
    communication: Mapping[str, float]  # empty where it is not measured

    def floats(self) -> list[float]:
        """All numbers, in the same order on every rank."""
        return [self.busy_s, *self.memory.values(), *self.communication.values()]

    def with_floats(self, values: Sequence[float]) -> RankReport:
        """The report of another rank, whose `floats` are ``values``."""
        end = 1 + len(self.memory)
        memory = dict(zip(self.memory, values[1:end], strict=True))
        communication = dict(zip(self.communication, values[end:], strict=True))
        return RankReport(values[0], memory, communication)


@dataclass(frozen=True)
class StepOutcome:
    """One step, as all ranks agree on it."""

    loss: float  # mean over the valid tokens of the global batch
    grad_norm: float  # the mean over the replicas where each has a gradient of its own
    own_norm: float  # of this rank's replica
    outer_norm: float | None  # of the change that the step before has shared; None: it shared none
    tokens: int
    batch_hash: int
    finite: bool
    preempted: bool  # some rank was told to save and end
    save_is_due: bool  # by some rank's clock, beside the interval in steps
    ranks: list[RankReport]  # by rank: what was measured in the step before


def problems_of_state(state: Mapping[str, Any], step: int) -> list[str]:
    """What is wrong with ``state``, which should be a `Trainer.state_dict` after ``step``; empty if
    nothing.

    Numbers must be finite, in range, and possible together.
    """
    problems = [f"{key} is missing" for key in ("scaler", "data_fingerprint") if key not in state]
    for item in fields(Progress):
        value = state.get(item.name)
        if not is_count(value, LARGEST_COUNT):
            problems.append(
                f"{item.name} is {printable(repr(value), 40)}, no whole number from 0 to 2**53"
            )
    if problems:  # the checks below compare these numbers
        return problems
    if state["step"] != step:
        problems.append(f"step is {state['step']}, and the checkpoint is of step {step}")
    if not state["skipped_in_a_row"] <= state["skipped"] <= state["step"] <= state["samples"]:
        names = ("skipped_in_a_row", "skipped", "step", "samples")
        counts = ", ".join(f"{name} {state[name]}" for name in names)
        problems.append(f"its counts contradict each other: {counts}")
    fingerprint = state["data_fingerprint"]
    if not isinstance(fingerprint, str) or len(fingerprint) > 1000:
        problems.append("data_fingerprint is no text")
    problems += _problems_of_scaler(state["scaler"], step)
    # States of earlier versions have neither.
    for key in ("best", "stop"):
        problems += problems_of_best(key, state.get(key), step)
    return problems


def _problems_of_scaler(scaler: Any, step: int) -> list[str]:
    if not isinstance(scaler, Mapping) or set(scaler) != {"scale", "good_steps"}:
        return ["scaler is not scale and good_steps"]
    problems = []
    scale = scaler["scale"]
    if not is_number(scale) or not 1 <= scale <= LARGEST_SCALE:
        problems.append(f"scale is {printable(repr(scale), 40)}, no number from 1 to 2**24")
    good = scaler["good_steps"]
    if not is_count(good, step):
        problems.append(
            f"good_steps is {printable(repr(good), 40)}, no whole number from 0 to {step}"
        )
    return problems

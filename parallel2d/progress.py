"""What the loop says about itself: where the run stands, and what one step came to. Read by metrics and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Where a run stands: what a checkpoint needs to know beside tensors."""

    step: int = 0  # finished steps
    samples: int = 0  # consumed, over all ranks: the position in the data
    tokens: int = 0  # valid targets consumed, over all ranks
    skipped: int = 0  # steps whose update was left out because something was not finite
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Outcome:
    """One step, as all ranks agree on it."""

    loss: float  # mean over the valid tokens of the global batch
    grad_norm: float
    tokens: int
    batch_hash: int
    finite: bool
    preempted: bool  # some rank was told to save and end
    save_is_due: bool  # by some rank's clock, beside the interval in steps
    ranks: list[list[float]]  # by rank: what `measure_rank` said after the step before

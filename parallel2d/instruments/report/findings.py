"""What runs show that somebody should act on: `describe_runs`. The other public functions are the
kinds of sentences; each returns none where the rows do not show it.

[Note: noise] Another program on the same cores slows some steps of a run and not others; what the
layout, the data or a machine causes is there all the time. So waits and slow ranks are named only
where each quarter of the rows shows them, of at least 20 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parallel2d.base import files
from parallel2d.instruments.report.overview import text_of
from parallel2d.instruments.report.runs import (
    LOST,
    NOT_FINITE,
    PHASES,
    WAITS,
    Run,
    host_names,
    parts_of,
    ratio,
)
from parallel2d.training.metrics import keys

EQUAL = 1e-4  # of the loss; up to this, losses of two runs are called equal
WAITED = 0.10  # of a step, from which a wait is named
LOW_GOODPUT = 0.9
SKEWED = 1.2  # times the mean busy time of the ranks
FEWEST_ROWS = 20  # [Note: noise]


def describe_runs(runs: Sequence[Run]) -> list[str]:
    """Sentences on all runs, then on each run, then on each layout of a run."""
    found = equal_losses(runs)
    for run in runs:
        found += broken_steps(run) + low_goodput(run)
    for part in parts_of(*runs):
        found += waits(part) + slow_rank(part)
    return found or ["Nothing that somebody should act on."]


def equal_losses(runs: Sequence[Run]) -> list[str]:
    """Which runs have the losses of the first run, at all steps that they share with it."""
    first, *others = runs
    equal: dict[str, float] = {}
    for other in others:
        shared, ours, theirs = np.intersect1d(
            first[keys.STEP], other[keys.STEP], return_indices=True
        )
        one, two = first[keys.LOSS][ours], other[keys.LOSS][theirs]
        # One shared step, such as the first, shows little.
        if len(shared) > 1 and np.allclose(one, two, rtol=EQUAL, atol=0.0):
            equal[other.name] = float(np.abs(one - two).max())
    if not equal:
        return []
    return [
        f"Losses of {', '.join([first.name, *equal])} are equal at all steps that each shares with "
        f"the first: the largest difference is {max(equal.values()):.2g}."
    ]


def broken_steps(run: Run) -> list[str]:
    """Losses that were not finite, and updates that were skipped."""
    found: list[str] = []
    for step in run.known(NOT_FINITE)[:1]:
        found.append(f"The loss of {run.name} was not finite at step {step:.0f}.")
    skipped = run.last(keys.SKIPPED_STEPS)
    if skipped > 0:
        steps = f"{skipped:.0f} of {run.last(keys.STEP):.0f} steps"
        found.append(f"{run.name} skipped the update of {steps}: something was not finite.")
    return found


def low_goodput(run: Run) -> list[str]:
    """What took most of the wall time that trained nothing."""
    cause, key = max(LOST.items(), key=lambda each: np.nan_to_num(run.last(each[1])))
    goodput, lost = run.last(keys.GOODPUT), run.last(key)
    if not (goodput < LOW_GOODPUT and lost > 0):
        return []
    part = f"{text_of(key, lost)} of {text_of(keys.WALL_S, run.last(keys.WALL_S))}"
    return [f"Goodput of {run.name} is {goodput:.1%}. The largest loss: {cause}, {part}."]


def waits(part: Run) -> list[str]:
    """Data, or axes, that steps wait for. On a CPU a wait for an axis cannot be told from a wait
    for a core, so axes are named on GPUs alone, where device memory is measured."""
    causes = {"waits for data": PHASES["data"]}
    if len(part.known(keys.PEAK_GIB)):
        causes |= WAITS
    timed = part.table[~np.isnan(part[keys.STEP_S])]
    quarters = [replace(part, table=table) for table in np.array_split(timed, 4)]
    found: list[str] = []
    for cause, key in causes.items():
        shares = [ratio(each.mean(key), each.mean(keys.STEP_S)) for each in quarters]
        if len(timed) >= FEWEST_ROWS and min(shares) >= WAITED:
            share = ratio(part.mean(key), part.mean(keys.STEP_S))
            found.append(f"{part.name} {cause} during {share:.0%} of a step.")
    return found


def slow_rank(part: Run) -> list[str]:
    """A rank that in three of four rows was the slowest, by more than ranks usually differ."""
    timed = replace(part, table=part.table[~np.isnan(part[keys.SKEW])])
    is_skewed = timed[keys.SKEW] >= SKEWED
    ranks, counts = np.unique(timed[keys.SLOWEST_RANK][is_skewed], return_counts=True)
    rank = np.append(ranks, -1)[np.append(counts, 0).argmax()]
    is_slow = is_skewed & (timed[keys.SLOWEST_RANK] == rank)
    quarters = np.array_split(is_slow, 4)
    if len(is_slow) < FEWEST_ROWS or min(map(np.mean, quarters)) < 0.75:
        return []
    host = dict(enumerate(host_names(part.layout))).get(rank, "an unknown host")
    skew = np.median(timed[keys.SKEW][is_slow])
    return [
        f"Rank {rank:.0f} on {files.printable(host.split('/')[0], 40)} is slow in {part.name}: in "
        f"{is_slow.mean():.0%} of the rows it was busy longest, {skew:.2f} times as long as the "
        "mean of the ranks. All others wait for it."
    ]

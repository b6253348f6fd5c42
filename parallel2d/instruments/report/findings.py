"""Findings that need action, in one or several runs: `describe_runs`. Each other public function
returns the sentences about one kind of finding, or no sentence if the rows do not show this
finding.

[Note: noise] Another program on the same cores slows only some steps of a run. An effect of the
layout, the data or a machine is permanent. Therefore waits and slow ranks are reported only if a
run has at least 20 rows and each quarter of the rows shows the effect.
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

EQUAL = 1e-4  # largest relative difference of losses that are called equal
WAITED = 0.10  # a wait is reported if it takes at least this share of a step
LOW_GOODPUT = 0.9
SKEWED = 1.2  # a rank is slow if its busy time exceeds the mean of the ranks by this factor
FEWEST_ROWS = 20  # [Note: noise]


def describe_runs(runs: Sequence[Run]) -> list[str]:
    """Return sentences about all runs, then about each run, then about each layout of a run."""
    found = equal_losses(runs)
    for run in runs:
        found += broken_steps(run) + low_goodput(run)
    for part in parts_of(*runs):
        found += waits(part) + slow_rank(part)
    return found or ["No findings that need action."]


def equal_losses(runs: Sequence[Run]) -> list[str]:
    """Return sentences about runs with the first run's losses at all shared steps."""
    first, *others = runs
    equal: dict[str, float] = {}
    for other in others:
        shared, ours, theirs = np.intersect1d(
            first[keys.STEP], other[keys.STEP], return_indices=True
        )
        one, two = first[keys.LOSS][ours], other[keys.LOSS][theirs]
        # A single shared step, such as the first, proves little.
        if len(shared) > 1 and np.allclose(one, two, rtol=EQUAL, atol=0.0):
            equal[other.name] = float(np.abs(one - two).max())
    if not equal:
        return []
    return [
        f"Losses of {', '.join([first.name, *equal])} are equal at all steps that each shares with "
        f"the first: the largest difference is {max(equal.values()):.2g}."
    ]


def broken_steps(run: Run) -> list[str]:
    """Return sentences about non-finite losses and skipped updates."""
    found: list[str] = []
    for step in run.known(NOT_FINITE)[:1]:
        found.append(f"The loss of {run.name} was not finite at step {step:.0f}.")
    skipped = run.last(keys.SKIPPED_STEPS)
    if skipped > 0:
        steps = f"{skipped:.0f} of {run.last(keys.STEP):.0f} steps"
        found.append(f"{run.name} skipped the update of {steps}: something was not finite.")
    return found


def low_goodput(run: Run) -> list[str]:
    """Return a sentence about the largest part of the wall time without training."""
    cause, key = max(LOST.items(), key=lambda each: np.nan_to_num(run.last(each[1])))
    goodput, lost = run.last(keys.GOODPUT), run.last(key)
    if not (goodput < LOW_GOODPUT and lost > 0):
        return []
    part = f"{text_of(key, lost)} of {text_of(keys.WALL_S, run.last(keys.WALL_S))}"
    return [f"Goodput of {run.name} is {goodput:.1%}. The largest loss: {cause}, {part}."]


def waits(part: Run) -> list[str]:
    """Return sentences about waits for data or for a mesh axis. On a CPU a wait for an axis cannot
    be distinguished from a wait for a core, so axes are reported only for GPUs, which have a
    measurement of device memory."""
    causes = {"waits for data": PHASES["data"]}
    if len(part.known(keys.PEAK_GIB)):
        causes |= WAITS
    timed = part.table[~np.isnan(part[keys.STEP_S])]
    found: list[str] = []
    for cause, key in causes.items():
        shares = []
        for table in np.array_split(timed, 4):
            quarter = replace(part, table=table)
            shares.append(ratio(quarter.mean(key), quarter.mean(keys.STEP_S)))
        if len(timed) >= FEWEST_ROWS and min(shares) >= WAITED:
            share = ratio(part.mean(key), part.mean(keys.STEP_S))
            found.append(f"{part.name} {cause} during {share:.0%} of a step.")
    return found


def slow_rank(part: Run) -> list[str]:
    """Return a sentence about a rank that was the slowest in three of four rows, by more than the
    usual difference between ranks."""
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

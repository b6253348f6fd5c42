"""Each kind of sentence of a report: runs that it is true of, and runs that it is not said of."""

import math

import numpy as np
import pytest

from parallel2d.instruments.report import findings
from parallel2d.instruments.report.runs import COLUMNS, NOT_FINITE, Run


def run(name="run", hosts=(), **columns):
    """Write 24 rows with the given columns: one value for all rows, or one for each."""
    table = np.full((24, len(COLUMNS)), math.nan)
    table[:, COLUMNS["step"]] = range(1, 25)
    for key, value in columns.items():
        table[:, COLUMNS[key.replace("__", "/")]] = value
    return Run(name, table, {"strategy": "zero3", "hosts": list(hosts)})


def thinned(given, rows):
    return Run(given.name, given.table[rows], given.layout)


FALLING = [4.0 - 0.1 * step for step in range(24)]
NEAR = [loss + 2e-9 * (step % 2) for step, loss in enumerate(FALLING)]
APART = [loss + 0.25 * (step == 11) for step, loss in enumerate(FALLING)]
BROKEN = [math.nan if step == 11 else loss for step, loss in enumerate(FALLING)]
ONE, OTHER = run("a", loss=FALLING), run("b", loss=NEAR)


def assert_said(sentences, words):
    """One sentence that contains ``words``; none at all where they are empty."""
    if not words:
        assert sentences == []
        return
    assert any(words in sentence for sentence in sentences), sentences


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (
            [ONE, OTHER],
            (
                "Losses of a, b are equal at all steps that each shares with the first: the largest "
                "difference is 2e-09."
            ),
        ),
        ([ONE, run("c", loss=APART), OTHER], "Losses of a, b are equal"),
        ([ONE, thinned(OTHER, slice(0, 9))], "Losses of a, b are equal"),
        ([ONE, run("b", loss=APART)], ""),
        ([ONE, run("b", loss=BROKEN)], ""),
        ([ONE, thinned(OTHER, slice(0, 1))], ""),
        ([thinned(ONE, slice(0, 9)), thinned(OTHER, slice(9, 24))], ""),
        ([ONE], ""),
    ],
)
def test_equal_losses_are_a_finding(runs, words):
    assert_said(findings.equal_losses(runs), words)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {NOT_FINITE: [math.nan] * 7 + [8] + [math.nan] * 16},
            "The loss of run was not finite at step 8.",
        ),
        ({"skipped_steps": [0.0] * 23 + [2.0]}, "run skipped the update of 2 of 24 steps"),
        ({"skipped_steps": 0.0}, ""),
        ({}, ""),
    ],
)
def test_skipped_steps_are_a_finding(columns, words):
    assert_said(findings.broken_steps(run(**columns)), words)


@pytest.mark.parametrize(
    ("fraction", "lost", "words"),
    [
        (
            0.5,
            {"first_step": 3600.0, "data": 20.0},
            "Goodput of run is 50.0%. The largest loss: first step, 1 h of 2 h.",
        ),
        (0.89, {"data": 9.0, "validation": 2.0}, "The largest loss: data, 9 s of 2 h"),
        (0.95, {"data": 5.0}, ""),
        (0.5, {}, ""),
        (math.nan, {"data": 5.0}, ""),
    ],
)
def test_low_goodput_is_a_finding(fraction, lost, words):
    columns = {f"goodput/lost_{cause}_s": seconds for cause, seconds in lost.items()}
    given = run(**columns, goodput__fraction=fraction, goodput__wall_s=7200.0)
    assert_said(findings.low_goodput(given), words)


ONCE = [0.0] * 20 + [2.0] * 4
ON_GPU = {"memory__peak_gib": 10.0}
WAIT = {"comm__shard__exposed_seconds": 0.4}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"time__data_s": 0.2}, "run waits for data during 20% of a step."),
        ({**ON_GPU, **WAIT}, "run waits for shard during 40% of a step."),
        (
            {**ON_GPU, "comm__tensor__exposed_seconds": 0.12},
            "run waits for tensor during 12% of a step.",
        ),
        # Diloco: most steps send nothing, and yet each quarter waits
        (
            {**ON_GPU, "comm__replicate__exposed_seconds": [0.0, 0.0, 0.9] * 8},
            "run waits for replicate during 30% of a step.",
        ),
        ({**ON_GPU, "comm__shard__exposed_seconds": 0.05}, ""),
        # Noise: a third of the time, but only in some rows
        ({**ON_GPU, "comm__shard__exposed_seconds": ONCE}, ""),
        ({"time__data_s": ONCE}, ""),
        # On a CPU this may be waits for a core.
        (WAIT, ""),
        ({}, ""),
    ],
)
def test_exposed_communication_is_a_finding(columns, words):
    given = run(time__step_s=1.0, **columns)
    assert_said(findings.waits(given), words)
    assert findings.waits(thinned(given, slice(0, 12))) == []


@pytest.mark.parametrize(
    ("ranks", "skew", "words"),
    [
        (
            1.0,
            1.5,
            (
                "Rank 1 on b is slow in run: in 100% of the rows it was busy longest, 1.50 times as "
                "long as the mean"
            ),
        ),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 0.0] * 4, 1.2, "Rank 1 on b is slow in run: in 83% of the rows"),
        (2.0, 1.5, "Rank 2 on an unknown host is slow"),
        ([0.0, 1.0] * 12, 1.5, ""),
        (1.0, 1.05, ""),
        # Slow for a while
        (1.0, [1.5] * 18 + [1.0] * 6, ""),
    ],
)
def test_slow_rank_is_a_finding(ranks, skew, words):
    given = run(hosts=["a/1", "b/1"], rank__slowest=ranks, rank__skew=skew)
    assert_said(findings.slow_rank(given), words)
    assert findings.slow_rank(thinned(given, slice(0, 12))) == []


def test_report_lists_all_findings():
    both = [
        run(name, loss=FALLING, skipped_steps=2.0, time__step_s=1.0, time__data_s=0.5)
        for name in "ab"
    ]
    assert [sentence.split()[0] for sentence in findings.describe_runs(both)] == [
        "Losses",
        "a",
        "b",
        "a",
        "b",
    ]
    assert findings.describe_runs([run()]) == ["No findings that need action."]

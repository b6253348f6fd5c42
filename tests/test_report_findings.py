"""Each sentence of a report: three runs that it is true of, and three that it is not said of."""

from __future__ import annotations

import dataclasses

import pytest

from parallel2d.report import findings
from parallel2d.report.overview import tables
from parallel2d.report.runs import NOT_FINITE, Run
from parallel2d.run_directory import Segment

CONFIG = {
    "model": {"dim": 64}, "data": {"path": "corpus"}, "optimizer": {"lr": 0.1}, "scheduler": {"name": "constant"},
    "precision": {"name": "fp32", "reduce": "fp32"}, "sync": {"name": "every_step", "wire": "auto", "during_accumulation": "reduce_scatter_only"},
    "train": {"seed": 0, "global_batch_size": 8, "seq_len": 16, "steps": 40},
}  # fmt: skip


def run(name="run", losses=(), rows=(), config=None, certified=False, restarted=(), **layout):
    """Of 24 equal rows unless ``losses``, or the rows themselves, are given."""
    numbers = [*rows] or [{"loss": loss} for loss in losses] or [{"loss": 1.0}] * 24
    numbers = [{"step": step, "segment": 1, **row} for step, row in enumerate(numbers, 1)]
    config = CONFIG if config is None else config
    given = {"strategy": "zero3", "mesh": {"replicate": 1, "shard": 2, "tensor": 1}, **layout}
    first = Segment(1, 1, False, "today", certified=certified, config=config, layout=given)
    more = [
        dataclasses.replace(first, number=number, restarted=flag)
        for number, flag in enumerate(restarted, 2)
    ]
    return Run(name, f"/{name}", numbers, given, {}, (first, *more))


def late(name, losses, first):
    """With rows from step ``first`` on alone."""
    whole = run(name, losses)
    return dataclasses.replace(whole, rows=whole.rows[first - 1 :])


def with_config(**changed):
    return {**CONFIG, **changed}


FALLING = [4.0 - 0.1 * step for step in range(30)]
NEAR = [loss + 2e-9 * (step % 2) for step, loss in enumerate(FALLING)]
APART = [loss + 0.25 * (step == 11) for step, loss in enumerate(FALLING)]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([run("a", FALLING), run("b", NEAR)], "Losses of 2 runs (a, b) are equal within 2e-9, at all 30 steps"),
        ([run("a", FALLING), run("b", NEAR), run("c", FALLING)], "Losses of 3 runs (a, b, c) are equal within 2e-9"),
        ([run("a", FALLING), run("b", FALLING[:9]), run("c", APART)], "Losses of 2 runs (a, b) are equal to the last digit, at all 9 steps"),
        ([run("a", FALLING), run("b", APART)], ""),
        ([run("a", FALLING)], ""),
        ([run("a", FALLING), run("b", FALLING[:1])], ""),
        # Both agree with the first, but share no step with each other.
        ([run("a", FALLING), run("b", FALLING[:9]), late("c", FALLING, 20)], ""),
    ],
)  # fmt: skip
def test_equal_losses(runs, words):
    assert_said(findings.equal_losses(runs), words)


def assert_said(sentences, words):
    """One sentence that begins with ``words`` or contains them; none at all where they are empty."""
    if not words:
        assert sentences == []
        return
    assert any(words in sentence for sentence in sentences), sentences


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([run("a", FALLING), run("b", APART)], "Losses of a and b differ by up to 0.25, from step 12 on"),
        ([run("a", FALLING), run("b", [loss + 0.5 for loss in FALLING])], "by up to 0.5, from step 1 on"),
        ([run("a", FALLING), run("b", FALLING), run("c", APART)], "Losses of a and c differ"),
        ([run("a", FALLING), run("b", NEAR)], ""),
        ([run("a", FALLING), run("b", APART, config=with_config(optimizer={"lr": 0.2}))], ""),
        # Not known of older runs
        ([run("a", FALLING), dataclasses.replace(run("b", APART), segments=())], ""),
    ],
)  # fmt: skip
def test_different_losses(runs, words):
    assert_said(findings.different_losses(runs), words)


def test_a_run_whose_settings_changed_is_not_expected_to_be_equal():
    changed = run("b", APART, restarted=[False])
    longer = with_config(train={**CONFIG["train"], "steps": 80})
    second = dataclasses.replace(changed.segments[1], config=longer)
    changed = dataclasses.replace(changed, segments=(changed.segments[0], second))
    assert findings.different_losses([run("a", FALLING), changed]) == []


def speed(name, *values, **layout):
    return run(name, rows=[{"throughput/tokens_per_s": value} for value in values], **layout)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([speed("a", *[100.0] * 6), speed("b", *[150.0] * 6)], "b (zero3) trains 1.50 times as many tokens per second as a (zero3)"),
        ([speed("a", *[110.0] * 6), speed("b", *[100.0] * 6), speed("c", *[105.0] * 6)], "a (zero3) trains 1.10 times as many tokens per second as b"),
        # A single fast step does not count
        ([speed("a", *[100.0] * 6), speed("b", *[300.0] * 6, 1.0)], "b (zero3) trains 3.00 times"),
        ([speed("a", *[100.0] * 6), speed("b", *[104.0] * 6)], ""),
        ([speed("a", *[100.0] * 6), speed("b", 300.0, 300.0)], ""),
        ([speed("a", *[100.0] * 6), speed("b", *[300.0] * 6, global_batch_size=16)], ""),
    ],
)  # fmt: skip
def test_fastest(runs, words):
    assert_said(findings.fastest(runs), words)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (run("a", rows=[{"loss": 1.0}, {NOT_FINITE: 1}]), "The loss of a was not finite at step 2."),
        (run("a", rows=[{NOT_FINITE: 1}, {"loss": 1.0}, {NOT_FINITE: 1}]), "at step 1, and in 1 more rows."),
        (run("a", [*FALLING, *[3.0] * 10]), "The training loss of a rose: its mean was"),
        (run("a", FALLING), ""),
        (run("a", [1.0, 5.0]), ""),
        # Noise is no rise
        (run("a", [2.0 + 0.1 * (step % 2) for step in range(100)]), ""),
    ],
)  # fmt: skip
def test_divergence(runs, words):
    assert_said(findings.divergence(runs), words)


def validated(*losses):
    return run("a", rows=[{"validation/loss": loss} for loss in losses])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (validated(3.0, 2.0, 2.5), "was lowest at step 2, 2; at the end it is 2.5."),
        (validated(2.0, 2.1, 2.3), "was lowest at step 1, 2; at the end it is 2.3."),
        (validated(3.0, 2.0, 1.0, 1.02), "was lowest at step 3, 1; at the end it is 1.02."),
        (validated(3.0, 2.5, 2.0), ""),
        (validated(3.0, 2.0, 2.001), ""),
        (validated(2.0, 3.0), ""),
    ],
)
def test_worse_validation(given, words):
    assert_said(findings.worse_validation(given), words)


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        ([0, 0, 1], "run skipped the update of 1 of 3 steps"),
        ([0, 2, 3], "run skipped the update of 3 of 3 steps"),
        ([4], "run skipped the update of 4 of 1 steps"),
        ([0, 0, 0], ""),
        ([], ""),
        ([0], ""),
    ],
)
def test_skipped_steps(skipped, words):
    given = run(rows=[{"skipped_steps": count} for count in skipped])
    assert_said(findings.skipped_steps(given), words)


def lost(restarted=(), wall=100.0, fraction=None, **seconds):
    row = {"goodput/wall_s": wall} | {f"goodput/lost_{k}_s": v for k, v in seconds.items()}
    if fraction is not None:
        row["goodput/fraction"] = fraction
    return run(rows=[row], restarted=restarted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lost([True], restart=8.0, repeated=0.0), "1 restart of run took 8.0 s: 8.0% of its wall time."),
        (lost([True, True], restart=8.0, repeated=4.0), "2 restarts of run took 8.0 s, and steps that were done again 4.0 s: 12.0%"),
        (lost([False, True], restart=600.0, wall=6000.0), "1 restart of run took 10.0 min: 10.0%"),
        (lost([], restart=0.0), ""),
        # Somebody started it again, and nobody waited.
        (lost([False], restart=0.0, repeated=3.0), ""),
        (lost([False], restart=5.0), ""),
    ],
)  # fmt: skip
def test_cost_of_restarts(given, words):
    assert_said(findings.cost_of_restarts(given), words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lost(fraction=0.5, first_step=30.0, data=20.0), "Goodput of run is 50.0%. The largest loss: first steps of processes (warm-up and compilation), 30.0 s of 100.0 s."),
        (lost(fraction=0.8, checkpoint=20.0), "The largest loss: saving, 20.0 s"),
        (lost(fraction=0.89, data=9.0, validation=2.0), "The largest loss: waits for data, 9.0 s"),
        (lost(fraction=0.95, data=5.0), ""),
        (lost(fraction=0.5), ""),
        (lost(data=50.0), ""),
    ],
)  # fmt: skip
def test_low_goodput(given, words):
    assert_said(findings.low_goodput(given), words)


def waiting(step=1.0, rows=10, **seconds):
    row = {"time/step_s": step}
    for axis, value in seconds.items():
        row[f"comm/{axis}/exposed_seconds"] = value
    # The first step of a process has neither.
    return run(rows=[{"loss": 1.0}, *[row] * rows])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (waiting(shard=0.41), "run (zero3) waits 41% of a step for the shard axis."),
        (waiting(shard=0.2, replicate=0.12), "waits 12% of a step for the replicate axis and 20% of a step for the shard axis."),
        (waiting(step=0.02, tensor=0.01), "waits 50% of a step for the tensor axis."),
        (waiting(shard=0.05), ""),
        (waiting(), ""),
        (waiting(rows=0, shard=0.9), ""),
    ],
)  # fmt: skip
def test_exposed_waits(given, words):
    assert_said(findings.exposed_waits(given), words)


def flat(strategy="zero3", hosts=("a", "a", "b", "b"), bytes_sent=9e6, config=None, **more):
    axis = "replicate" if strategy == "ddp" else "shard"
    mesh = {"replicate": 1, "shard": 1, "tensor": 1, axis: 4}
    layout = {
        "strategy": strategy, "hosts": list(hosts), "mesh": mesh, "parameters": 750_000,
        "predicted": {f"comm/{axis}/bytes": bytes_sent},
    }  # fmt: skip
    return run(config=config, **{**layout, **more})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # On two hosts with two ranks each: 2 x 1/2 x 3 MB for each of two shards of half the size
        (flat(), "hybrid (replicate 2 x shard 2) would send 33% of the bytes that leave a host with run (zero3): 3 MB per step for 9 MB. Each rank would hold 2 times the parameters."),
        (flat("ddp", bytes_sent=4.5e6), "would send 67% of the bytes that leave a host with run (ddp): 3 MB per step for 4.5 MB. Each rank would hold 1/2 of them."),
        (flat("zero2", bytes_sent=6e6), "would send 50% of the bytes"),
        (flat(hosts=("a",) * 4), ""),
        (flat(hosts=("a", "b", "a", "b")), ""),
        (flat(bytes_sent=3.5e6), ""),
        (flat(config=with_config(sync={**CONFIG["sync"], "wire": "int8"})), ""),
        (flat(config=with_config(model={"adapter": {"r": 8}})), ""),
        (flat(strategy="hybrid"), ""),
    ],
)  # fmt: skip
def test_fewer_bytes_with_hybrid(given, words):
    assert_said(findings.fewer_bytes_with_hybrid(given), words)


@pytest.mark.parametrize(
    ("data_s", "words"),
    [
        ([0.1, 0.3], "run (zero3) waits 20% of a step for data."),
        ([0.05], "waits 5% of a step for data."),
        ([0.0, 0.0, 0.6], "waits 20% of a step for data."),
        ([0.01], ""),
        ([0.0], ""),
        ([], ""),
    ],
)
def test_data_waits(data_s, words):
    given = run(rows=[{"time/step_s": 1.0, "time/data_s": value} for value in data_s])
    assert_said(findings.data_waits(given), words)


def slowest(ranks, skew=1.5, **layout):
    return run(rows=[{"rank/slowest": rank, "rank/skew": skew} for rank in ranks], **layout)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (slowest([1] * 8, hosts=["a/1", "b/1"]), "Rank 1 on b was the slowest of run (zero3) in 8 of 8 rows, busy 1.50 times as long"),
        (slowest([2, 2, 2, 0, 2, 2, 2, 2]), "Rank 2 was the slowest of run (zero3) in 7 of 8 rows"),
        (slowest([0] * 5, skew=1.2), "busy 1.20 times"),
        (slowest([0, 1] * 8), ""),
        (slowest([1] * 8, skew=1.05), ""),
        (slowest([1] * 3), ""),
    ],
)  # fmt: skip
def test_slow_rank(given, words):
    assert_said(findings.slow_rank(given), words)


def predicted(row, expected, config=None):
    return run(rows=[row] * 4, predicted=expected, config=config)


SHARD, REPLICATE = "comm/shard/bytes", "comm/replicate/bytes"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (predicted({SHARD: 3e6}, {SHARD: 2e6}), "run (zero3): shard MB per step, predicted 2, measured 3, 1.50 times as much."),
        (predicted({REPLICATE: 3e6}, {REPLICATE: 0}), "replicate MB per step, predicted 0, measured 3."),
        (predicted({"time/step_s": 0.3}, {"time/step_s": 0.2}), "step s per step, predicted 0.2, measured 0.3, 1.50 times"),
        (predicted({SHARD: 2.05e6}, {SHARD: 2e6}), ""),
        (predicted({"time/step_s": 0.21}, {"time/step_s": 0.2}), ""),
        (predicted({REPLICATE: 9e6}, {REPLICATE: 1e6}, with_config(sync={"name": "diloco"})), ""),
        (predicted({SHARD: 2e6}, {}), ""),
    ],
)  # fmt: skip
def test_deviations(given, words):
    assert_said(findings.deviations(given), words)


def test_every_predicted_quantity_has_a_name_with_its_unit():
    """Those that a run predicts (`run_description`), and no raw key in the heading of a table."""
    given = {"time/step_s": 0.2, "throughput/tokens_per_s": 1e3, "throughput/mfu": 0.4, SHARD: 2e6}
    part = predicted(given, given)
    shown = {heading: (columns, rows) for heading, columns, rows in tables([part])}
    quantities = [row[1] for row in shown["Measured and predicted"][1]]
    assert quantities == ["shard MB", "step s", "tokens/s", "MFU (share of the peak)"]
    for columns, _ in shown.values():
        assert not [column for column in columns if "_" in column]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (
            [run("a")],
            "No certificate compares these layouts with one process: zero3 1 x 2 x 1 (a).",
        ),
        ([run("a", certified=True), run("b")], "one process: zero3 1 x 2 x 1 (b)."),
        ([run(f"r{number}") for number in range(6)], "and 2 more."),
        ([run("a", certified=True)], ""),
        ([run("a", certified=True), run("b", certified=True)], ""),
        # An older run does not say.
        ([dataclasses.replace(run("a"), segments=())], ""),
    ],
)
def test_missing_certificates(runs, words):
    assert_said(findings.missing_certificates(runs), words)


def test_all_sentences_are_asked():
    public = {
        name
        for name, value in vars(findings).items()
        if callable(value) and getattr(value, "__module__", "") == findings.__name__
        if not name.startswith("_")
    }
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert public - {"describe_runs"} <= tests


def test_a_report_says_them_in_one_list():
    slow = [{"loss": 1.0, "time/step_s": 1.0, "time/data_s": 0.5, "skipped_steps": 2}] * 24
    said = findings.describe_runs([run("a", rows=slow), run("b", rows=slow)])
    assert said[0].startswith("Losses of 2 runs (a, b) are equal to the last digit")
    assert said[1] == "a skipped the update of 2 of 24 steps: something in them was not finite."
    assert "b (zero3) waits 50% of a step for data." in said
    assert said[-1].startswith("No certificate")

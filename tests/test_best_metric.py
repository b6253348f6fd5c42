"""The best checkpoint and early stopping: kept steps, records of a stopped, resumed or restarted
run, and the end of the run.
"""

import json
import math
import shutil

import jobs
import pytest

from parallel2d.training.hooks import Hook
from parallel2d.training.progress import BestMetric


class Scripted(Hook):
    """A metric with a given value at each step; None: it is not measured there."""

    def __init__(self, values):
        self.values = values

    def step(self, run, step, metrics):
        value = self.values[step - 1]
        return None if value is None else {"accuracy": value}


def scripted(*values):
    listed = ",".join("null" if value is None else str(value) for value in values)
    return f"train.hooks=[{{hook: 'test_best_metric:Scripted', values: [{listed}]}}]"


KEPT = (
    "checkpoint.keep_best=accuracy",
    "checkpoint.keep_best_mode=max",
    "checkpoint.keep_last=1",
    "checkpoint.asynchronous=false",
)


def steps_of(folder, name="run"):
    found = (folder / name / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def best_of(folder, name="run"):
    return json.loads((folder / name / "checkpoints" / "best.json").read_text())


def test_best_checkpoint_is_kept_next_to_the_newest_without_changing_losses(ranks, folder):
    watching = (*KEPT, "train.stop.metric=accuracy", "train.stop.mode=max", "train.stop.patience=9")
    watching += (scripted(1, 5, 7, 2, 3, 1, 4, 2),)
    for name, words in (("plain", ()), ("watching", watching)):
        arguments = (str(folder), str(folder / name), ("train.steps=8", *words))
        ranks.run(2, jobs.run_to_the_end, *arguments)
    assert steps_of(folder, "watching") == [3, 8]
    assert best_of(folder, "watching") == {
        "metric": "accuracy",
        "mode": "max",
        "step": 3,
        "value": 7.0,
        "checkpoint": "step-00000003",
    }
    plain, other = (jobs.rows(folder / name) for name in ("plain", "watching"))
    assert [row["loss"] for row in plain] == [row["loss"] for row in other]
    assert [row["grad_norm"] for row in plain] == [row["grad_norm"] for row in other]


def checkpoints_after_each_step(folder, words, steps):
    found = []
    run_dir = str(folder / "run")
    jobs.run(str(folder), run_dir, words, steps, lambda _: found.append(steps_of(folder)))
    return found


def test_new_best_checkpoint_replaces_the_previous_best_at_any_interval(ranks, folder):
    # Equal is not better, and not a number is never the best.
    words = (*KEPT, "checkpoint.every=0", "train.steps=7", scripted(3, 4, 4, "nan", 6, 2, 5))
    found = ranks.run(2, checkpoints_after_each_step, folder, words, 7)[0]
    assert found == [[1], [2], [2], [2], [5], [5], [5, 7]]


def test_mode_selects_lowest_or_highest_validation_loss(ranks, folder):
    words = (
        "checkpoint.keep_best=validation/loss",
        "checkpoint.keep_best_mode=max",
        "checkpoint.keep_last=1",
        "checkpoint.every=0",
        "train.validate_every=2",
        "train.steps=6",
    )
    ranks.run(2, jobs.run_to_the_end, str(folder), str(folder / "run"), words)
    rows = jobs.rows(folder / "run")
    measured = {row["validation/loss"]: row["step"] for row in rows if "validation/loss" in row}
    assert len(measured) == 3
    value = max(measured)
    assert (best_of(folder)["step"], best_of(folder)["value"]) == (measured[value], value)
    assert steps_of(folder) == sorted({measured[value], 6})


VALUES = (1, 5, 7, 2, 3, 6, 4, 8, 2)


@pytest.mark.slow
def test_best_is_dropped_with_its_steps_checkpoint_or_metric(ranks, folder):
    def run(steps, *words):
        arguments = (str(folder), str(folder / "run"), ("train.steps=9", *words), steps)
        return ranks.run(2, jobs.run, *arguments)[0]

    kept = (*KEPT, "checkpoint.keep_last=0", "checkpoint.every=1", scripted(*VALUES))
    run(4, *kept)
    assert best_of(folder)["step"] == 3
    # one step without improvement, so that it is not the best
    back = f"checkpoint.resume={folder / 'run' / 'checkpoints' / 'step-00000002'}"
    assert run(1, *kept, back, scripted(1, 5, 4, 4, 4, 4, 4, 4, 4)) == 2
    assert (best_of(folder)["step"], best_of(folder)["value"]) == (2, 5.0)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000002")
    assert run(3, *kept) == 3
    # 6 at step 6 is the best of the existing checkpoints
    assert (best_of(folder)["step"], best_of(folder)["value"]) == (6, 6.0)
    changed = ("checkpoint.keep_best=grad_norm", "checkpoint.keep_best_mode=min")
    assert run(1, *kept, *changed) == 6
    assert (best_of(folder)["metric"], best_of(folder)["step"]) == ("grad_norm", 7)
    assert run(1, "checkpoint.every=1") == 7
    assert not (folder / "run" / "checkpoints" / "best.json").exists()


# Early stopping

STOP = ("train.stop.metric=accuracy", "train.stop.mode=max", "checkpoint.every=2", "train.steps=9")
UNTIL = scripted(3, None, 4, None, 4, 2, 1, 9, 9)


def test_early_stopping_ends_the_run_and_a_resume_trains_no_step(ranks, folder):
    words = (*STOP, "train.stop.patience=3", UNTIL)
    arguments = (str(folder), str(folder / "run"), words)
    reason = (
        "stopped after step 7: accuracy did not improve in 3 measurements "
        "(train.stop.patience=3), the best is 4 of step 3"
    )
    # Measurements are counted over a stop and a resume, which does step 5 again.
    ranks.run(2, jobs.run, str(folder), str(folder / "run"), words, 5)
    assert ranks.run(2, jobs.run_to_the_end, *arguments) == [(7, reason)] * 2
    assert steps_of(folder)[-1] == 7
    assert len(jobs.rows(folder / "run")) == 7
    # Resumed with the same settings it trains no further; with others it does.
    assert ranks.run(2, jobs.run_to_the_end, *arguments) == [(7, reason)] * 2
    assert len(jobs.rows(folder / "run")) == 7
    longer = (str(folder), str(folder / "run"), (*words, "train.stop.patience=4"))
    assert ranks.run(2, jobs.run_to_the_end, *longer) == [(9, None)] * 2


def test_patience_counts_validations_and_min_delta_bounds_improvements():
    best = BestMetric("loss", "min", min_delta=0.5)
    found = [best.measure(step, value) for step, value in enumerate((3.0, 2.6, 2.5, 2.4, 1.9), 1)]
    assert found == [True, False, True, False, True]
    assert (best.step, best.value, best.since) == (5, 1.9, 0)
    assert not best.measure(6, math.nan)
    assert not best.measure(7, -math.inf)
    assert (best.step, best.since) == (5, 2)
    equal = BestMetric("loss", "min")
    assert [equal.measure(step, 1.0) for step in (1, 2)] == [True, False]


def said(folder, run_dir, words):
    trainer = jobs.build(folder, run_dir, words)
    lines = []
    trainer.recorder.log = lines.append
    trainer.run()
    trainer.recorder.close()
    return lines


def test_missing_hook_metric_is_reported_at_the_end(ranks, folder):
    words = ("checkpoint.keep_best=acuracy", scripted(1, 2), "train.steps=2")
    found = ranks.run(2, said, str(folder), str(folder / "run"), words)
    expected = "warning: checkpoint.keep_best=acuracy was never measured; did you mean accuracy?"
    assert found == [[expected]] * 2

"""Records of starts and ends in a run directory, and of the jobs in a sweep."""

import dataclasses
import json
import logging
import math
import time
from types import SimpleNamespace

import pytest
import yaml
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from test_command_line import SMALL, execute, folder, rows  # noqa: F401

from parallel2d.base.config import Job, LlamaModel, TrainConfig
from parallel2d.base.config.sweep import table
from parallel2d.base.errors import ConfigError
from parallel2d.instruments.report.page import markdown
from parallel2d.instruments.report.runs import parts_of, read_run
from parallel2d.rank import _Escaped
from parallel2d.training.assemble import _log_new_rate
from parallel2d.training.metrics.recorder import Goodput
from parallel2d.training.run_directory import end, start
from parallel2d.training.run_directory.end import (
    note_failure,
    objective_missing,
    read_objective,
    summarize,
)
from parallel2d.training.run_directory.ownership import OwnershipLock
from parallel2d.training.run_directory.start import (
    Segment,
    accept_start,
    changes_since,
    discard_pending,
    read_segments,
)

LAYOUT = {
    "strategy": "hybrid",
    "mesh": {"replicate": 2, "shard": 2, "tensor": 1},
    "predicted": {"comm/shard/bytes": 8.0},
}


def job_in(run_dir, **more):
    return Job(TrainConfig(model=LlamaModel()), str(run_dir), ("train.steps=9",), **more)


def accept(job, layout, finished_steps):
    return accept_start(job, layout, finished_steps, OwnershipLock(job.run_dir))


def test_each_start_is_a_segment(tmp_path):
    first = accept(job_in(tmp_path), LAYOUT, 0)
    for name in ("1", "2"):
        (tmp_path / f".hydra-pending-{name}").mkdir()
        (tmp_path / f".hydra-pending-{name}" / "config.yaml").write_text(name)
    job = job_in(tmp_path, restarted=True, records=".hydra-pending-2")
    job.config.optimizer.lr = 0.5
    other = {**LAYOUT, "mesh": {"replicate": 1, "shard": 2, "tensor": 1}}
    second = accept(job, other, 20)
    assert (first.segment.number, second.segment.number) == (1, 2)
    assert first.changes == ()
    assert second.changes == (
        "optimizer.lr: 0.001 -> 0.5",
        "mesh: replicate 2 x shard 2 x tensor 1 -> replicate 1 x shard 2 x tensor 1",
    )
    found = read_segments(str(tmp_path))
    assert [each.first_step for each in found] == [1, 21]
    assert [each.restarted for each in found] == [False, True]
    assert found[1] == dataclasses.replace(second.segment)
    assert json.loads((tmp_path / "layout.json").read_text()) == other
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "2"
    assert not (tmp_path / ".hydra-pending-2").exists()
    # The record of another start, which may still be accepted
    discard_pending(job)
    assert (tmp_path / ".hydra-pending-1").exists()
    discard_pending(job_in(tmp_path, records=".hydra-pending-1"))
    assert not (tmp_path / ".hydra-pending-1").exists()
    assert json.loads((tmp_path / "owner.json").read_text())["token"]


def test_damaged_lines_are_skipped_without_losing_segments(tmp_path):
    accept(job_in(tmp_path), LAYOUT, 0)
    with open(tmp_path / "segments.jsonl", "a") as file:
        file.write('[1, 2]\n{"number": "3", "first_step": 1}\nnonsense\n{"number": 7, "fir')
    accept(job_in(tmp_path), LAYOUT, 4)
    assert [each.number for each in read_segments(str(tmp_path))] == [1, 2]


def test_a_resume_from_another_run_is_compared_with_that_run(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    accept(job_in(tmp_path / "a"), LAYOUT, 0)
    for path in ("a", "a/checkpoints", "a/checkpoints/step-00000004"):
        job = job_in(tmp_path / "b")
        job.config.checkpoint.resume = str(tmp_path / path)
        job.config.train.seed = 3
        (tmp_path / "b" / "segments.jsonl").unlink(missing_ok=True)
        changes = accept(job, LAYOUT, 4).changes
        assert "train.seed: 0 -> 3" in changes, path


def test_changes_name_keys_of_every_depth():
    before = Segment(
        1, 1, False, "", config={"a": {"b": 1, "c": {"d": True}}, "launch": {"host_id": "x"}}
    )
    now = Segment(
        2,
        1,
        False,
        "",
        config={"a": {"b": 1, "c": {"d": False}, "e": None}, "launch": {"host_id": "y"}},
    )
    assert changes_since(before, now) == ["a.c.d: true -> false"]
    longer = dataclasses.replace(now, config={"a": {"b": "x" * 500, "c": {"d": True}}})
    (line,) = [each for each in changes_since(before, longer) if each.startswith("a.b")]
    assert len(line) < 80


ROWS = [
    {"step": 1, "segment": 1, "loss": 5.0, "tokens": 10, "goodput/wall_s": 2.0, "goodput/useful_s": 1.0,
        "goodput/fraction": 0.5},
    {"step": 2, "segment": 1, "loss": 3.0, "validation/loss": 3.5, "tokens": 20, "goodput/wall_s": 4.0,
        "goodput/useful_s": 2.0, "goodput/fraction": 0.5},
    {"step": 3, "segment": 2, "loss": 4.0, "validation/loss": 3.75, "tokens": 30, "goodput/wall_s": 8.0,
        "goodput/useful_s": 5.0, "goodput/fraction": 0.625,
     "comm/shard/bytes": 4.0},
]  # fmt: skip


def write_rows(run_dir):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def test_a_run_ends_with_a_summary(tmp_path):
    write_rows(tmp_path)
    job = job_in(tmp_path)
    job.config.train.steps = 3
    checkpoint = str(tmp_path / "checkpoints/step-00000003")
    told = "\n".join(summarize(job, stopped=False, checkpoint=checkpoint))
    assert "step 3 of 3, 30 tokens, 00:00:08, goodput 62.5%" in told
    assert "loss        4.0000 at the end, best 3.0000 at step 2" in told
    assert "validation  3.7500 at the end, best 3.5000 at step 2" in told
    assert f"train.steps=6 hydra.run.dir={tmp_path}" in told
    assert f"parallel2d.report {tmp_path}" in told
    assert checkpoint in told
    assert read_objective(str(tmp_path)) == 3.75
    told = summarize(job, stopped=False, checkpoint=checkpoint, best="b/step-2", reason="no better")
    assert told[0].startswith("stopped ")
    assert told[1] == "reason      no better"
    assert "best        b/step-2" in told
    assert not any(line.startswith("go on") for line in told)
    job.config.train.objective = "accuracy"
    summarize(job, stopped=True, checkpoint=None)
    assert read_objective(str(tmp_path)) is None
    assert "accuracy was never measured" in objective_missing("accuracy", str(tmp_path))
    assert "did you mean validation/loss?" in objective_missing("validation_loss", str(tmp_path))


def test_full_disk_at_the_end_does_not_fail_the_run(tmp_path, monkeypatch):
    write_rows(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(end.files, "replace", full)
    told = summarize(job_in(tmp_path), stopped=False, checkpoint=None)
    assert told[0].startswith("done        step 3 of")
    assert told[-1] == "warning: summary.json cannot be written: No space left on device"
    assert read_objective(str(tmp_path)) is None


def test_accepted_start_removes_the_previous_summary(tmp_path):
    write_rows(tmp_path)
    summarize(job_in(tmp_path), stopped=False, checkpoint=None)
    accept(job_in(tmp_path), LAYOUT, 3)
    assert read_objective(str(tmp_path)) is None


def test_failure_is_recorded_after_the_logged_rows(tmp_path):
    (tmp_path / "train.log").write_text("before\n")
    note_failure(str(tmp_path), "it\nfailed")
    before, first, second = (tmp_path / "train.log").read_text().splitlines()
    assert (before, first[9:], second) == ("before", "it", "failed")
    note_failure(str(tmp_path / "nowhere"), "no other error")


@pytest.mark.parametrize(
    ("restarted", "begun_ago", "lost"),
    [(True, 7200.0, 3600.0), (True, 60.0, 60.0), (False, 7200.0, 0.0)],
)
def test_time_between_two_starts_is_not_lost_time(restarted, begun_ago, lost):
    row = {
        "step": 2,
        "goodput/wall_s": 4.0,
        "goodput/useful_s": 3.0,
        "goodput/unix_s": time.time() - 3600,
    }
    after = Goodput()
    after.resume(2, row, row, restarted=restarted, not_before=time.time() - begun_ago)
    found = after.row()
    assert found["goodput/lost_restart_s"] == pytest.approx(lost, abs=5)
    assert found["goodput/wall_s"] == pytest.approx(4 + lost, abs=5)


def test_starts_on_one_layout_share_a_report_row(tmp_path):
    for finished, host in ((0, "a"), (2, "b")):
        accept(job_in(tmp_path, certified=True), {**LAYOUT, "hosts": [host] * 4}, finished)
    write_rows(tmp_path)
    # This start has not written a row.
    accept(job_in(tmp_path), {**LAYOUT, "strategy": "ddp", "predicted": {}}, 3)
    (part,) = parts_of(read_run(str(tmp_path)))
    assert part.name == tmp_path.name
    assert part.layout["strategy"] == "hybrid"
    assert len(part.table) == 3
    told = markdown([read_run(str(tmp_path))])
    assert f"| {tmp_path.name} | hybrid | 2 x 2 x 1 | yes |" in told


def test_parity_status_of_a_layout_covers_restarted_workers(tmp_path):
    accept(job_in(tmp_path, certified=True), LAYOUT, 0)
    other = {**LAYOUT, "strategy": "zero3"}
    accept(job_in(tmp_path), other, 2)
    write_rows(tmp_path)
    (tmp_path / "certificate.json").write_text('{"passed": true}')
    told = markdown([read_run(str(tmp_path))])
    assert "steps 1 to 2 | hybrid | 2 x 2 x 1 | yes |" in told
    assert "steps 3 to 3 | zero3 | 2 x 2 x 1 | - |" in told
    accept(job_in(tmp_path, certified=True), LAYOUT, 3)
    for finished, layout in ((4, LAYOUT), (5, other), (6, other)):
        accept(job_in(tmp_path, restarted=True), layout, finished)
    certified = [each.certified for each in read_segments(str(tmp_path))]
    assert certified == [True, False, True, True, False, False]


def test_a_run_that_diverged_has_no_finite_objective(tmp_path):
    rows_ = [*ROWS, {"step": 4, "loss": None, "validation/loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    told = summarize(job_in(tmp_path), stopped=False, checkpoint=None)
    assert math.isnan(read_objective(str(tmp_path)))
    assert "loss        nan at the end, best 3.0000 at step 2" in told
    assert json.loads((tmp_path / "summary.json").read_text())["last"]["loss"] is None


def test_resume_command_omits_initial_checkpoint_settings(tmp_path, monkeypatch):
    write_rows(tmp_path)
    words = ("--config-dir", "my conf", "launch.host_id=n1", "checkpoint.resume=never")
    words += ("+train.steps=3", "train.seed=2")
    job = dataclasses.replace(job_in(tmp_path), overrides=words)
    told = "\n".join(summarize(job, stopped=False, checkpoint="c"))
    assert "train --config-dir 'my conf' train.seed=2 train.steps=6 hydra.run.dir=" in told
    job.config.train.epochs = 2
    told = "\n".join(summarize(job, stopped=False, checkpoint="c"))
    assert "train.seed=2 train.epochs=4 hydra.run.dir=" in told
    monkeypatch.chdir(tmp_path)  # as with hydra.job.chdir=true: the user's shell is elsewhere
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    told = "\n".join(summarize(job, stopped=False, checkpoint=f"{tmp_path}/c", launcher="srun"))
    assert f"report {tmp_path}" in told
    assert f"checkpoint  {tmp_path}/c" in told
    assert "continue    sbatch SCRIPT, with srun ... python -m parallel2d.train" in told


def test_a_huge_file_of_segments_is_refused(tmp_path):
    with open(tmp_path / "segments.jsonl", "wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(OSError, match="more than 128 MiB"):
        read_segments(str(tmp_path))


def test_start_without_record_does_not_lock_the_directory(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(27, "no disk", "segments.jsonl")

    monkeypatch.setattr(start, "read_segments", broken)
    with pytest.raises(ConfigError, match="no disk"):
        accept(job_in(tmp_path), LAYOUT, 0)
    assert list(tmp_path.iterdir()) == []


def test_changed_learning_rate_is_logged_and_the_log_is_escaped():
    said, config = [], TrainConfig()
    before = dataclasses.asdict(config)
    _log_new_rate(config, before, 60, SimpleNamespace(log=said.append))
    assert said == []
    before["train"]["steps"] *= 2
    _log_new_rate(config, before, 60, SimpleNamespace(log=said.append))
    assert "warning: the learning rate of step 60 is" in said[0]
    assert _Escaped().format(logging.makeLogRecord({"msg": "a\x1b[31m"})) == "a\\x1b[31m"


def test_sweep_lists_runs_best_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = []
    for number, value in enumerate((2.5, ConfigError("it failed"), 1.5)):
        job = {"num": number}
        runtime = {"output_dir": str(tmp_path / "sweep" / str(number))}
        done = JobReturn(
            ["a=1", f"b={number}"],
            hydra_cfg=OmegaConf.create({"hydra": {"job": job, "runtime": runtime}}),
        )
        done.return_value, done.status = value, JobStatus.COMPLETED
        jobs.append(done)
    (tmp_path / "sweep" / "2").mkdir(parents=True)
    last = {"throughput/tokens_per_s": 1234.0, "memory/peak_rss_gib": 0.5, "memory/peak_gib": None}
    (tmp_path / "sweep" / "2" / "summary.json").write_text(json.dumps({"last": last}))
    assert [line.split() for line in table(jobs, "loss")] == [
        ["job", "loss", "tokens/s", "host_GiB", "settings", "run", "directory"],
        ["#2", "1.5", "1234", "0.5", "b=2", "sweep/2"],
        ["#0", "2.5", "-", "-", "b=0", "sweep/0"],
        ["#1", "failed", "-", "-", "b=1", "sweep/1"],
    ]


SWEEP = ("-m", *SMALL, "launch.nproc_per_node=1", "metrics.console=silent", "hydra.sweep.dir=sweep")


@pytest.mark.slow
def test_sweep_continues_after_a_failed_job(folder):  # noqa: F811
    done = execute(folder, *SWEEP, "model.n_heads=7,8")
    assert done.returncode == 2
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("#")]
    assert [line[0] for line in lines] == ["#1", "#0"]
    assert [line[1] == "failed" for line in lines] == [False, True]
    assert done.stderr.count("must be a multiple of model.n_heads=7") == 1


@pytest.mark.extras("hydra_plugins.hydra_optuna_sweeper")
def test_optuna_minimizes_the_objective(folder):  # noqa: F811
    words = (
        "hydra/sweeper=optuna",
        "optimizer.lr=interval(1e-4,1e-2)",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
    )
    done = execute(folder, *SWEEP, *words)
    assert done.returncode == 0, done.stderr
    best = yaml.safe_load((folder / "sweep/optimization_results.yaml").read_text())
    values = [rows(folder / "sweep" / str(job))[-1]["validation/loss"] for job in range(3)]
    assert best["best_value"] == pytest.approx(min(values), abs=1e-9)
    words += ("train.validate_every=0", "hydra.sweep.dir=two", "hydra.sweeper.n_trials=1")
    unmeasured = execute(folder, *SWEEP, *words)
    assert unmeasured.returncode == 2
    said = unmeasured.stderr.splitlines()[-1]
    assert "train.objective=validation/loss was never measured" in said


@pytest.mark.extras("hydra_plugins.hydra_joblib_launcher")
def test_joblib_jobs_are_labelled_and_failures_reported(folder):  # noqa: F811
    sweep = [word for word in SWEEP if not word.startswith("metrics.console")]
    words = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "model.n_heads=8,7,4")
    done = execute(folder, *sweep, *words)
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if "loss" in line and "step" in line]
    assert told
    assert all(line.startswith(("[#0] ", "[#2] ")) for line in told), told
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("#")]
    assert {line[0]: line[1] == "failed" for line in lines} == {
        "#0": False,
        "#1": True,
        "#2": False,
    }
    assert "must be a multiple of model.n_heads=7" in done.stderr


@pytest.mark.extras("hydra_plugins.hydra_submitit_launcher")
def test_jobs_of_submitit_return_their_objective(folder):  # noqa: F811
    done = execute(folder, *SWEEP, "hydra/launcher=submitit_local", "optimizer.lr=1e-3,1e-2")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("#")]
    assert [line[-2] for line in lines] == ["optimizer.lr=0.01", "optimizer.lr=0.001"]

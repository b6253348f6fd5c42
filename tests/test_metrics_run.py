"""Measurements and records of real runs: complete jobs, started with the command, and jobs on the
ranks of the tests.
"""

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import time

import jobs
import pytest
import torch.distributed as dist
import yaml
from test_command_line import SMALL, command, environment, execute, folder, rows  # noqa: F401
from torch import nn
from workers import logged

from parallel2d.training.run_directory.start import read_segments


def records(run_dir):
    """Files that record the setup of a run, by path in its directory."""
    found = [*run_dir.glob("*.json*"), *run_dir.glob(".hydra/*"), *run_dir.glob("checkpoints/**/*")]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in found if path.is_file()}


ON_TWO = (*SMALL, "launch.nproc_per_node=2", "strategy=zero3", "train.validate_every=100")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with ``run``, five steps on two ranks, and the output of the command."""
    place = tmp_path_factory.mktemp("trained")
    (place / "corpus.txt").write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(20000)))
    words = (
        "train.steps=5",
        "profile.steps=[3,4]",
        "profile.ranks=[1]",
        "checkpoint.every=2",
        "hydra.run.dir=run",
    )
    done = execute(place, *ON_TWO, *words)
    assert done.returncode == 0, done.stderr
    return place, done.stderr


@pytest.mark.slow
def test_seconds_of_a_row_add_up(trained):
    place, said = trained
    found = rows(place / "run")
    rest = []
    for row in found[1:]:
        phases = ("forward_backward", "data", "sync", "optimizer")
        parts = sum(row[f"time/{phase}_s"] for phase in phases)
        assert parts < row["time/step_s"]
        rest.append(1 - parts / row["time/step_s"])
        assert row["throughput/tokens_per_s"] * row["time/step_s"] == pytest.approx(8 * 16)
    # The least of all steps: between two phases another process may have had the core.
    assert min(rest) < 0.05
    assert [row["samples"] for row in found] == [8, 16, 24, 32, 40]
    last = found[-1]
    lost = [value for key, value in last.items() if key.startswith("goodput/lost_")]
    assert last["goodput/useful_s"] + sum(lost) <= last["goodput/wall_s"]
    # However short it is, a run is validated at its end.
    assert ["validation/loss" in row for row in found] == [False] * 4 + [True]
    assert last["goodput/lost_validation_s"] > 0
    predicted = json.loads((place / "run" / "layout.json").read_text())["predicted"]
    assert last["comm/shard/bytes"] == pytest.approx(predicted["comm/shard/bytes"], rel=0.001)
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert summary["objective"]["value"] == last["validation/loss"]
    assert "done        step 5 of 5" in said
    assert "warning" not in said


@pytest.mark.slow
def test_traces_name_phases_and_axes(trained):
    traces = trained[0] / "run" / "traces"
    assert os.listdir(traces) == ["rank-1-steps-3-4.json"]
    events = json.loads((traces / "rank-1-steps-3-4.json").read_text())["traceEvents"]
    phases = {"forward_backward", "agree", "update"}
    assert phases | {"shard: all_gather", "shard: reduce_scatter"} <= {e["name"] for e in events}


@pytest.mark.slow
def test_a_refused_start_leaves_the_records_of_a_good_run(trained):
    place = trained[0]
    shutil.copytree(place / "run", place / "again", symlinks=True)
    run = (*ON_TWO, "hydra.run.dir=again")
    before = records(place / "again")
    for words in (
        (
            "train.steps=8",
            "strategy=hybrid",
            "model.n_layers=2",
        ),  # on the ranks: does not fit the checkpoint
        ("mesh.replicate=3",),  # before the ranks start: does not fit their number
    ):
        refused = execute(place, *run, *words)
        assert refused.returncode == 2, refused.stderr
        assert records(place / "again") == before, words
        assert not list((place / "again").glob(".hydra-pending*"))
    assert "mesh.replicate=3" in (place / "again" / "train.log").read_text()
    words = ("optimizer.lr=1e-2", "train.steps=6", "launch.nproc_per_node=1")
    on = execute(place, *run, *words)
    assert on.returncode == 0, on.stderr
    assert "optimizer.lr: 0.001 -> 0.01" in on.stderr
    assert "mesh: replicate 1 x shard 2 x tensor 1 -> replicate 1 x shard 1 x tensor 1" in on.stderr
    assert [row["segment"] for row in rows(place / "again")] == [1, 1, 1, 1, 1, 2]
    kept = yaml.safe_load((place / "again/.hydra/config.yaml").read_text())
    assert kept["optimizer"]["lr"] == 1e-2
    first, second = read_segments(str(place / "again"))
    assert (first.first_step, second.first_step) == (1, 6)
    assert second.config["optimizer"]["lr"] == 1e-2


@pytest.mark.slow
def test_out_of_memory_on_a_rank_gives_one_message(folder):  # noqa: F811
    words = [word for word in SMALL if not word.startswith("model.")]
    words += ["model=custom", "model.target=my_models:Bigram", "hydra.run.dir=run"]
    words += [f"model.arguments.{word}" for word in ("hungry=true", "fail_on=1", "fail_at=3")]
    words += ["train.validate_every=0", "metrics.console=silent", "launch.nproc_per_node=2"]
    failed = execute(folder, *words)
    assert failed.returncode == 1
    (line,) = [line for line in failed.stderr.splitlines() if "ran out of memory" in line]
    assert line.startswith("rank 1 on ")
    assert "GiB were free; a smaller train.micro_batch_size" in line
    assert failed.stderr.count("rank 1 failed first") == 1
    assert "rank 0 failed first" not in failed.stderr
    assert line in (folder / "run" / "train.log").read_text()


@pytest.mark.soak
def test_stopped_rank_is_named_after_the_timeout(folder):  # noqa: F811
    words = [word for word in SMALL if "steps" not in word]
    launcher = subprocess.Popen(
        command(
            *words,
            "train.steps=1000000",
            "launch.nproc_per_node=2",
            "launch.timeout=12",
            "hydra.run.dir=run",
        ),
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "run" / "metrics.jsonl"
    stacks = folder / "run" / "stacks"
    stopped = 0
    try:
        jobs.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
        _, stopped = jobs.ranks_of(launcher.pid)
        os.kill(stopped, signal.SIGSTOP)
        jobs.wait_for(stacks.exists)
        _, said = launcher.communicate(timeout=90)
    finally:
        if stopped:
            with contextlib.suppress(ProcessLookupError):  # its launcher has ended it
                os.kill(stopped, signal.SIGKILL)
        launcher.kill()
    assert launcher.returncode == 1
    assert "late: rank 1 on" in said
    assert "which timed out" in said
    assert "waited in" in said
    assert "thread" in (stacks / "rank-0.txt").read_text().lower()
    recorded = json.loads((stacks / "rank-0.collectives.json").read_text())["entries"]
    assert any(entry["profiling_name"].startswith("gloo:") for entry in recorded)


def agreements_of_each_step(folder, run_dir):  # noqa: F811
    """Return the number of all-reduces of each step; with only the shard axis all of them are
    agreements.
    """
    counts, plain = [0], dist.all_reduce

    def counted(*arguments, **options):
        counts[-1] += 1
        return plain(*arguments, **options)

    dist.all_reduce = counted
    try:
        words = ("strategy=zero3", "checkpoint.enabled=false")
        jobs.run(folder, run_dir, words, 3, lambda _: counts.append(0))
    finally:
        dist.all_reduce = plain
    return counts


def test_loop_has_one_status_all_reduce_per_step(ranks, folder):  # noqa: F811
    # Before the first one on the number of its tokens, too
    found = ranks.run(2, agreements_of_each_step, str(folder), str(folder / "run"))
    assert found == [[2, 1, 1, 0]] * 2


def test_unmeasured_communication_writes_no_rows(ranks, folder):  # noqa: F811
    words = ("metrics.communication=false", "checkpoint.enabled=false")
    ranks.run(2, jobs.run, str(folder), str(folder / "run"), words, 2)
    found = rows(folder / "run")
    assert len(found) == 2
    assert not any(key.startswith("comm/") for row in found for key in row)


def train_without_room(folder, run_dir, fault):  # noqa: F811
    """Train six steps and return the log; rank 0 has no space left on the disk between the second
    and the fourth step, or the directory is deleted after the second.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def after_step(trainer):
        step = trainer.progress.step
        if dist.get_rank() or step not in (2, 4):
            return
        if fault == "deleted":
            shutil.rmtree(run_dir, ignore_errors=True)
        elif step == 2:
            # A part of the next row fits, but not a complete event.
            end = os.path.getsize(os.path.join(run_dir, "metrics.jsonl"))
            resource.setrlimit(resource.RLIMIT_FSIZE, (end + 100, before[1]))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    words = ("checkpoint.enabled=false", "metrics.tensorboard=true", "train.steps=6")
    try:
        with logged("parallel2d.training.metrics.writer", logging.WARNING) as said:
            jobs.run(folder, run_dir, words, 6, after_step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return said


def test_a_full_disk_or_a_deleted_directory_costs_rows_and_not_the_run(ranks, folder):  # noqa: F811
    run_dir = folder / "full"
    said, others = ranks.run(2, train_without_room, str(folder), str(run_dir), "full")
    first, of_tensorboard, last = said
    assert first.startswith(f"{run_dir}/metrics.jsonl cannot be written, from step 3 on (")
    assert of_tensorboard.startswith(f"{run_dir}/tensorboard cannot be written (")
    assert last == f"2 rows are missing in {run_dir}/metrics.jsonl"
    assert others == []
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 5, 6]
    run_dir = folder / "deleted"
    first, last = ranks.run(2, train_without_room, str(folder), str(run_dir), "deleted")[0]
    assert "metrics.jsonl cannot be written, from step 3 on (No such file or directory)" in first
    assert last == f"4 rows are missing in {run_dir}/metrics.jsonl"


def test_a_run_that_has_ended_keeps_the_records_of_the_start_that_trained(ranks, folder):  # noqa: F811
    words = ("train.steps=2", "checkpoint.asynchronous=false", "strategy=zero3")
    arguments = (str(folder), str(folder / "run"), words)
    ranks.run(2, jobs.run_to_the_end, *arguments)
    before = records(folder / "run")
    assert len(read_segments(str(folder / "run"))) == 1
    ranks.run(2, jobs.run_to_the_end, *arguments)
    assert records(folder / "run") == before


class Paced(nn.Module):
    """A forward takes a fixed time of a core; the rank ``slow`` is half as fast."""

    def __init__(self, slow: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(320, 8), nn.Linear(8, 320)
        self.slow = slow

    def forward(self, tokens):
        if not tokens.is_meta:
            end = time.process_time() + (0.2 if dist.get_rank() == self.slow else 0.1)
            while time.process_time() < end:
                pass
        return self.head(self.embedding(tokens))


def train_paced(folder, slow, name="run"):  # noqa: F811
    """Warnings of the recorder of rank 0 in a run of 20 steps."""
    words = ("model=custom", f"model.target={__name__}:Paced", f"+model.arguments.slow={slow}")
    words += ("checkpoint.enabled=false", "strategy=zero3", "bucketing=layer")
    with logged("parallel2d.training.metrics.recorder", logging.WARNING) as said:
        jobs.run(folder, str(folder / name), [*words, "train.steps=20"], 20)
    return said


@pytest.mark.slow
def test_rank_at_half_speed_is_named_with_its_host(ranks, folder):  # noqa: F811
    (said,) = ranks.run(2, train_paced, folder, 1)[0]
    assert said.startswith(f"rank 1 on {socket.gethostname()} is slow: ")
    assert ranks.run(4, train_paced, folder, -1, "even")[0] == []


def test_repeated_steps_after_resume_reduce_goodput(ranks, folder):  # noqa: F811
    words = ("checkpoint.every=3", "checkpoint.asynchronous=false", "strategy=zero3")
    run_dir = str(folder / "run")
    assert ranks.run(2, jobs.run, str(folder), run_dir, words, 5) == [0, 0]
    before = {row["step"]: row for row in jobs.rows(run_dir)}
    assert ranks.run(2, jobs.run, str(folder), run_dir, words, 1) == [3, 3]
    again = jobs.rows(run_dir)[-1]
    assert again["step"] == 4
    assert again["goodput/lost_repeated_s"] == pytest.approx(
        before[5]["goodput/useful_s"] - before[3]["goodput/useful_s"]
    )
    assert again["goodput/lost_repeated_s"] > 0
    lost = sum(value for key, value in again.items() if key.startswith("goodput/lost_"))
    assert again["goodput/useful_s"] + lost <= again["goodput/wall_s"]

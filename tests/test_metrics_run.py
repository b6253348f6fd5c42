"""Measurements of real runs, started as people start them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import time

import jobs
import pytest
import torch.distributed as dist
from test_command_line import SMALL, command, environment, execute, folder, rows, wait_until  # noqa: F401
from torch import nn


@pytest.mark.slow
def test_rows_add_up_and_traces_name_phases_and_axes(folder):  # noqa: F811
    words = (
        "train.steps=5",
        "profile.steps=[3,4]",
        "profile.ranks=[1]",
        "checkpoint.every=2",
        "strategy=zero3",
    )
    done = execute(folder, *SMALL, *words, "launch.nproc_per_node=2", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    found = rows(folder / "run")
    for row in found[1:]:
        parts = sum(
            row[f"time/{phase}_s"] for phase in ("forward_backward", "data", "sync", "optimizer")
        )
        assert parts == pytest.approx(row["time/step_s"], rel=0.03)
        assert row["throughput/tokens_per_s"] * row["time/step_s"] == pytest.approx(8 * 16)
    assert [row["samples"] for row in found] == [8, 16, 24, 32, 40]
    lost = [
        found[-1][f"goodput/lost_{name}_s"]
        for name in ("first_step", "data", "checkpoint", "validation", "restart")
    ]
    assert found[-1]["goodput/useful_s"] + sum(lost) <= found[-1]["goodput/wall_s"]
    assert found[-1]["goodput/lost_validation_s"] > 0
    predicted = json.loads((folder / "run" / "layout.json").read_text())["predicted"]
    assert found[-1]["comm/shard/bytes"] == pytest.approx(predicted["comm/shard/bytes"], rel=0.001)
    assert "warning" not in done.stderr
    assert os.listdir(folder / "run" / "traces") == ["rank-1-steps-3-4.json"]
    events = json.loads((folder / "run" / "traces" / "rank-1-steps-3-4.json").read_text())[
        "traceEvents"
    ]
    names = {event["name"] for event in events}
    assert {
        "forward_backward",
        "agree",
        "update",
        "shard: all_gather",
        "shard: reduce_scatter",
    } <= names


def test_unmeasured_communication_leaves_no_rows_of_it(ranks, folder):  # noqa: F811
    for measured in ("true", "false"):
        words = (f"metrics.communication={measured}", "checkpoint.enabled=false")
        ranks.run(2, jobs.run, str(folder), str(folder / measured), words, 2)
        found = rows(folder / measured)
        assert len(found) == 2
        assert any(key.startswith("comm/") for row in found for key in row) == (measured == "true")


@pytest.mark.soak
def test_a_stopped_rank_is_named_when_the_timeout_is_over(folder):  # noqa: F811
    words = [word for word in SMALL if "steps" not in word]
    launcher = subprocess.Popen(
        command(*words, "train.steps=1000000", "launch.nproc_per_node=2", "launch.timeout=12", "hydra.run.dir=run"),
        cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    metrics = folder / "run" / "metrics.jsonl"
    stopped = 0
    try:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step")
        _, stopped = jobs.ranks_of(launcher.pid)
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: (folder / "run" / "stacks").exists(), "the dump of stacks", 60)
        _, said = launcher.communicate(timeout=90)
    finally:
        if stopped:
            with contextlib.suppress(ProcessLookupError):  # its launcher has ended it
                os.kill(stopped, signal.SIGKILL)
        launcher.kill()
    assert launcher.returncode == 1
    assert "late: rank 1 on" in said
    assert "no sign of life" in said
    assert "waited in" in said
    assert "thread" in (folder / "run" / "stacks" / "rank-0.txt").read_text().lower()
    recorded = json.loads((folder / "run" / "stacks" / "rank-0.collectives.json").read_text())[
        "entries"
    ]
    assert any(entry["profiling_name"].startswith("gloo:") for entry in recorded)


HUNGRY = """
import os

import torch

from my_models import Bigram


class Hungry(Bigram):
    turns = 0

    def forward(self, tokens):
        self.turns += 1
        if self.turns == 3 and os.environ.get("RANK") == "1":
            torch.empty(2**60, dtype=torch.uint8)
        return super().forward(tokens)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["self", "torchrun"])
def test_a_rank_without_memory_left_ends_the_run_with_one_message(folder, launcher):  # noqa: F811
    (folder / "hungry.py").write_text(HUNGRY)
    words = [word for word in SMALL if not word.startswith("model.")]
    words += [
        "model=custom",
        "model.target=hungry:Hungry",
        "hydra.run.dir=run",
        "train.validate_every=0",
        "metrics.console=silent",
    ]
    if launcher == "self":
        failed = execute(folder, *words, "launch.nproc_per_node=2")
    else:
        started = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "parallel2d.train",
        )
        failed = execute(folder, *words, launcher=started)
    assert failed.returncode == 1
    (line,) = [line for line in failed.stderr.splitlines() if "ran out of memory" in line]
    assert line.startswith("rank 1 on ")
    assert "in step 3: it asked for 1073741824.00 GiB; it held " in line
    assert "GiB were free" in line
    assert failed.stderr.count("rank 1 failed first") == 1
    assert "rank 0 failed first" not in failed.stderr


class Paced(nn.Module):
    """A forward takes a fixed time, as on a device of its own; the rank ``slow`` is half as fast."""

    def __init__(self, slow: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(320, 8), nn.Linear(8, 320)
        self.slow = slow

    def forward(self, tokens):
        if not tokens.is_meta:
            time.sleep(0.1 if dist.get_rank() == self.slow else 0.05)
        return self.head(self.embedding(tokens))


def train_paced(folder, slow, steps):  # noqa: F811
    """What the recorder of rank 0 warned of, in a run of ``steps`` steps."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("parallel2d.metrics.recorder")
    log.addHandler(handler)
    words = [
        "model=custom",
        f"model.target={__name__}:Paced",
        f"+model.arguments.slow={slow}",
        f"train.steps={steps}",
    ]
    try:
        jobs.run(
            folder,
            str(folder / f"slow-{slow}"),
            [*words, "checkpoint.enabled=false", "strategy=zero3", "bucketing=layer"],
            steps,
        )
    finally:
        log.removeHandler(handler)
    return said


@pytest.mark.slow
def test_a_rank_at_half_speed_is_named_with_its_host_within_20_steps(ranks, folder):  # noqa: F811
    (said,) = ranks.run(4, train_paced, folder, 2, 20)[0]
    assert said.startswith(f"rank 2 on {socket.gethostname()} is slow: ")


@pytest.mark.slow
def test_no_rank_is_named_in_40_steps_at_even_speed(ranks, folder):  # noqa: F811
    assert ranks.run(4, train_paced, folder, -1, 40)[0] == []


def test_steps_that_a_resumed_run_does_again_are_lost_in_its_goodput(ranks, folder):  # noqa: F811
    words, run_dir = (
        ["checkpoint.every=3", "checkpoint.asynchronous=false", "strategy=zero3"],
        str(folder / "run"),
    )
    assert ranks.run(2, jobs.run, folder, run_dir, words, 5) == [0, 0]
    before = {row["step"]: row for row in jobs.rows(run_dir)}
    assert ranks.run(2, jobs.run, folder, run_dir, words, 1) == [3, 3]
    again = jobs.rows(run_dir)[-1]
    assert again["step"] == 4
    assert again["goodput/lost_repeated_s"] == pytest.approx(
        before[5]["goodput/useful_s"] - before[3]["goodput/useful_s"]
    )
    assert again["goodput/lost_repeated_s"] > 0
    lost = sum(value for key, value in again.items() if key.startswith("goodput/lost_"))
    assert again["goodput/useful_s"] + lost <= again["goodput/wall_s"]

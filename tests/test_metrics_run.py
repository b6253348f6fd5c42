"""Measurements of real runs, started as people start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from test_command_line import SMALL, command, environment, execute, folder, rows, wait_until, workers_of  # noqa: F401


def test_rows_add_up_and_traces_name_phases_and_axes(folder):  # noqa: F811
    words = ("train.steps=5", "profile.steps=[3,4]", "profile.ranks=[1]", "checkpoint.every=2", "strategy=zero3")
    done = execute(folder, *SMALL, *words, "launch.nproc_per_node=2", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    found = rows(folder / "run")
    for row in found[1:]:
        parts = sum(row[f"time/{phase}_s"] for phase in ("forward_backward", "data", "sync", "optimizer"))
        assert parts == pytest.approx(row["time/step_s"], rel=0.03)
        assert row["throughput/tokens_per_s"] * row["time/step_s"] == pytest.approx(8 * 16)
    assert [row["samples"] for row in found] == [8, 16, 24, 32, 40]
    lost = [found[-1][f"goodput/lost_{name}_s"] for name in ("first_step", "data", "checkpoint", "validation", "restart")]
    assert found[-1]["goodput/useful_s"] + sum(lost) <= found[-1]["goodput/wall_s"]
    assert found[-1]["goodput/lost_validation_s"] > 0
    predicted = json.loads((folder / "run" / "layout.json").read_text())["predicted"]
    assert found[-1]["comm/shard/bytes"] == pytest.approx(predicted["comm/shard/bytes"], rel=0.001)
    assert "warning" not in done.stderr
    assert os.listdir(folder / "run" / "traces") == ["rank-1-steps-3-4.json"]
    events = json.loads((folder / "run" / "traces" / "rank-1-steps-3-4.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"forward_backward", "agree", "update", "shard: all_gather", "shard: reduce_scatter"} <= names


def test_unmeasured_communication_leaves_no_rows_of_it(folder):  # noqa: F811
    done = execute(folder, *SMALL, "metrics.communication=false", "launch.nproc_per_node=2", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert not any(key.startswith("comm/") for row in rows(folder / "run") for key in row)


@pytest.mark.soak
def test_a_stopped_rank_is_named_when_the_timeout_is_over(folder):  # noqa: F811
    words = [word for word in SMALL if "steps" not in word]
    launcher = subprocess.Popen(
        command(*words, "train.steps=1000000", "launch.nproc_per_node=2", "launch.timeout=12", "hydra.run.dir=run"),
        cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    run_dir = str(folder / "run")
    metrics = folder / "run" / "metrics.jsonl"
    stopped = 0
    try:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step")
        workers = workers_of(run_dir)
        (stopped,) = [pid for pid in workers if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
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


@pytest.mark.parametrize(("word", "said"), [
    ("profile.steps=[3]", "profile.steps=[3] must be the first and the last step"),
    ("profile.steps=[1,9]", "train.steps=4"),
    ("profile.ranks=[-1]", "profile.ranks=[-1] must be ranks"),
])  # fmt: skip
def test_a_trace_that_cannot_be_made_is_refused(folder, word, said):  # noqa: F811
    refused = execute(folder, *SMALL, word)
    assert refused.returncode == 2
    assert said in refused.stderr

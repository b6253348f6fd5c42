"""The command as people run it: real processes, real signals, one run directory."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest

SMALL = (
    "data=text", "data.path=corpus.txt", "data.cache_dir=cache", "train.seq_len=16", "train.global_batch_size=8", "train.steps=4",
    "model.n_layers=1", "model.dim=32", "model.hidden_dim=32", "train.validate_every=2", "train.validate_batches=1",
)  # fmt: skip
MODELS = """
import os

import torch
from torch import nn


class Bigram(nn.Module):
    def __init__(self, width=16, fail_on=-1, fail_at=1):
        super().__init__()
        self.embedding = nn.Embedding(320, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(width, 320)
        self.fail_on, self.fail_at, self.calls = fail_on, fail_at, 0

    def forward(self, tokens):
        self.calls += not tokens.is_meta
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.calls == self.fail_at and torch.distributed.get_rank() == self.fail_on and first_life:
            raise RuntimeError("the model has had enough")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus.txt").write_text(
        "".join(f"{i} times {i} is {i * i}\n" for i in range(20000))
    )
    (tmp_path / "my_models.py").write_text(MODELS)
    return tmp_path


def command(*words, launcher=("-m", "parallel2d.train")):
    return [sys.executable, *launcher, *words]


def environment():
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "PARALLEL2D"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def execute(folder, *words, **options):
    return subprocess.run(
        command(*words, **options),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )


def rows(run_dir: Path):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def run_dirs(folder: Path):
    return sorted(path.parent for path in folder.rglob("metrics.jsonl"))


def losses(run_dir: Path):
    return [row["loss"] for row in rows(run_dir)]


def wait_until(condition, what, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {seconds} s"
        time.sleep(0.05)


def test_a_run_has_one_run_dir_with_everything_in_it(folder):
    alone = execute(folder, *SMALL, "launch.nproc_per_node=2", "hydra.run.dir=alone")
    assert alone.returncode == 0, alone.stderr
    run_dir = folder / "alone"
    assert {"metrics.jsonl", "tensorboard", "layout.json", "train.log", ".hydra"} <= set(
        os.listdir(run_dir)
    )
    assert len(list(folder.rglob(".hydra"))) == 1
    found = rows(run_dir)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert "time/first_step_s" in found[0]
    assert "throughput/tokens_per_s" not in found[0]
    assert {
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "data/batch_hash",
        "memory/peak_rss_gib",
    } <= found[0].keys()
    assert {
        "throughput/tokens_per_s",
        "time/step_s",
        "time/data_s",
        "throughput/model_tflops_per_rank",
    } <= found[1].keys()
    assert "validation/loss" in found[1]
    assert found[-1]["tokens"] == 4 * 8 * 16
    assert found[-1]["loss"] < found[0]["loss"]
    layout = json.loads((run_dir / "layout.json").read_text())
    assert layout["mesh"] == {"replicate": 1, "shard": 2, "tensor": 1}
    assert {"parameters", "hosts", "predicted"} <= layout.keys()
    for text in ("replica 0  [0 1]", "run dir", "first step", "step 4/4"):
        assert text in alone.stderr


@pytest.mark.slow
def test_a_job_runs_without_standard_streams(folder):
    words = command(*SMALL, "launch.nproc_per_node=2", "hydra.run.dir=alone")
    without = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"]
    closed = subprocess.run([*without, *words], cwd=folder, env=environment(), timeout=150)
    assert closed.returncode == 0
    assert len(rows(folder / "alone")) == 4


@pytest.mark.slow
def test_torchrun_gives_one_run_dir_and_the_same_losses(folder):
    alone = execute(folder, *SMALL, "launch.nproc_per_node=2", "hydra.run.dir=alone")
    assert alone.returncode == 0, alone.stderr
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "parallel2d.train",
    )
    started = execute(folder, *SMALL, "strategy=zero3", launcher=torchrun)
    assert started.returncode == 0, started.stderr
    (other,) = [path for path in run_dirs(folder) if path != folder / "alone"]
    assert len(list(folder.rglob(".hydra"))) == 2
    assert losses(other) == pytest.approx(losses(folder / "alone"), rel=1e-5)
    assert [row["data/batch_hash"] for row in rows(other)] == [
        row["data/batch_hash"] for row in rows(folder / "alone")
    ]

    refused = execute(folder, *SMALL, "-m", "strategy=ddp,zero3", launcher=torchrun)
    assert refused.returncode != 0
    assert refused.stderr.count("-m is refused here") == 1


@pytest.mark.slow
def test_a_sweep_over_a_custom_model_gives_every_job_its_own_complete_run(folder):
    words = (
        "model=custom",
        "model.target=my_models:Bigram",
        "model.arguments.width=32",
        "strategy=ddp,zero3",
    )
    small = [word for word in SMALL if not word.startswith("model.")]
    done = execute(
        folder, "-m", *small, *words, "launch.nproc_per_node=2", "metrics.console=silent"
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "step" not in done.stderr  # metrics.console=silent
    first, second = run_dirs(folder)
    assert losses(first) == pytest.approx(losses(second), rel=1e-5)
    strategies = [
        re.search(r"strategy:\n  name: (\w+)", (d / ".hydra/config.yaml").read_text())[1]
        for d in (first, second)
    ]
    assert strategies == ["ddp", "zero3"]
    assert losses(first)[-1] < losses(first)[0]


@pytest.mark.slow
def test_a_workers_exception_is_told_once_with_the_logs_of_the_others(folder):
    words = (
        "model=custom",
        "model.target=my_models:Bigram",
        "model.arguments.fail_on=1",
        "hydra.run.dir=run",
    )
    small = [word for word in SMALL if not word.startswith("model.")]
    failed = execute(folder, *small, *words, "launch.nproc_per_node=2", "metrics.console=silent")
    assert failed.returncode == 1
    assert failed.stderr.count("RuntimeError: the model has had enough") == 1
    assert "rank 1 failed first" in failed.stderr
    assert str(folder / "run" / "logs") in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SIGINT to the launcher", "SIGKILL of the launcher"])
def test_ending_the_launcher_ends_every_worker(folder, way):
    words = [word for word in SMALL if "steps" not in word]
    launcher = subprocess.Popen(
        command(
            *words, "train.steps=1000000", "launch.nproc_per_node=2", "hydra.run.dir=run",
        ),
        cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    metrics = folder / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step")
    workers = jobs.ranks_of(launcher.pid)
    assert len(workers) == 2
    launcher.send_signal(signal.SIGINT if "SIGINT" in way else signal.SIGKILL)
    _, said = launcher.communicate(timeout=20)
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers),
        "the end of all workers",
        10,
    )
    if "SIGINT" in way:
        assert launcher.returncode == 130
        assert "interrupted; all workers have ended" in said
        assert "Traceback" not in said


def test_a_taken_port_is_one_clear_message(folder):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rank = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        failed = subprocess.run(
            command(*SMALL),
            cwd=folder,
            env={**environment(), **rank},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert failed.returncode != 0
    assert f"localhost:{port} is in use" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_read_only_run_directory_is_one_clear_message(folder):
    (folder / "run").write_text("")
    failed = execute(folder, *SMALL, "hydra.run.dir=run/inside")
    assert failed.returncode == 2
    assert failed.stderr.startswith("parallel2d: hydra.run.dir")
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.slow
def test_own_loop_example_runs():
    example = Path(__file__).parent.parent / "examples" / "own_loop.py"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        command(str(example), launcher=launcher),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(found) == 20
    assert found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_told_to_end_saves_and_goes_on_later(folder, told):
    words = [word for word in SMALL if "steps" not in word]
    run = [
        *words,
        "train.steps=100000",
        "checkpoint.every=0",
        "launch.nproc_per_node=2",
        "hydra.run.dir=run",
    ]
    launcher = subprocess.Popen(
        command(*run),
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step")
    launcher.send_signal(told)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, said
    (saved,) = os.listdir(folder / "run" / "checkpoints")
    assert f"asked to stop; saved {saved}" in said
    step = int(saved.removeprefix("step-"))
    assert rows(folder / "run")[-1]["step"] == step
    steps = [f"train.steps={step + 3}" if "train.steps" in word else word for word in run]
    later = execute(folder, *steps)
    assert later.returncode == 0, later.stderr
    assert f"resumed after step {step}" in later.stderr
    assert [row["step"] for row in rows(folder / "run")] == list(range(1, step + 4))


@pytest.mark.slow
def test_restarted_workers_go_on_in_the_run_dir_of_their_first_life(folder):
    torchrun = (
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "parallel2d.train",
    )  # fmt: skip
    small = [
        word for word in SMALL if not word.startswith(("model.", "train.steps", "train.validate"))
    ]
    words = [
        "model=custom",
        "model.target=my_models:Bigram",
        "model.arguments.fail_on=1",
        "model.arguments.fail_at=6",
    ]
    done = subprocess.run(
        command(*small, *words, "train.steps=8", "checkpoint.every=2", "checkpoint.asynchronous=false", launcher=torchrun),
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run_dir,) = run_dirs(folder)
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 9))
    assert "resumed after step 4" in done.stderr
    assert len(list(run_dir.glob("metrics.before-restart-*.jsonl"))) == 1

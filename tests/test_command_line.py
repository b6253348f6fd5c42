"""The command as people run it: real processes, real signals, one run directory."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jobs
import psutil
import pytest
from jobs import rows
from listening import listeners

NOBODY = 65534
SMALL = (
    "data=text",
    "data.path=corpus.txt",
    "data.cache_dir=cache",
    "train.seq_len=16",
    "train.global_batch_size=8",
    "train.steps=4",
    "model.n_layers=1",
    "model.dim=32",
    "model.hidden_dim=32",
    "train.validate_every=2",
    "train.validate_batches=1",
)
MODELS = """
import os

import torch
from torch import nn


class Bigram(nn.Module):
    def __init__(self, width=16, fail_on=-1, fail_at=1, hungry=False):
        super().__init__()
        self.embedding = nn.Embedding(320, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(width, 320)
        self.fail_on, self.fail_at, self.hungry, self.calls = fail_on, fail_at, hungry, 0

    def forward(self, tokens):
        self.calls += not tokens.is_meta
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.calls == self.fail_at and torch.distributed.get_rank() == self.fail_on and first_life:
            if self.hungry:
                torch.empty(2**60, dtype=torch.uint8)
            raise RuntimeError("the model has had enough")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
"""


@pytest.fixture
def folder(folder):
    (folder / "my_models.py").write_text(MODELS)
    return folder


def command(*words, launcher=("-m", "parallel2d.train")):
    return [sys.executable, *launcher, *words]


def environment():
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "PARALLEL2D"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def execute(folder, *words, **options):
    return jobs.run_python(*command(*words, **options)[1:], cwd=folder, env=environment())


def run_dirs(folder: Path):
    return sorted(path.parent for path in folder.rglob("metrics.jsonl"))


def losses(run_dir: Path):
    return [row["loss"] for row in rows(run_dir)]


@pytest.fixture
def open_place():
    """A temporary folder that every user may write to."""
    place = tempfile.mkdtemp(prefix="parallel2d-test-")
    os.chmod(place, 0o1777)
    yield Path(place)
    shutil.rmtree(place)


def as_nobody(act) -> str:
    """Return the message of the OSError that ``act`` raises for another user; empty if it
    succeeds.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        except OSError as error:
            os.write(writer, (error.strerror or "failed").encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def test_a_run_has_one_run_dir_with_everything_in_it_and_opens_no_port(folder, open_place):
    words = command(*SMALL, "launch.nproc_per_node=2", "hydra.run.dir=alone")
    variables = {**environment(), "TMPDIR": str(open_place)}
    variables.pop("XDG_RUNTIME_DIR", None)
    options = {"stderr": subprocess.PIPE, "text": True}
    launcher = subprocess.Popen(words, cwd=folder, env=variables, **options)
    held = jobs.wait_for(lambda: launcher.poll() is not None or jobs.ranks_of(launcher.pid))[0]
    os.kill(held, signal.SIGSTOP)
    (store,) = open_place.glob("parallel2d-*/launcher-*/store")
    assert listeners(str(launcher.pid)) == set()
    if os.getuid() == 0:
        assert as_nobody(lambda: (open_place / "mine").touch()) == ""
        connect = socket.socket(socket.AF_UNIX).connect
        assert as_nobody(lambda: connect(str(store))) == "Permission denied"
        assert as_nobody(lambda: os.listdir(store.parent)) == "Permission denied"
        move = store.parent.parent.rename
        assert as_nobody(lambda: move(open_place / "moved")) == "Operation not permitted"
    os.kill(held, signal.SIGCONT)
    said = launcher.communicate(timeout=150)[1]
    assert launcher.returncode == 0, said
    assert not list(open_place.glob("parallel2d-*"))

    run_dir = folder / "alone"
    assert {"metrics.jsonl", "tensorboard", "layout.json", "train.log", ".hydra"} <= set(
        os.listdir(run_dir)
    )
    assert len(list(folder.rglob(".hydra"))) == 1
    found = rows(run_dir)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert "time/first_step_s" in found[0]
    assert "throughput/tokens_per_s" not in found[0]
    always = ("loss", "grad_norm", "learning_rate", "data/batch_hash", "memory/peak_rss_gib")
    for key in always:
        assert key in found[0]
    for key in (*always, "throughput/tokens_per_s", "time/data_s", "validation/loss"):
        assert key in found[1]
    assert found[-1]["tokens"] == 4 * 8 * 16
    assert found[-1]["loss"] < found[0]["loss"]
    layout = json.loads((run_dir / "layout.json").read_text())
    assert layout["mesh"] == {"replicate": 1, "shard": 2, "tensor": 1}
    assert {"parameters", "hosts", "predicted"} <= layout.keys()
    for text in ("replica 0  [0 1]", "run dir", "first step", "step 4/4"):
        assert text in said


@pytest.mark.slow
def test_a_sweep_and_a_restarted_torchrun_give_complete_runs_with_equal_losses(folder):
    words = [w for w in SMALL if not w.startswith(("model.", "train.steps", "train.validate"))]
    words += ["model=custom", "model.target=my_models:Bigram", "train.steps=8"]
    words += ["checkpoint.asynchronous=false", "checkpoint.every=2"]
    both = ["strategy=ddp,zero3", "launch.nproc_per_node=2", "metrics.console=silent"]
    sweep = execute(folder, "-m", *words, *both)
    assert sweep.returncode == 0, sweep.stderr
    assert "Traceback" not in sweep.stderr
    assert "step" not in sweep.stderr
    first, second = run_dirs(folder)
    strategies = [
        re.search(r"strategy:\n  name: (\w+)", (each / ".hydra/config.yaml").read_text())[1]
        for each in (first, second)
    ]
    assert strategies == ["ddp", "zero3"]
    assert losses(first) == pytest.approx(losses(second), rel=1e-5)
    assert losses(first)[-1] < losses(first)[0]

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train = ["-m", "parallel2d.train"]
    failing = ["model.arguments.fail_on=1", "model.arguments.fail_at=6"]
    done = execute(folder, *words, *failing, launcher=[*torchrun, "--max-restarts=1", *train])
    assert done.returncode == 0, done.stderr
    (other,) = [path for path in run_dirs(folder) if path not in (first, second)]
    assert len(list(folder.rglob(".hydra"))) == 3
    assert [row["step"] for row in rows(other)] == list(range(1, 9))
    assert losses(other) == pytest.approx(losses(first), rel=1e-5)
    hashes = [[row["data/batch_hash"] for row in rows(each)] for each in (first, other)]
    assert hashes[0] == hashes[1]
    assert "resumed after step 4" in done.stderr
    assert len(list(other.glob("metrics.before-restart-*.jsonl"))) == 1


@pytest.mark.slow
def test_stopped_run_continues_from_its_checkpoint(folder):
    """Started twice, asked to stop, interrupted, killed; in the end without standard streams."""
    words = [word for word in SMALL if "steps" not in word]
    run = [*words, "checkpoint.every=0", "launch.nproc_per_node=2", "hydra.run.dir=run"]
    metrics = folder / "run" / "metrics.jsonl"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command(*run, "train.steps=1000000"),
            cwd=folder,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_step(step: int) -> None:
        def exists() -> bool:
            return metrics.exists() and len(rows(folder / "run")) >= step

        jobs.wait_for(exists)

    first = start()
    wait_for_step(2)
    launcher = start()  # a second start of the same command: the first saves and gives way
    _, said = first.communicate(timeout=60)
    assert first.returncode == 2, said
    saved = max(os.listdir(folder / "run" / "checkpoints"))
    newest = f"its newest checkpoint is {folder / 'run' / 'checkpoints' / saved}"
    assert re.search(f"parallel2d: another start .* takes over .*/run: .* {newest}", said)
    assert "Traceback" not in said
    step = int(saved.removeprefix("step-"))
    wait_for_step(step + 2)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert re.search("another start .* trains in .*; waiting until it has saved and ended", said)
    assert f"resumed after step {step}" in said
    assert not (folder / "run" / "takeover.json").exists()
    assert launcher.returncode == 75, said
    saved = max(os.listdir(folder / "run" / "checkpoints"))
    assert f"asked to stop; saved {saved}" in said
    step = int(saved.removeprefix("step-"))
    assert rows(folder / "run")[-1]["step"] == step

    for number in (signal.SIGINT, signal.SIGKILL):
        launcher = start()
        jobs.wait_for(lambda pid=launcher.pid: len(jobs.ranks_of(pid)) == 2)
        if number == signal.SIGINT:
            wait_for_step(step + 2)
        workers = jobs.ranks_of(launcher.pid)
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=20)
        for pid in workers:
            jobs.wait_for(lambda pid=pid: not psutil.pid_exists(pid))
        if number == signal.SIGINT:
            assert launcher.returncode == 130
            assert f"resumed after step {step}" in said
            saved = max(os.listdir(folder / "run" / "checkpoints"))
            assert f"parallel2d: interrupted; saved {saved}" in said
            assert "continue    python -m parallel2d.train" in said
            assert "Traceback" not in said
            step = int(saved.removeprefix("step-"))
            assert rows(folder / "run")[-1]["step"] == step

    without = ["bash", "-c", 'umask 0; exec "$@" <&- >&- 2>&-', "bash"]
    last = [*without, *command(*run, f"train.steps={step + 3}")]
    assert subprocess.run(last, cwd=folder, env=environment(), timeout=150).returncode == 0
    assert [row["step"] for row in rows(folder / "run")] == list(range(1, step + 4))
    assert (folder / "run" / "summary.json").stat().st_mode & 0o002 == 0


def test_unsupported_settings_under_torchrun_give_one_clear_message(folder):
    """Use a port of another process; once the port is free, run a sweep."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}

    def refused(*words):
        variables = {**environment(), **rank, "MASTER_PORT": str(port)}
        failed = jobs.run_python(*command(*SMALL, *words)[1:], cwd=folder, env=variables)
        assert failed.returncode != 0
        assert "Traceback" not in failed.stderr
        return failed.stderr

    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"localhost:{port} is in use" in refused()
    assert refused("-m", "strategy=ddp,zero3").count("-m is refused here") == 1


def test_read_only_run_directory_gives_one_clear_message(folder):
    (folder / "run").write_text("")
    failed = execute(folder, *SMALL, "hydra.run.dir=run/inside")
    assert failed.returncode == 2
    assert failed.stderr.startswith("parallel2d: hydra.run.dir")
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.slow
def test_custom_loop_example_runs(tmp_path):
    example = Path(__file__).parent.parent / "examples" / "own_loop.py"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = execute(tmp_path, str(example), launcher=launcher)
    assert done.returncode == 0, done.stderr
    found = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(found) == 20
    assert found[-1] < found[0]

"""Replicas that fail and rejoin while the others train, on one machine; several nodes are in
`test_faults`.
"""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import jobs
import losing_outer_steps
import psutil
import pytest
import torch
import torch.distributed as dist
from test_faults import compare, with_communicators
from test_launch import SLOWLY, command

from parallel2d.base.config.composition import compose
from parallel2d.base.errors import ConfigError
from parallel2d.base.launcher_environment import RankIdentity
from parallel2d.base.replicas.communicators import Tree, connected_gloo
from parallel2d.base.replicas.events import Events, post
from parallel2d.base.store.client import StoreClient
from parallel2d.base.store.secret import new_secret
from parallel2d.base.store.server import StoreServer
from parallel2d.launching.replica_loss import LossPolicy, choose

# While a joining replica receives the state: until the test has killed a rank
HELD = """
import os
from parallel2d.base.replicas import Quorum
plain = Quorum.link
def held(self, joiner):
    send, end = plain(self, joiner), time.monotonic() + 60
    def slowly(tensor, root=0):
        open("gets-" + os.environ["RANK"], "w").close()
        while not os.path.exists("go") and time.monotonic() < end:
            time.sleep(0.02)
        return send(tensor, root)
    return send and slowly
Quorum.link = held
"""


# The state comes in many units, each of which takes some time. Notes them by rank.
STREAMED = """
import os
from parallel2d.training import state_transfer
state_transfer.SMALL_BYTES, state_transfer.UNIT_BYTES = 0, 2**14
read = state_transfer._Unit.read
def slowly(self):
    with open("sent-" + os.environ["RANK"], "a") as file:
        file.write("unit ")
    time.sleep(0.005)
    return read(self)
state_transfer._Unit.read = slowly
"""


# The first donor fails before its last message, which belongs to a committed step.
LAST = """
import signal
message = state_transfer._message
def dying(kind):
    if kind == state_transfer._BUFFERS and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return message(kind)
state_transfer._message = dying
"""


@contextlib.contextmanager
def training(folder, *words, hooks=SLOWLY):
    """A job that trains slowly inside, and must have saved when it is asked to stop at the end."""
    (folder / "slowly.py").write_text(hooks)
    words = ("train.steps=1000000", "train.hooks=[slowly:Slowly]", "metrics.log_every=1", *words)
    with open(folder / "said.txt", "w") as said:
        job = subprocess.Popen(command(folder, *words), cwd=folder, stderr=said)
    try:
        yield job
        started = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 75, (folder / "said.txt").read_text()
        _, left = psutil.wait_procs(started, timeout=10)
        assert left == [], "processes outlive the launcher"
    finally:
        if job.poll() is None:
            job.kill()  # its ranks end with it
            job.wait()
    rows = jobs.rows(folder / "run")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    starts = (folder / "run/segments.jsonl").read_text().splitlines()
    assert len(starts) == 1, "some rank was there all the time"


def rows_so_far(folder, newest=0):
    """Return the complete rows; of the ``newest`` lines, or of all lines for 0."""
    path = folder / "run/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines[-newest:] if line.endswith("\n")]


def last_row(folder):
    """Its step, and the replicas that were there; zeros before the first."""
    row = [{"step": 0, "replicas/present": 0}, *rows_so_far(folder, 2)][-1]
    return row["step"], row["replicas/present"]


def differs(folder, *words):
    """Return the difference of the losses from one process; all steps and batches are the same."""
    found = jobs.rows(folder / "run")
    words += ("launch.nproc_per_node=1", "checkpoint.enabled=false", "metrics.log_every=1")
    words += (f"train.steps={len(found)}", f"hydra.run.dir={folder}/alone")
    subprocess.run(command(folder, *words), cwd=folder, check=True, capture_output=True)
    return compare(found, jobs.rows(folder / "alone"))


def kill(job, *victims):
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
            if process.name() in [f"rank {each}" for each in victims]:
                process.kill()


COPIED = ("checkpoint.memory_every=4",)
INT8 = ("optimizer.state_dtype=int8",)
MUON, INT4 = ("optimizer=muon",), ("sync.wire=int4", "sync.warmup=0")
OWN = ("optimizer=custom", "optimizer.target=owned:build", "optimizer.weight_decay=0")
DDP_EMA, HYBRID_EMA = ("strategy=ddp", "train.ema=0.9"), ("strategy=hybrid", "train.ema=0.9")
OWNED = """
import torch
from parallel2d import whole_matrices
def build(groups):
    return whole_matrices(torch.optim.Adafactor, groups, split=True, lr=0.01, weight_decay=0.0)
"""


# Traffic between replicas in addition to gradients, and overrides of a job of one process with the
# same losses
@pytest.mark.parametrize(
    ("sent", "alone", "communicator"),
    [
        pytest.param(COPIED, (), "gloo", id="gloo-gradients"),
        pytest.param(COPIED, (), "Hanging", id="Hanging-gradients"),
        *with_communicators("Hanging", MUON, MUON, name="muon"),
        *with_communicators("gloo", OWN, OWN, name="own"),
        *with_communicators("gloo", INT8, INT8, name="int8"),
        *with_communicators("Hanging", INT4, (), name="int4"),
    ],
    indirect=["communicator"],
)
def test_survivors_continue_after_a_replica_fails_and_it_rejoins(
    tmp_path, communicator, sent, alone
):
    """Rank 0, which writes and logs, is killed: rank 1 continues in the same process, and takes
    over these duties.
    """
    (tmp_path / "owned.py").write_text(OWNED)
    more = ("launch.max_restarts=3", "sync.compare_every=1", "launch.nproc_per_node=2")
    with training(tmp_path, "strategy=ddp", *more, *sent) as job:
        jobs.wait_for(lambda: last_row(tmp_path) > (5, 1))
        *_, second = jobs.ranks_of(job.pid)
        kill(job, 0)
        jobs.wait_for(lambda: rows_so_far(tmp_path)[-1]["replicas/joined"] == 1)
        assert second in jobs.ranks_of(job.pid)
    rows = jobs.rows(tmp_path / "run")
    last = rows[-1]
    assert last["replicas/joined"] == 1
    assert last["replicas/repeated_samples"] in (0, 8), "in a step, or between two"
    assert 0.04 < last["replicas/lost_s"] < 20
    shares = set()
    for row, later in itertools.pairwise(rows):
        if "time/step_s" not in later:
            continue
        live = later["replicas/present"]
        shares.add(live / 2)
        per_rank = later["throughput/tokens_per_s_per_rank"]
        assert per_rank * live == pytest.approx(later["throughput/tokens_per_s"])
        useful = later["goodput/useful_s"] - row["goodput/useful_s"]
        lost = later["goodput/lost_replicas_s"] - row["goodput/lost_replicas_s"]
        step_s = later["time/step_s"] - later["time/data_s"]
        assert useful + lost == pytest.approx(step_s, rel=1e-3, abs=1e-6)
        # Failed attempts are not useful.
        lost_s = later["replicas/lost_s"] - row["replicas/lost_s"]
        attempts_s = step_s - useful / (live / 2)
        assert -1e-6 <= attempts_s <= lost_s + 1e-6
        if later["replicas/repeated_samples"] > row["replicas/repeated_samples"]:
            assert attempts_s > 0
    assert shares == {0.5, 1.0}
    log = (tmp_path / "run/train.log").read_text()
    assert re.search(r"replicas   .* with 1 of 2 replicas; live: \[1\]", log)
    assert re.search(r"training from step \d+ with 2 of 2 replicas; live: \[0, 1\]", log)
    text = (tmp_path / "said.txt").read_text()
    assert "Its replica restarts, the others continue" in text
    assert "Traceback" not in text
    if alone:
        assert differs(tmp_path, "strategy=ddp", *alone) < 1e-10


# Each tower runs for other sequences, so only on some ranks.
TOWERS = """
import torch
from torch import nn

class Tower(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))

    def dummy_forward(self):
        return self(self[0].weight.new_zeros(1, 16))

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(320, 16), nn.Linear(16, 320)
        self.vision, self.audio, self.video = Tower(), Tower(), Tower()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for rest, tower in enumerate((self.vision, self.audio, self.video)):
            has_input = tokens[:, :1, None] % 7 == rest
            if has_input.any():
                x = x + has_input * tower(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
"""


@pytest.mark.parametrize("strategy", ["ddp", "hybrid"])
@pytest.mark.parametrize("communicator", with_communicators("gloo"), indirect=True)
def test_conditional_modules_keep_the_losses_without_a_replica(tmp_path, communicator, strategy):
    (tmp_path / "towers.py").write_text(TOWERS)
    words = ("model=custom", "model.target=towers:Towers", "launch.nproc_per_node=4")
    words += ("model.conditional={vision: replicate, audio: root, video: always}",)
    words += (f"strategy={strategy}", "train.global_batch_size=8", "sync.compare_every=2")
    more = ("mesh.shard=2",) if strategy == "hybrid" else ()
    with training(tmp_path, *words, *more, "launch.max_restarts=3", "optimizer=adamw") as job:
        jobs.wait_for(lambda: last_row(tmp_path)[0] > 5)
        replicas = last_row(tmp_path)[1]
        kill(job, 3)
        jobs.wait_for(lambda: rows_so_far(tmp_path)[-1]["replicas/joined"] == 1)
        at, _ = last_row(tmp_path)
        jobs.wait_for(lambda: last_row(tmp_path)[0] > at + 4)
        # Before SIGTERM, after which one replica may leave a step before the others.
        assert last_row(tmp_path)[1] == replicas
    rows = jobs.rows(tmp_path / "run")
    assert min(row["replicas/present"] for row in rows) == replicas - 1
    assert differs(tmp_path, *words, "optimizer=adamw") < 1e-10
    for row, expected in zip(rows, jobs.rows(tmp_path / "alone"), strict=True):
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)


# Rank 3 is killed in the middle of an update that needs the parts of all ranks
SPLIT = """
from parallel2d.parallel.sync.methods.owned_parameters import OwnedParameters
gather, updates = OwnedParameters.after_update, []
def dying(self):
    updates.append(self)
    if (os.environ["RANK"], os.environ.get("PARALLEL2D_LIFE", "0"), len(updates)) == ("3", "0", 11):
        os.kill(os.getpid(), 9)
    gather(self)
OwnedParameters.after_update = dying
"""


@pytest.mark.parametrize(
    ("sent", "communicator"),
    [
        *with_communicators("Hanging", ("optimizer=sgd",), name="sgd"),
        *with_communicators("gloo", ("sync.wire=int4", "sync.warmup=2"), name="adamw, int4"),
        *with_communicators("Hanging", INT8, name="int8"),
    ],
    indirect=["communicator"],
)
def test_all_replicas_roll_back_for_state_of_a_failed_replica(tmp_path, communicator, sent):
    """Roll back to in-memory checkpoints in the same processes: the history equals a job without
    kills.
    """
    words = ["strategy=hybrid_full", "launch.nproc_per_node=4", "mesh.replicate=2", "mesh.shard=2"]
    words += ["sync.compare_every=1", *sent]
    more = ["launch.max_restarts=3", "checkpoint.memory_every=4"]
    with training(tmp_path, *words, *more, hooks=SLOWLY + "import os" + SPLIT) as job:
        jobs.wait_for(lambda: last_row(tmp_path)[0] > 18)
        first = jobs.ranks_of(job.pid)
        kill(job, 0)
        at, _ = last_row(tmp_path)
        jobs.wait_for(lambda: last_row(tmp_path)[0] > at + 6)
        assert jobs.ranks_of(job.pid)[2:] == first[2:]
    found, log = jobs.rows(tmp_path / "run"), (tmp_path / "run/train.log").read_text()
    assert re.findall(r"rolled back from step \d+ to (\d+)", log)[0] == "8"
    assert "restarts, the others wait" in (tmp_path / "said.txt").read_text()
    assert found[-1]["replicas/joined"] == log.count("rolled back from step ") == 2
    assert found[-1]["replicas/repeated_samples"] <= 2 * 4 * 8, "at most memory_every steps a kill"
    assert not list((tmp_path / "run").glob("metrics.before-restart-*"))
    words += [f"train.steps={len(found)}", "metrics.log_every=1", f"hydra.run.dir={tmp_path}/quiet"]
    subprocess.run(command(tmp_path, *words), cwd=tmp_path, check=True, capture_output=True)
    expected = jobs.rows(tmp_path / "quiet")
    assert compare(found, expected) < 1e-10
    norms = [[row["grad_norm"] for row in rows] for rows in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10, abs=0)


@pytest.mark.slow
def test_replica_fails_while_a_joining_replica_receives_the_state(tmp_path, communicator):
    """The donor, the joining replica, or both fail; the history equals one process."""
    words = ["strategy=ddp", "train.global_batch_size=12", "sync.compare_every=1"]

    def counts():
        return [row["replicas/present"] for row in rows_so_far(tmp_path)]

    more = ["launch.max_restarts=30", "launch.nproc_per_node=3"]
    with training(tmp_path, *words, *more, hooks=SLOWLY + HELD) as job:
        for first, *then in ((2, 0), (2, 2), (1, 1, 2)):
            jobs.wait_for(lambda: last_row(tmp_path)[1] == 3)
            for name in (f"gets-{first}", "go"):
                (tmp_path / name).unlink(missing_ok=True)
            before, present = len(counts()), 2 - len({*then} - {first})
            kill(job, first)
            jobs.wait_for((tmp_path / f"gets-{first}").exists)
            kill(job, *then)
            (tmp_path / "go").touch()
            jobs.wait_for(lambda before=before, present=present: present in counts()[before:])
        jobs.wait_for(lambda: last_row(tmp_path)[1] == 3)
    assert differs(tmp_path, *words) < 1e-12


@pytest.mark.parametrize(
    ("victims", "words", "communicator"),
    [
        pytest.param((), DDP_EMA, "gloo", id="gloo-ema"),
        pytest.param((), DDP_EMA, "Hanging", id="Hanging-ema", marks=pytest.mark.slow),
        *with_communicators("gloo", (0,), ("strategy=ddp", *MUON), name="donor, muon"),
        *with_communicators("Hanging", (2,), ("strategy=ddp",), name="joining"),
        *with_communicators("gloo", LAST, ("strategy=ddp",), name="last message"),
        *with_communicators("gloo", (), (*HYBRID_EMA, *MUON), name="hybrid, muon"),
        *with_communicators("Hanging", (0,), HYBRID_EMA, name="hybrid, donor"),
    ],
    indirect=["communicator"],
)
def test_others_train_while_the_state_streams(tmp_path, communicator, victims, words):
    """A replica receives its state during several steps. Meanwhile its donor or the replica itself
    may fail; the history equals one process.
    """
    replicas = 3 if victims else 2
    shards = 2 if "strategy=hybrid" in words else 1
    more = ["launch.max_restarts=30", f"launch.nproc_per_node={replicas * shards}"]
    words = ["train.global_batch_size=12", "sync.compare_every=1", "train.validate_every=5", *words]
    if shards == 2:
        more += ["mesh.shard=2"]
    last = replicas * shards - 1
    hooks = SLOWLY + STREAMED
    if victims == LAST:
        hooks, victims = hooks + LAST, ()

    def sent():
        return sum(len(path.read_text().split()) for path in tmp_path.glob("sent-*"))

    with training(tmp_path, *words, *more, hooks=hooks) as job:
        jobs.wait_for(lambda: last_row(tmp_path) > (5, replicas - 1))
        kill(job, last)
        jobs.wait_for(lambda: sent() > 5)
        for victim in victims:
            before = len(rows_so_far(tmp_path))
            kill(job, victim)
            jobs.wait_for(lambda at=before: len(rows_so_far(tmp_path)) > at + 3)
        if LAST in hooks:
            jobs.wait_for(lambda: last_row(tmp_path)[1] == 1)
        jobs.wait_for(lambda: last_row(tmp_path)[1] == replicas)
        step, _ = last_row(tmp_path)
        jobs.wait_for(lambda: last_row(tmp_path)[0] > step + 5)
    assert differs(tmp_path, *words) < 1e-10
    rows = jobs.rows(tmp_path / "run")
    assert rows[-1]["replicas/joined"] == (2 if LAST in hooks or 0 in victims else 1)
    partly = [row["replicas/present"] < replicas for row in rows]
    assert sum(partly) > 10, "the others have trained meanwhile"


@pytest.mark.parametrize("communicator", with_communicators("Hanging"), indirect=True)
def test_stopped_rank_delays_other_ranks_until_the_heartbeat_timeout(tmp_path, communicator):
    """A rank that continues before the timeout stays in the quorum. Without it the others continue
    after the timeout, and its replica rejoins.
    """
    words = ("launch.nproc_per_node=2", "strategy=ddp", "launch.max_restarts=3")
    with training(tmp_path, *words, "launch.heartbeat_timeout_s=2") as job:
        jobs.wait_for(lambda: last_row(tmp_path) > (5, 1))
        ranks = jobs.ranks_of(job.pid)
        stopped = psutil.Process(ranks[1])
        for _ in range(2):
            stopped.suspend()
            time.sleep(1.2)
            step, _ = last_row(tmp_path)
            stopped.resume()
            jobs.wait_for(lambda at=step: last_row(tmp_path)[0] >= at + 3)
        for _ in range(20):  # ten times slower
            stopped.suspend()
            time.sleep(0.45)
            stopped.resume()
            time.sleep(0.05)
        row = rows_so_far(tmp_path, 2)[-1]
        assert (row["replicas/present"], row["replicas/joined"], row["replicas/lost_s"]) == (
            2,
            0,
            0,
        )
        assert jobs.ranks_of(job.pid) == ranks
        begin = time.monotonic()
        stopped.suspend()
        jobs.wait_for(lambda: last_row(tmp_path)[1] == 1)
        assert time.monotonic() - begin > 2
        jobs.wait_for(lambda: last_row(tmp_path)[1] == 2)
        assert not stopped.is_running()
        assert ranks[0] in jobs.ranks_of(job.pid)
        kill(job, 1)  # just before the request to stop: the launcher still posts the failure
    assert jobs.rows(tmp_path / "run")[-1]["replicas/joined"] == 1
    assert differs(tmp_path, "strategy=ddp") < 1e-10


class Faults:
    """Faults of the ranks of one job, at random moments. ``spared``: ranks that get none."""

    def __init__(self, job, folder, draw, shards, spared):
        self.job, self.folder, self.draw = job, folder, draw
        self.shards, self.spared = shards, spared

    def _victim(self, but=()):
        """Return the process id of a rank, and the ranks of other replicas."""
        least = 2 if self.spared else 2 * self.shards  # the others may not have restarted yet
        jobs.wait_for(lambda: len({*jobs.ranks_of(self.job.pid)} - {*but}) >= least)
        ranks = jobs.ranks_of(self.job.pid)
        lost = self.draw.choice(
            [at for at in range(self.spared, len(ranks)) if ranks[at] not in but]
        )
        first = lost - lost % self.shards
        return ranks[lost], {*ranks[:first], *ranks[first + self.shards :]}

    def _signal(self, number, but=()):
        pid, others = self._victim(but)
        os.kill(pid, number)
        return pid, others

    def kill(self):
        return self._signal(signal.SIGKILL)[1]

    def stop_briefly(self):
        pid, _ = self._signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(0.5, 2))
        os.kill(pid, signal.SIGCONT)
        return set(jobs.ranks_of(self.job.pid))

    def stop(self):
        """Its launcher kills the rank after the heartbeat timeout."""
        return self._signal(signal.SIGSTOP)[1]

    def kill_second_during_recovery(self):
        pid, others = self._signal(signal.SIGKILL)
        time.sleep(self.draw.random() / 2)
        return others & self._signal(signal.SIGKILL, but=(pid,))[1]

    def kill_second_during_a_join(self):
        count = len(jobs.ranks_of(self.job.pid))
        pid, others = self._signal(signal.SIGKILL)
        jobs.wait_for(lambda: pid not in jobs.ranks_of(self.job.pid))
        jobs.wait_for(lambda: len(jobs.ranks_of(self.job.pid)) == count)
        joining = set(jobs.ranks_of(self.job.pid)) - others
        time.sleep(self.draw.uniform(0, 3))
        return others & self._signal(signal.SIGKILL, but=joining)[1]


@pytest.mark.soak
@pytest.mark.parametrize("communicator", ["gloo", "Hanging", "Revoking"], indirect=True)
@pytest.mark.parametrize("strategy", ["ddp", "hybrid"])
def test_ranks_killed_at_random_keep_the_losses(tmp_path, communicator, strategy):
    """PARALLEL2D_KILLS (100) of them. With ddp also of two replicas at once and during a join; rank
    0 is alive all the time, and its descriptors, threads and memory do not grow.
    """
    shards = {"ddp": 1, "hybrid": 2}[strategy]
    words = ["launch.nproc_per_node=4", "optimizer=sgd"]
    kinds = ["kill"] * 7 + ["stop", "stop_briefly"]
    if strategy == "ddp":
        words = ["launch.nproc_per_node=3", "train.global_batch_size=12", "optimizer=adamw"]
        kinds += ["kill_second_during_recovery", "kill_second_during_a_join"] * 2
    seed = int(os.environ.get("PARALLEL2D_SEED", str(random.randrange(10**6))))
    draw, used = random.Random(seed), []
    words += [f"strategy={strategy}", "sync.compare_every=3", "optimizer.lr=1e-4"]
    with training(tmp_path, "launch.max_restarts=1000", *words) as job:
        jobs.wait_for(lambda: last_row(tmp_path)[0] > 5)
        ranks = jobs.ranks_of(job.pid)
        replicas, first = len(ranks) // shards, psutil.Process(ranks[0])
        faults = Faults(job, tmp_path, draw, shards, spared=strategy == "ddp")
        for number in range(int(os.environ.get("PARALLEL2D_KILLS", "100"))):
            jobs.wait_for(lambda: last_row(tmp_path)[1] >= 2)
            time.sleep(draw.random() / 2)
            step, _ = last_row(tmp_path)
            kind = draw.choice(kinds)
            if "second" in kind:
                jobs.wait_for(lambda: last_row(tmp_path)[1] == replicas)
            others = getattr(faults, kind)()
            # Some rows may be of the quorum before the fault.
            jobs.wait_for(lambda at=step: last_row(tmp_path)[0] >= at + 4)
            assert others <= set(jobs.ranks_of(job.pid)), f"{kind}, PARALLEL2D_SEED={seed}"
            if strategy == "ddp" and number >= 5:
                used.append((first.num_fds(), first.num_threads(), first.memory_info().rss >> 20))
        jobs.wait_for(lambda: last_row(tmp_path)[1] == replicas)
    assert differs(tmp_path, *words) < 1e-10, seed
    rows = zip(jobs.rows(tmp_path / "run"), jobs.rows(tmp_path / "alone"), strict=True)
    for row, expected in rows:
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10), seed
    log = (tmp_path / "run/train.log").read_text()
    seconds = sorted(map(float, re.findall(r"recomputed after ([\d.]+) s", log)))
    print(
        f"\n{row['step']} steps, {row['replicas/joined']:.0f} joins, lost in {len(seconds)} of them"
    )
    print("(s, median and 95 %):", statistics.median(seconds), seconds[int(len(seconds) * 0.95)])
    assert statistics.median(seconds) < 1.0
    if used:
        print("descriptors, threads and MiB of rank 0:", *used)
        for begin, end, growth in zip(used[0], used[-1], (10, 10, 100), strict=True):
            assert end <= begin + growth, seed


def test_jobs_that_cannot_continue_after_a_replica_failure_are_found_at_start():
    def policy(*words, device="cpu", launcher="nodes", **variables):
        config = compose(["launch.max_restarts=1", "strategy=hybrid", *words]).config
        identity = RankIdentity(0, 8, 0, 0, 2, launcher)
        environment = {"TORCHELASTIC_MAX_RESTARTS": "1", **variables}
        return choose(config, identity, device_type=device, environment=environment)

    must, nccl = "launch.on_replica_loss=continue", "launch.replica_backend=nccl2"
    assert policy() == LossPolicy(True, "gloo")
    assert policy("launch.on_replica_loss=restart") == LossPolicy(False)
    assert not policy(TORCHELASTIC_MAX_RESTARTS="0").continues
    unchecked = policy(device="cuda")
    assert not unchecked.continues
    assert "--only replica-loss --write" in unchecked.reason
    assert policy("cluster.replica_backend=gloo", device="cuda") == LossPolicy(True, "gloo")
    assert policy("cluster.replica_backend=nccl2", device="cuda") == LossPolicy(True, "nccl2")
    assert policy(must, nccl, device="cuda") == LossPolicy(True, "nccl2")
    for words, given, reason in (
        ((), {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ((), {"launcher": "torchrun"}, "torchrun starts all ranks again"),
        ((nccl,), {}, "nccl2 needs NVIDIA GPUs"),
        ((nccl,), {"device": "cuda", "NCCL_COMM_BLOCKING": "1"}, "NCCL_COMM_BLOCKING=1 blocks"),
        ((nccl, "strategy=ddp"), {"device": "cuda"}, "several GPUs of one host are in one"),
        (("compile=block", "compile.backend=cudagraphs"), {"device": "cuda"}, "CUDA graphs"),
        ((), {"TORCHELASTIC_MAX_RESTARTS": "0"}, "launch.max_restarts=0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            policy(must, *words, **given)
    assert "DETAIL" in policy(TORCH_DISTRIBUTED_DEBUG="DETAIL").reason


def test_tree_of_16_members_all_reduces_over_few_connections():
    """After one member has abandoned the quorum, the collective fails on all members."""
    size, timeout = 16, timedelta(seconds=60)
    store, trees = dist.HashStore(), [Tree() for _ in range(16)]
    connected_gloo(dist.HashStore(), 0, 1, timeout)  # creates the network device
    before = len(os.listdir("/proc/self/fd"))

    def connect(rank):
        trees[rank].use(trees[rank].connect(store, rank, size, timeout, lambda: False))

    def start(rank, operation):
        options, tensor = dist.AllreduceOptions(), torch.tensor([rank, 2**rank])
        options.reduceOp = operation
        return trees[rank].start("allreduce", [tensor], options), tensor

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(connect, range(size)))
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * (size - 1)
    operations = {dist.ReduceOp.SUM: [120, 2**16 - 1], dist.ReduceOp.MIN: [0, 1]}
    for operation, expected in operations.items():
        for collective, tensor in [start(rank, operation) for rank in range(size)]:
            assert not collective.has_failed()
            assert tensor.tolist() == expected
    trees[5].abort()
    flying = {rank: start(rank, dist.ReduceOp.SUM)[0] for rank in range(size) if rank != 5}
    while flying:
        done = [rank for rank, collective in flying.items() if collective.is_done()]
        for rank in done:
            assert flying.pop(rank).has_failed()
            trees[rank].abort()
    with pytest.raises(RuntimeError, match="no quorum is connected"):
        start(0, dist.ReduceOp.SUM)


def test_replica_events_have_one_order_on_all_ranks():
    """Four ranks write at once; no event is lost, and all ranks read the same events."""
    server = StoreServer.at("127.0.0.1", 0, secret := new_secret())
    store = StoreClient(server.address, secret)
    try:
        with ThreadPoolExecutor(20) as pool:
            members = itertools.product(range(4), range(5))
            list(pool.map(functools.partial(post, store, "dead"), members))
        post(store, "join", (1, 5))
        post(store, "break", 7)
        read = [Events(store), Events(store)]
        for events in read:
            events.read_all()
            assert events.dead == set(itertools.product(range(4), range(5)))
            assert (events.joining, events.broken, events.count) == ({(1, 5)}, 7, 22)
        assert not read[0].read(0.05)
    finally:
        store.close()
        server.close()


@pytest.mark.parametrize("communicator", with_communicators("gloo"), indirect=True)
def test_custom_loop_continues_after_a_replica_fails(tmp_path, communicator):
    """Both replicas fail once, the first of them with the rank that prints. Steps and losses equal
    one start.
    """
    script = (Path(__file__).parent.parent / "examples/own_loop.py").read_text()
    script = script.replace("STEPS, GLOBAL", "_, GLOBAL")
    script = script.replace("def build_model", "STEPS = 80\n\n\ndef build_model", 1)
    (tmp_path / "plain.py").write_text(script)
    # The rank is killed before it is missed in the current step.
    mean = "            mean = reduce(total)"
    script = script.replace(mean, f"            __import__('time').sleep(0.1)\n{mean}")
    script = script.replace('print(f"step', 'print(replicas.data_ranks, f"step', 1)
    (tmp_path / "slow.py").write_text(script)

    def start(name):
        words = ["run", "launch.nproc_per_node=4", "launch.max_restarts=5", str(tmp_path / name)]
        with open(tmp_path / f"{name}.txt", "w") as said:
            started = [sys.executable, "-m", "parallel2d.launch", *words]
            return subprocess.Popen(started, stdout=said, stderr=subprocess.STDOUT)

    def lines(name):
        text = (tmp_path / f"{name}.txt").read_text()
        return re.findall(r".*step +\d+ loss .*\n", text)

    def ranks_by_line():
        return "".join(line[0] for line in lines("slow.py"))

    def losses(name):
        return dict(re.findall(r"step +(\d+) loss ([\d.]+)", "".join(lines(name))))

    assert start("plain.py").wait(300) == 0
    job = start("slow.py")
    try:
        for done, (step, victim) in enumerate(((6, 2), (40, 1)), 1):
            jobs.wait_for(lambda step=step: str(step) in losses("slow.py"))
            before = jobs.ranks_of(job.pid)
            os.kill(before[victim], signal.SIGKILL)
            others = slice(0, 2) if victim > 1 else slice(2, 4)
            jobs.wait_for(lambda old=before: len({*old} & {*jobs.ranks_of(job.pid)}) == 2)
            jobs.wait_for(lambda n=done: re.fullmatch(f"(4+2+){{{n}}}4+", ranks_by_line()))
            assert before[others] == jobs.ranks_of(job.pid)[others]
        assert job.wait(300) == 0, (tmp_path / "slow.py.txt").read_text()
    finally:
        job.kill()
    text = (tmp_path / "slow.py.txt").read_text()
    assert text.count("Its replica restarts, the others continue") == 2
    assert "Traceback" not in text
    found, expected = losses("slow.py"), losses("plain.py")
    assert list(found) == list(expected) == [str(step) for step in range(1, 81)]
    expected = pytest.approx([*map(float, expected.values())], abs=1.1e-4)
    assert [*map(float, found.values())] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "victim", "step", "moment"),
    [
        ({}, 0, 8, "send"),
        ({"fragments": 2, "delay": 2}, 1, 11, "forward"),
        ({"fragments": 2, "delay": 2}, 0, 10, "send"),
    ],
)
def test_outer_steps_omit_unsent_updates_of_a_failed_replica(
    tmp_path, communicator, more, victim, step, moment
):
    """The other replicas compute its samples, and it rejoins with the shared parameters."""
    sync = {"name": "diloco", "every": 4, **more}
    words = ["launch.nproc_per_node=3", "launch.max_restarts=5", losing_outer_steps.__file__]
    told = json.dumps([sync, victim, step, moment])
    subprocess.run(
        [sys.executable, "-m", "parallel2d.launch", "run", *words, str(tmp_path), told],
        check=True,
        capture_output=True,
        timeout=120,
    )
    survivor = (victim + 1) % 3
    notes = [*map(json.loads, (tmp_path / f"{survivor}.0").read_text().splitlines())]
    assert [each[0] for each in notes] == list(range(1, len(notes) + 1))
    # The exchange that the failure has interrupted is repeated without the failed replica. Its start
    # may be before the failure is noticed: in the same step, or, where an exchange completes only
    # when the host polls it (here after the delay), in the step before.
    interrupted = {"send": step, "forward": step - 1 if communicator == "Hanging" else None}[moment]
    if interrupted is not None:
        shared = notes[interrupted - 1][2]
        notes[interrupted - 1][2] = [each for each in shared if each != [victim, 0]]
    assert sorted({len(each[1]) for each in notes}) == [2, 3]
    assert [victim, 1] in notes[-1][2]
    for rank in range(3):
        found, begins = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for name, value in losing_outer_steps.reference(sync, notes, begins).items():
            assert found[name] == pytest.approx(value, rel=1e-10, abs=1e-12), (rank, name)

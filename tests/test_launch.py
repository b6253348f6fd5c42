"""Launching without a cluster: restarts and their limits, sizes of a mesh with changing nodes,
listening addresses.
"""

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jobs
import psutil
import pytest
import torch
from jobs import wait_for

from parallel2d.base.config import CompileConfig, LaunchConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.exit_codes import LOST
from parallel2d.base.files import private_folders as folders
from parallel2d.base.launcher_environment import AGENT
from parallel2d.base.store import client as store_client
from parallel2d.base.store.address import answered_within
from parallel2d.base.store.client import StoreClient
from parallel2d.base.store.secret import new_secret
from parallel2d.base.store.server import StoreServer
from parallel2d.launching import launcher, shared_job
from parallel2d.launching import rendezvous_round as rounds
from parallel2d.launching.agent import LONGEST_PAUSE_S, Restarts, launcher_environment
from parallel2d.launching.failures import (
    RankError,
    RankFailure,
    WorkersFailed,
    first_failure,
    note_waiting,
    read_waiting,
)
from parallel2d.launching.rendezvous import find_rendezvous, own_rendezvous
from parallel2d.launching.rendezvous_round import JobDone
from parallel2d.parallel.mesh import Topology
from parallel2d.parallel.mesh_sizes import MeshSpec
from parallel2d.parallel.parallelize.compilation import compile_blocks
from parallel2d.parallel.sync.engine import accumulation
from parallel2d.training.metrics import late_ranks

LIBRARY = Path(os.__file__).parent
SMALL = (
    "data=text",
    f"data.path={LIBRARY}/json/*.py",
    "train.seq_len=16",
    "train.global_batch_size=8",
    "model.n_layers=1",
    "model.dim=32",
    "model.hidden_dim=48",
    "train.validate_every=0",
    "metrics.console=silent",
    "metrics.tensorboard=false",
    "precision=fp64",
    "scheduler=constant",
    "launch.nproc_per_node=2",
)


SLOWLY = """
import time
from parallel2d.training.hooks import Hook

class Slowly(Hook):
    def step(self, run, step, metrics):
        time.sleep(0.03)
"""


# Python runs it at the start of each process. It notes each call of the functions that parse,
# check and resolve.
COUNTING = """
import importlib.machinery
import os
import sys

WATCHED = {
    "omegaconf.omegaconf": ("OmegaConf", "to_object"),
    "parallel2d.base.config.checks": (None, "validated"),
    "parallel2d.parallel.mesh_sizes": ("MeshSpec", "resolve"),
}


def count(module):
    owner, name = WATCHED[module.__name__]
    owner = getattr(module, owner) if owner else module
    function = getattr(owner, name)

    def counted(*args):
        result = function(*args)
        if name != "to_object" or type(result).__name__ == "TrainConfig":
            with open(os.environ["CALLS"], "a") as file:
                file.write(f"{os.getpid()} {os.environ.get('RANK', 'none')} {name}\\n")
        return result

    setattr(owner, name, counted)


class Counting(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in WATCHED:
            return None
        spec = super().find_spec(name, path, target)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), count(module))
        return spec


sys.meta_path.insert(0, Counting)
"""


def command(folder: Path, *words: str) -> list[str]:
    places = [f"hydra.run.dir={folder}/run", f"data.cache_dir={folder}/cache"]
    dropped = "model." if "model=custom" in words else ()
    small = [word for word in SMALL if not word.startswith(dropped)]
    return [sys.executable, "-m", "parallel2d.train", *small, *places, *words]


def test_consecutive_failures_are_bounded_and_reset_by_progress():
    reached = iter([5, 5, 5, 5, 9, 9])
    restarts = Restarts(3, lambda: next(reached))
    assert [restarts.after_failure() for _ in range(3)] == [0.0, 1.0, 2.0]
    assert restarts.after_failure() is None
    assert restarts.after_failure() == 0.0, "a step further than any before"
    assert Restarts(0, lambda: 1).after_failure() is None
    patient = Restarts(100, lambda: 1)
    assert max(patient.after_failure() or 0.0 for _ in range(50)) == LONGEST_PAUSE_S


def kill_server(process: subprocess.Popen[str], run_dir: Path) -> None:
    """Kills the process that forks ranks, after some more steps."""

    def steps() -> int:
        return len(jobs.rows(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0

    begun = steps()
    wait_for(lambda: steps() > begun + 12 or process.poll() is not None)
    ranks = jobs.ranks_of(process.pid)
    os.kill(psutil.Process(ranks[1]).ppid(), signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))


def test_first_killed_worker_is_the_cause():
    """The cause is not a rank that lost a connection because of it, nor a rank that the launcher
    has ended since.
    """
    server, killed, ended = (RankFailure(0, code, None) for code in (LOST, -9, -15))
    error = RankError("Connection closed by peer", 1.0, False, False)
    cut, own = (RankFailure(1, 1, replace(error, text=text)) for text in (error.text, "mine"))
    assert first_failure([server, ended]) == server
    assert first_failure([cut, killed, ended]) == killed
    assert first_failure([killed, own, cut]) == own


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        ((), {"none": 2}),  # the launcher, and the process that checks the job
        pytest.param(TORCHRUN, {}, marks=pytest.mark.slow),
    ],
)
def test_each_process_parses_the_config_and_resolves_the_mesh_once(tmp_path, launcher, processes):
    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CALLS": str(tmp_path / "calls")}
    words = command(tmp_path, "train.steps=1", "checkpoint.enabled=false")
    if launcher:
        words = [sys.executable, *launcher, *words[1:]]
        words.remove("launch.nproc_per_node=2")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = Counter((tmp_path / "calls").read_text().splitlines())
    assert set(calls.values()) == {1}, calls
    found = [tuple(call.split()[1:]) for call in calls]
    for name in ("to_object", "resolve"):
        ranks = Counter(rank for rank, called in found if called == name)
        assert ranks == {"0": 1, "1": 1, **processes}
    # Only the process that composes checks the keys against each other.
    assert [name for _, name in found].count("validated") == 1


@pytest.mark.slow
def test_killed_workers_restart_and_resume(tmp_path):
    """SIGKILL of the server on one machine: from in-memory checkpoints the run ends with the
    losses and batches of an undisturbed run. Its sync method keeps state between steps: outer
    momentum, error feedback, a fragment in flight.
    """
    method = [
        "mesh.replicate=2",
        "sync=diloco",
        "sync.every=7",
        "sync.fragments=2",
        "sync.delay=3",
        "sync.wire=int4",
    ]
    words = command(tmp_path, "train.steps=80", *method)
    (tmp_path / "slowly.py").write_text(SLOWLY)
    copied = ["checkpoint.every=50", "checkpoint.memory_every=4", "launch.max_restarts=5"]
    copied += ["train.hooks=[slowly:Slowly]"]
    process = subprocess.Popen([*words, *copied], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    kill_server(process, tmp_path / "run")
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors
    assert (
        "exited with code 255, as ranks do when the process that forks them is ended. Restarting"
        in errors
    )

    quietly = [*words, "checkpoint.enabled=false", f"hydra.run.dir={tmp_path}/quiet"]
    again = subprocess.run(quietly, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    disturbed, quiet = jobs.rows(tmp_path / "run"), jobs.rows(tmp_path / "quiet")
    assert [row["step"] for row in disturbed] == list(range(1, 81))
    for key in ("data/batch_hash", "loss"):
        assert [row[key] for row in disturbed] == pytest.approx(
            [row[key] for row in quiet], rel=1e-10, abs=0
        )


@pytest.mark.slow
def test_broken_job_is_restarted_a_bounded_number_of_times(tmp_path):
    """Its exception is shown once, with the logs of the other ranks."""
    (tmp_path / "broken.py").write_text(
        "import torch\nclass Broken(torch.nn.Linear):\n    def forward(self, x):\n"
        "        if torch.distributed.get_rank() == 1 and not x.is_meta: raise ValueError('this "
        "model is broken')\n"
        "        return torch.nn.functional.one_hot(x, 320).to(self.weight) @ self.weight\n"
        "def build():\n    return Broken(320, 320, bias=False)\n"
    )
    words = [word for word in command(tmp_path) if not word.startswith("model.")]
    words += ["model=custom", "model.target=broken:build", "launch.max_restarts=1"]
    words += ["checkpoint.enabled=false"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: this model is broken\n") == 1
    assert "rank 1: ValueError: this model is broken. Restarting; 0 attempts left" in done.stderr
    assert "rank 1 failed first" in done.stderr
    assert "1 restarts made no progress" in done.stderr
    assert str(tmp_path / "run" / "logs") in done.stderr


def test_node_range_is_parsed():
    for nnodes, expected in ((1, (1, 1)), ("4", (4, 4)), ("2:4", (2, 4)), ("3:3", (3, 3))):
        assert LaunchConfig(nnodes=nnodes).node_range == expected
    for nnodes in ("0", "4:2", "x", "1:", ":2", "1:2:3", -3, 1.5):
        with pytest.raises(ConfigError, match="launch.nnodes="):
            _ = LaunchConfig(nnodes=nnodes).node_range


def test_shard_groups_keep_their_size_when_nodes_leave():
    hosts = Topology.equal_hosts
    whole = MeshSpec().resolve_elastic("hybrid", hosts(4, 4), 4)
    assert whole == MeshSpec().resolve("hybrid", hosts(4, 4))
    assert "3 of 4 nodes" in MeshSpec().resolve_elastic("hybrid", hosts(3, 4), 4).notes[0]
    for spec, strategy, nodes, before, expected in (
        (MeshSpec(), "hybrid", 3, 4, (3, 4, 1)),
        # On one host a fresh job would split it into two replicas of half the size.
        (MeshSpec(replicate=2, shard=4), "hybrid", 1, 2, (1, 4, 1)),
        (MeshSpec(replicate=4, tensor=2), "hybrid", 1, 2, (2, 1, 2)),
        (MeshSpec(shard=8), "zero3", 1, 2, (1, 4, 1)),
        (MeshSpec(replicate=8), "ddp", 1, 2, (4, 1, 1)),
    ):
        found = spec.resolve_elastic(strategy, hosts(nodes, 4), before)
        assert (found.replicate, found.shard, found.tensor) == expected


def test_ranks_divide_the_processors_and_have_at_least_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    threads = [launcher._defaults(nproc, "lo")["OMP_NUM_THREADS"] for nproc in (1, 3, 9)]
    assert threads == ["8", "2", "1"]


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("PARALLEL2D_SECRET", new_secret())
    return os.environ["PARALLEL2D_SECRET"]


@pytest.fixture
def server(secret):
    server = StoreServer.at("127.0.0.1", 0, secret)
    yield server
    server.close()


def test_job_name_is_reusable_after_its_job_ended(server):
    settings = LaunchConfig(nnodes="1:2", rdzv_endpoint=server.address, job_id="mine")
    with pytest.raises(ConfigError, match="no other node reaches"):
        find_rendezvous(settings)
    alone = LaunchConfig(nnodes="1", rdzv_endpoint=server.address, job_id="mine")
    first = find_rendezvous(alone)
    assert (first.server, first.name) == (None, "mine-0")
    assert find_rendezvous(alone).name == "mine-0", "a node that joins the same job"
    first.end()
    assert find_rendezvous(alone).name == "mine-1"


@pytest.fixture
def job(tmp_path):
    """Functions of a job with frequent heartbeats: ``launcher(size)`` makes a launcher,
    ``join(*launchers)`` joins at once, ``wait_for(condition, *launchers)`` waits while these poll.
    """
    at = own_rendezvous(str(tmp_path))
    often = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 0.6}
    settings = LaunchConfig(nnodes="2:3", rendezvous_timeout=30.0, **often)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        stack.callback(at.close)

        def join(*launchers, call_s=0.1, late=None):
            joined = [
                pool.submit(
                    each.join, call_s, late or partial(each.next, after_failure=False), False
                )
                for each in launchers
            ]
            return lambda seconds=30: [each.result(seconds) for each in joined]

        def look(holds, launcher):
            wait_for(lambda: launcher.poll() or holds())

        def launcher(size):
            return stack.enter_context(rounds.Round(at, size, settings))

        yield SimpleNamespace(launcher=launcher, join=join, wait_for=look, rendezvous=at)


def test_rendezvous_starts_at_max_nodes_or_last_call(job):
    gone = rounds.State(members=(rounds.Launcher("127.0.0.1", "gone", 1, 1, 1),))
    job.rendezvous.store.set("parallel2d/beat/parallel2d/gone", "7")  # its heartbeat never changes
    job.rendezvous.store.set("parallel2d/round/parallel2d", json.dumps(gone))
    first, second, third = map(job.launcher, (2, 1, 2))
    job.join(first, second, third, call_s=1000.0)()
    assert first.state == second.state == third.state
    assert [*itertools.chain(*map(first.ranks_of, first.state.members))] == list(range(5))
    job.rendezvous.store.set(f"{first.state.prefix}of-a-rank", "1")
    third.__exit__()
    job.join(first, second)()  # the timed-out launcher is not waited for
    job.wait_for(lambda: third.state == first.state == second.state, third)
    assert [each.takes_part for each in (first, second, third)] == [True, True, False]
    assert not job.rendezvous.store.check([f"{third.state.old_prefix}of-a-rank"])
    for how, error in (("failed", WorkersFailed), ("well", JobDone)):
        job.rendezvous.end(how)
        with pytest.raises(error):
            job.join(third)()


def test_rendezvous_round_waits_for_live_nodes_only(job):
    first, second, third = map(job.launcher, (1, 1, 1))
    job.join(first, second)()
    joined = job.join(first, third, call_s=0.0)
    job.wait_for(lambda: second.is_open and len(second.state.members) == 2, second)
    with pytest.raises(TimeoutError):
        joined(0.5)
    second.__exit__()
    joined()
    assert third.state.members == tuple(sorted((first.own, third.own)))


def test_node_rank_is_taken_over_and_the_previous_owner_notices(job):
    first, second, third = map(job.launcher, (2, 2, 2))
    job.join(first, second)()
    second.__exit__()
    job.wait_for(lambda: first.has_timed_out(second.own.name), first)
    place = first.state.members.index(second.own)
    job.join(third, late=lambda: third.with_place(place))()
    job.wait_for(lambda: first.takes_part and third.own == first.state.members[place], first)
    job.wait_for(lambda: not (second.takes_part or second.is_open), second)


STORE = (sys.executable, "-m", "parallel2d.launch", "store", "--host", "127.0.0.1", "--port")


@pytest.fixture
def store_command(secret):
    """The process of a separate store, and its address."""
    with subprocess.Popen([*STORE, "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("store listens on 127.0.0.1:")
            yield process, line.rpartition("=")[2].strip()
        finally:
            process.kill()


@pytest.fixture
def silent_store(store_command, secret, monkeypatch):
    """A client of a stopped store process: it keeps its connections and never answers."""
    process, address = store_command
    client = StoreClient(address, secret, timeout_s=60.0)
    client.set("before", "here")
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    monkeypatch.setattr(
        store_client, "_ANSWER_S", 1.0
    )  # time that its threads retry after it has ended
    threads = threading.enumerate()
    yield client
    process.kill()
    # The output of the processes is printed in this test.
    for waiting in set(threading.enumerate()) - set(threads):
        waiting.join(10.0)


def test_silent_store_does_not_block_launchers(silent_store, secret, tmp_path, monkeypatch):
    begin = time.monotonic()
    assert answered_within(0.2, lambda: silent_store.check(["before"]), "silence") == "silence"
    monkeypatch.setattr(late_ranks, "_PATIENCE_WITH_STORE_S", 0.2)
    hosts, position = ["one/0", "two/0"], late_ranks.Position(3, 4, "nothing")
    waiting = late_ranks.HeartbeatMonitor(
        silent_store, 1, hosts, str(tmp_path), 15.0, lambda: position
    )
    silent = "whose store does not answer (stopped, or the machine is gone)"
    assert waiting.explain() == f"late: rank 0 on one, {silent}"
    with pytest.raises(ConfigError, match="no answer within 0.2 s"):
        StoreClient(silent_store.address, secret, timeout_s=0.2)
    assert time.monotonic() - begin < 30


def test_aborted_stuck_rank_logs_its_stack(tmp_path, monkeypatch):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    position = [late_ranks.Position(3, 4, "all_reduce")]
    hosts, store = ["one/0", "two/0"], torch.distributed.HashStore()
    with late_ranks.HeartbeatMonitor(
        store, 0, hosts, str(tmp_path), 1.0, lambda: position[0], note_waiting
    ):
        wait_for(lambda: read_waiting(str(report)))
        failure = RankFailure(0, -signal.SIGABRT, None, read_waiting(str(report)))
        late = "late: rank 1 on two, which timed out"
        assert str(failure).startswith(
            f"killed (SIGABRT) while rank 0 waited in all_reduce of step 3; {late}"
        )
        position[0] = late_ranks.Position(4, 0, "all_reduce")
        wait_for(lambda: not read_waiting(str(report)))


def test_compile_cache_is_in_a_folder_of_the_user(tmp_path, monkeypatch):
    def parallelized():
        config = CompileConfig(name="block", backend="eager")
        compile_blocks([("0", torch.nn.Linear(2, 2))], config, None)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    folder = tmp_path / f"parallel2d-compiled-{os.getuid()}"
    folder.mkdir(mode=0o777)
    parallelized()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "getuid", lambda: 7)
    with pytest.raises(ConfigError, match=f"{folder}: another user owns it; set TORCHINDUCTOR"):
        parallelized()


def test_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    folder = Path(folders.folder_of(os.getpid(), str(tmp_path)))
    folder.parent.mkdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError, match="a link is not followed"):
        folders.make_own(str(folder))
    folder.unlink()
    folder.parent.chmod(0o777)
    folders.make_own(str(folder))
    assert folder.parent.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    job = {"run_dir": "here", "config": "there", "words": [], "records": "", "label": ""}
    (folder / "job.json").write_text(json.dumps(job))
    assert shared_job._recorded_job(str(folder)) == job
    folder.parent.chmod(0o770)
    assert shared_job._recorded_job(str(folder)) is None
    folder.parent.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert shared_job._recorded_job(str(folder)) is None
    with pytest.raises(PermissionError, match="belongs to user"):
        folders.make_own(str(folder))
    squatted = Path(folders.around(str(tmp_path)))
    squatted.mkdir()  # another user's folder, for the user of this test
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with (
        pytest.raises(ConfigError, match="belongs to user .* set TMPDIR to a folder of your own"),
        launcher_environment({}),
    ):
        pass


def test_only_launchers_that_restart_leave_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in ("XDG_RUNTIME_DIR", AGENT, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    job = {"run_dir": "a", "config": "b", "words": ["c"], "records": "d", "label": ""}
    shared_job._record_job(job)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    shared_job._record_job(job)
    assert shared_job._recorded_job(shared_job.launcher_folder()) == job


@pytest.mark.slow
def test_store_command_listens_on_the_given_address(store_command, server):
    process, address = store_command
    settings = LaunchConfig(nnodes="1", rdzv_endpoint=address)
    assert find_rendezvous(replace(settings, job_id="mine")).server is None
    says = "serves more than one job: name yours with launch.job_id"
    with pytest.raises(ConfigError, match=says):
        find_rendezvous(settings)
    process.terminate()
    assert process.wait(timeout=20) == 0
    refused = subprocess.run([*STORE, str(server.port)], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "is in use by another process" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("strategy=ddp", "launch.max_restarts=1")])
def test_descriptors_of_a_rank_grow_by_less_than_half_of_the_ranks(words):
    script = ["-m", "tools.bench.scale", "--ranks", "16", "--words", *words]
    done = jobs.run_python(*script, timeout=400)
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[-1].strip("|").split("|")
    ranks, _seconds, of_rank, of_launcher, *_ = map(float, row)
    assert ranks == 16
    assert 0 < of_rank <= 0.5 * (ranks - 1) + 60
    assert 0 < of_launcher <= 3 * ranks + 60


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "gloo/pair.cc:545] Read error: Connection reset by peer",
            "rank 1 lost the connection to another rank, which has ended: torchrun names it below\n",
        ),
        ("a fault of its own", "rank 1 failed first:\nTraceback"),
    ],
)
def test_torchrun_rank_reports_a_failed_peer_in_one_line(raised, said):
    program = f"""
from parallel2d.base.launcher_environment import RankIdentity
from parallel2d.launching import failures
failures._PEER_REPORTS_S = 0.0
with failures.failures_reported_once(RankIdentity(1, 2, 1, 0, 1, "torchrun"), None):
    raise RuntimeError({raised!r})
"""
    done = jobs.run_python("-c", program)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert done.stderr == said or "Traceback" in said


def test_an_interrupted_batch_of_broken_collectives_prints_no_traceback(monkeypatch):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def discard(model):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(accumulation, "_set_up", lambda *_, **__: None)
    monkeypatch.setattr(accumulation, "discard_accumulated", discard)
    with pytest.raises(ValueError, match="of the body"):
        for _ in accumulation.accumulate(torch.nn.Linear(1, 1), [1, 2]):
            raise ValueError("of the body")
    gc.collect()
    assert ignored == []

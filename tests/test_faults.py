"""Faults of two nodes of two ranks: killed workers, lost nodes, partitions, stopped ranks, at
random moments.

A job continues through a sequence of faults until it is asked to stop, and its history is compared
with a single undisturbed process: every global batch once and in order, every loss equal.
``.ci/run`` runs some of the kinds with short time-outs, in one job; ``-m soak`` runs
PARALLEL2D_FAULTS (20) of each of PARALLEL2D_FAULT_KINDS with longer time-outs. Both print the time
until the next step.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jobs
import pytest

from tools.cluster import Cluster, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LIBRARY = Path(os.__file__).parent
WORDS = (
    "data=text",
    f"data.path={LIBRARY}/email/*.py",
    "train.seq_len=16",
    "train.global_batch_size=16",
    "train.steps=1000000",
    "model.n_layers=1",
    "model.dim=32",
    "model.hidden_dim=48",
    "train.validate_every=0",
    "metrics.console=silent",
    "metrics.tensorboard=false",
    "precision=fp64",
    "scheduler=constant",
    "checkpoint.every=10",
    # The last digits of sums depend on the layout, and training amplifies the difference with
    # every step: slowly at a small rate. A lost update would be far larger.
    "optimizer.lr=1e-5",
)


# Leave the cores to starting processes, with few steps to repeat without faults.
SLOWLY = """
import time
from parallel2d.training.hooks import Hook

class Slowly(Hook):
    def step(self, run, step, metrics):
        time.sleep(0.2)
"""


@dataclass(frozen=True)
class Times:
    """Time limits in seconds. A node has failed after 3 s without a heartbeat; both partitions are
    longer.
    """

    timeout: int  # limit of a collective, and thus the longest unnoticed failure of a rank
    short_partition: int  # ends before a collective gives up
    long_partition: int  # every collective has given up when it ends
    between: tuple[int, int]  # steps from one fault to the next: at least, and below


SHORT, LONG = Times(6, 4, 10, (2, 15)), Times(15, 10, 30, (2, 15))
SLACK = 3.0  # times as long as on a machine that does nothing else


class Disturbed:
    """The job on its cluster. Every fault is a method that returns the seconds until the next step
    was done.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        seed: int,
        times: Times,
        method: Sequence[str] = (),
        min_nodes: int = 1,
        late: Sequence[int] = (),
    ) -> None:
        self.cluster, self.folder, self.times = cluster, folder, times
        self.random = random.Random(seed)
        self.away: int | None = None  # a node without its launcher
        (folder / "slowly.py").write_text(SLOWLY)
        words = ["-m", "parallel2d.train", *WORDS, *method, "train.hooks=[slowly:Slowly]"]
        words += [f"data.cache_dir={folder}/cache", f"hydra.run.dir={folder}/run"]
        words += [f"launch.timeout={times.timeout}", "launch.grace_s=20"]
        self.job = cluster.run(words, launcher="own", min_nodes=min_nodes, cwd=folder, late=late)
        self.steps_on(5)
        for node in late:
            self._come_late(node)

    def lines(self) -> list[str]:
        path = self.folder / "run/metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps_on(self, count: int, seen: set[str] | None = None, limit: float = 60 * SLACK) -> None:
        """Waits until ``count`` rows were written that are not in ``seen`` (now by default)."""
        seen = set(self.lines()) if seen is None else seen
        deadline = time.monotonic() + limit
        while len(set(self.lines()) - seen) < count:
            assert any(code is None for code in self.job.poll().values()), (
                f"the job ended\n{self.job.tail()}"
            )
            assert time.monotonic() < deadline, f"no step for {limit} s\n{self.job.tail()}"
            time.sleep(0.02)

    def _come_late(self, node: int) -> None:
        """A node that was not there at the start joins, while the other one trains in the same processes."""
        there = self._ranks(1 - node)
        assert self.nodes_in_use() == 1
        begin = time.monotonic()
        self.job.start(node)
        self._wait_for_both()
        print(f"came late: {time.monotonic() - begin:.1f} s to the second step of both", flush=True)
        assert there == self._ranks(1 - node)

    def _recovered(self, begin: float) -> float:
        time.sleep(1.0)  # a row that was being written
        self.steps_on(1, set(self.lines()))
        return time.monotonic() - begin

    def any_rank(self) -> tuple[int, int]:
        return self.random.randrange(2), self.random.randrange(2)

    def kill_worker(self) -> float:
        begin = time.monotonic()
        self.cluster.kill_worker(*self.any_rank())
        took = self._recovered(begin)
        self._wait_for_both()  # a second failure would leave no live copy of the state
        return took

    def kill_node(self) -> float:
        """The other node continues without this node; then this node rejoins and both continue."""
        node, begin = self.random.randrange(2), time.monotonic()
        self.cluster.kill_node(node)
        seconds = self._recovered(begin)
        jobs.wait_for(lambda: self.nodes_in_use() == 1)
        self.steps_on(self.random.randrange(1, 5))
        self.cluster.restore_node(node)
        self._wait_for_both()
        return seconds

    def stop_worker(self) -> float:
        return self._stop(*self.any_rank())

    def stop_rank_0(self) -> float:
        """The process that holds the ranks' store too: it keeps its connections and never answers."""
        first = json.loads((self.folder / "run/owner.json").read_text())["host"]
        return self._stop([node.name for node in self.cluster.nodes].index(first), 0)

    def _stop(self, node: int, local_rank: int) -> float:
        begin = time.monotonic()
        self.cluster.stop_worker(node, local_rank)
        took = self._recovered(begin)
        self._wait_for_both()  # a faster node continued without the other node
        return took

    def _ranks(self, node: int) -> list[int]:
        return [self.cluster.nodes[node].worker(rank) for rank in range(2)]

    def _pause(self, seconds: float, *, is_short: bool) -> float:
        """Stop all processes of a node, with its launcher. The heartbeat timeout is 3 s."""
        node, begin = self.random.randrange(2), time.monotonic()
        paused, others = self._ranks(node), self._ranks(1 - node)
        processes = self.cluster.nodes[node].processes()
        for process in processes:
            process.suspend()
        time.sleep(seconds)
        for process in processes:
            process.resume()
        self.job.processes[node].wake()
        took = self._recovered(begin)
        self._wait_for_both()
        assert self._ranks(1 - node) == others, "the other node continues in the same processes"
        assert (self._ranks(node) == paused) == is_short, "only a lost replica restarts"
        return took

    def short_pause(self) -> float:
        return self._pause(1.5, is_short=True)

    def long_pause(self) -> float:
        return self._pause(self.random.uniform(6, 20), is_short=False)

    def _partition(self, seconds: float) -> float:
        begin = time.monotonic()
        node = self.random.randrange(2)
        self.cluster.partition(node)
        time.sleep(seconds)
        self.cluster.heal(node)
        took = self._recovered(begin)
        self._wait_for_both()
        return took

    def short_partition(self) -> float:
        return self._partition(self.times.short_partition)

    def long_partition(self) -> float:
        return self._partition(self.times.long_partition)

    def _end_launcher(self, number: int, code: int) -> float:
        """Stop one launcher; the other node continues until `bring_back`."""
        node, begin = self.random.randrange(2), time.monotonic()
        self.job.send_signal(number, node)
        assert self.job.processes[node].wait(60 * SLACK) == code, self.job.tail()
        deadline = time.monotonic() + 10 * SLACK
        while self.cluster.nodes[node].processes():
            assert time.monotonic() < deadline, "its ranks outlive it"
            time.sleep(0.05)
        took = self._recovered(begin)
        jobs.wait_for(lambda: self.nodes_in_use() == 1)
        self.away = node
        return took

    def bring_back(self) -> None:
        """Start an ended launcher again; both nodes continue."""
        if self.away is not None:
            self.job.start(self.away)
            self.away = None
            self._wait_for_both()

    def _wait_for_both(self) -> None:
        deadline = time.monotonic() + 60 * SLACK
        while self.nodes_in_use() != 2:
            assert time.monotonic() < deadline, f"one node is not used\n{self.job.tail()}"
            time.sleep(0.1)
        self.steps_on(2)

    def launcher_stopped(self) -> float:
        return self._end_launcher(signal.SIGTERM, 75)

    def launcher_interrupted(self) -> float:
        return self._end_launcher(signal.SIGINT, 130)

    def launcher_killed(self) -> float:
        return self._end_launcher(signal.SIGKILL, -signal.SIGKILL)

    def store_dies(self) -> float:
        """The store restarts empty, at the same address."""
        begin = time.monotonic()
        self.cluster.kill_store()
        time.sleep(3)
        self.cluster.restore_store()
        took = self._recovered(begin)
        self._wait_for_both()
        return took

    def nodes_in_use(self) -> int:
        if lines := self.lines():
            # Replicas are nodes here; the layout decides if a single replica may fail.
            present = json.loads(lines[-1]).get("replicas/present")
            if present is not None:
                return int(present)
        try:
            hosts = json.loads((self.folder / "run/layout.json").read_text())["hosts"]
        except (OSError, ValueError):
            return 0
        return len(set(hosts))

    def finish(self) -> list[dict[str, object]]:
        """Ask the job to stop: it saves, and every launcher logs the stop."""
        running = [node for node in range(2) if node != self.away]
        for node in running:
            self.job.send_signal(signal.SIGTERM, node)
        codes = self.job.wait(60 * SLACK)
        assert {codes[node] for node in running} == {75}, f"{codes}\n{self.job.tail()}"
        for node in self.cluster.nodes:
            assert node.processes() == [], f"{node.name} still has processes"
            # torch's cache
            names = {path.name for path in node.temporary.iterdir()}
            left = [name for name in names if not name.startswith("torchinductor_")]
            assert left == [], f"{node.name} still has {left} in its temporary folder"
            shared = self.cluster.execute(
                self.cluster.nodes.index(node), ["ls", "-A", "/dev/shm"]
            ).split()
            assert shared == [], f"{node.name} still has {shared} in shared memory"
        left = {path.name for path in self.folder.iterdir()} - {"__pycache__"}
        assert left == {"cache", "run", "slowly.py"}, "one run directory"
        return jobs.rows(self.folder / "run")


def undisturbed(folder: Path, steps: int, method: Sequence[str]) -> list[dict[str, object]]:
    """Run the same job without faults on the number of processes that ``method`` needs."""
    words = [*WORDS, f"data.cache_dir={folder}/cache", f"hydra.run.dir={folder}/quiet", *method]
    words += [f"train.steps={steps}", "checkpoint.enabled=false"]
    # on a machine with other work, two threads wait for each other's turn
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "parallel2d.train", *words]
    done = subprocess.run(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return jobs.rows(folder / "quiet")


def compare(rows: list[dict[str, object]], expected: list[dict[str, object]]) -> float:
    """Every step once and in order, every batch the right one, every loss equal. Returns the
    largest relative difference.
    """
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["data/batch_hash"] for row in rows] == [row["data/batch_hash"] for row in expected]
    worst = max(
        abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(rows, expected, strict=True)
    )  # type: ignore[operator, arg-type]
    assert worst < 1e-9
    return worst


def run(
    folder: Path,
    faults: list[str],
    seed: int,
    times: Times = SHORT,
    method: Sequence[str] = (),
    alone: Sequence[str] = ("launch.nproc_per_node=1",),
    min_nodes: int = 1,
    starts: int | None = None,
    late: Sequence[int] = (),
) -> dict[str, list[float]]:
    """Run a job through faults.

    Args:
        method: overrides of the job.
        alone: overrides of the same job without faults.
        starts: limit of the starts of all ranks together.
        late: nodes that join later.
    """
    took: dict[str, list[float]] = {}
    with Cluster(nodes=2, ranks=2, rate="20mbit", store="outside") as cluster:
        disturbed = Disturbed(cluster, folder, seed, times, method, min_nodes, late)
        for fault in faults:
            disturbed.bring_back()
            took.setdefault(fault, []).append(getattr(disturbed, fault)())
            print(f"{fault}: {took[fault][-1]:.1f} s to the next step", flush=True)
            disturbed.steps_on(disturbed.random.randrange(*times.between))
        rows = disturbed.finish()
    begun = len((folder / "run/segments.jsonl").read_text().splitlines())
    assert begun <= (starts or begun), f"all ranks have started {begun} times"
    worst = compare(rows, undisturbed(folder, len(rows), alone))
    print(
        f"{len(rows)} steps, {len(faults)} faults, largest relative difference of a loss {worst:.1e}",
        flush=True,
    )
    return took


def with_communicators(kept, *values, name=None):
    """Return a case of a test for each communicator: with ``kept`` it is slow, otherwise soak."""
    found = []
    for kind in ("gloo", "Hanging"):
        mark = pytest.mark.slow if kind == kept else pytest.mark.soak
        label = kind if name is None else f"{kind}-{name}"
        found.append(pytest.param(*values, kind, marks=mark, id=label))
    return found


@pytest.mark.parametrize("communicator", with_communicators("gloo"), indirect=True)
def test_failed_ranks_stores_and_launchers_keep_the_losses(tmp_path, communicator):
    faults = ["kill_worker", "stop_rank_0", "short_partition", "store_dies", "kill_node"]
    faults += ["short_pause", "long_pause"]
    # Node 1 joins late. Only a failed store ends all ranks; one node may find the store again
    # before the other.
    run(tmp_path, [*faults, "launcher_interrupted"], seed=2, starts=3, late=[1])


DEAF = """
import os, signal, sys, time

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["GROUP_RANK"] == "1":
        time.sleep(1)
        sys.exit("broken")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    time.sleep(1000)
"""


@pytest.mark.slow
def test_ranks_ignoring_signals_end_after_a_failure_on_another_node(tmp_path):
    """Ranks that wait for a failed rank on an accelerator ignore signals. The grace period is for
    planned ends.
    """
    (tmp_path / "deaf.py").write_text(DEAF)
    words = ["launch.nnodes=2", "launch.insecure=true", "launch.max_restarts=2"]
    with Cluster(2, output=tmp_path / "logs") as cluster:
        words += ["launch.grace_s=600", f"launch.rdzv_endpoint={cluster.endpoint()}", "deaf.py"]
        whole = [
            sys.executable,
            "-m",
            "parallel2d.launch",
            "run",
            "launch.nproc_per_node=1",
            *words,
        ]
        job = cluster.run(whole, launcher="none", cwd=tmp_path)
        assert job.wait(60) == {0: 0, 1: 0}
        logs = [cluster.log_path(node).read_text() for node in (0, 1)]
    assert sum("ranks of another node have failed; restarting" in log for log in logs) == 1


@pytest.mark.soak
def test_split_updates_continue_without_a_node_and_after_it_rejoins(tmp_path, communicator):
    """The other node does not have the full state: it resumes from the newest checkpoint."""
    faults = ["kill_node", "long_partition", "launcher_killed", "launcher_stopped"]
    times = replace(SHORT, between=(2, 6))
    run(tmp_path, faults, 4, times, method=["strategy=hybrid_full"])


# Methods with a history that depends on the number of replicas: failed nodes are waited for.
DILOCO = ["sync=diloco", "sync.every=7"]
ON_TWO_NODES = {
    "int4": ["strategy=hybrid_full", "sync.wire=int4", "sync.warmup=3"],
    "int8": ["sync.wire=int8", "launch.min_replicas=2"],
    "diloco": DILOCO,
    "streaming": [*DILOCO, "sync.fragments=2", "sync.delay=3", "sync.wire=int4"],
}
AS_ON_TWO_NODES = ["launch.nproc_per_node=4", "mesh.replicate=2", "mesh.shard=2"]


@pytest.mark.soak
@pytest.mark.parametrize("name", ON_TWO_NODES)
def test_repeated_faults_keep_losses_of_stateful_sync_methods(tmp_path, communicator, name):
    method = ON_TWO_NODES[name]
    faults = ["kill_worker", "stop_worker", "short_partition", "long_partition"] * 5
    alone = [*method, *AS_ON_TWO_NODES]
    run(tmp_path, faults, 5, method=method, alone=alone, min_nodes=2)


KINDS = (
    "kill_worker,kill_node,stop_worker,short_pause,long_pause,short_partition,long_partition,"
    "launcher_stopped,launcher_killed"
)


@pytest.mark.soak
def test_repeated_faults_at_random_times_keep_losses(tmp_path, communicator):
    each = int(os.environ.get("PARALLEL2D_FAULTS", "20"))
    seed = int(os.environ.get("PARALLEL2D_SEED", str(random.randrange(10**6))))
    print(f"\nPARALLEL2D_SEED={seed}")
    faults = os.environ.get("PARALLEL2D_FAULT_KINDS", KINDS).split(",") * each
    random.Random(seed).shuffle(faults)
    for kind, seconds in run(tmp_path, faults, seed, LONG).items():
        print(
            f"{kind:16} {len(seconds):3} times, {statistics.median(seconds):5.1f} s median, "
            f"{max(seconds):5.1f} s at most"
        )

"""The batch file for Slurm: starts, saves on a signal, re-queues, resumes. These tests run without
Slurm.

`srun` and `scontrol` are programs of this test on PATH. They provide the behaviour that the script
relies on: `srun` starts real tasks with the variables that Slurm sets, passes SIGUSR1 on, and ends
with the highest exit code of a task; `scontrol` writes node names and notes a re-queue. The
subject is the script and the run under it, not Slurm.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import pytest

from parallel2d.launching.network_interface import is_loopback, list_interfaces

SCRIPT = Path(__file__).parent.parent / "tools" / "slurm" / "train.sbatch"
WORDS = [
    "data=text",
    "data.path=corpus.txt",
    "data.cache_dir=cache",
    "train.seq_len=16",
    "train.global_batch_size=8",
    "train.steps=1000000",
    "model.n_layers=1",
    "model.dim=32",
    "model.hidden_dim=48",
    "train.validate_every=0",
    "checkpoint.every=1000",
    "precision=fp64",
    "metrics.console=silent",
    "metrics.tensorboard=false",
]

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
words = sys.argv[1:]
options = {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0)[2:].partition("=")
    options[name] = value
nodes, each = int(options["nodes"]), int(options["ntasks-per-node"])
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
for task in range(nodes * each):
    env = dict(
        os.environ, SLURM_PROCID=str(task), SLURM_LOCALID=str(task % each), SLURM_NODEID=str(task // each),
        SLURM_STEP_ID="0",
        SLURM_STEP_NUM_TASKS=str(nodes * each), SLURM_STEP_NUM_NODES=str(nodes),
        SLURM_STEP_TASKS_PER_NODE=f"{{each}}(x{{nodes}})",
        SLURM_STEP_NODELIST=os.environ["SLURM_JOB_NODELIST"],
    )
    tasks.append(subprocess.Popen(words, env=env))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/bin/bash
case $1 in
show) echo "$3" ;;
*) echo "$*" >> "$NOTES" ;;
esac
"""


class Batch:
    """One start of a job: `sbatch`'s part is to run the script with the job's variables and a log
    that is appended to.
    """

    def __init__(self, folder: Path, life: int, *words: str, **variables: str) -> None:
        programs = folder / "programs"
        programs.mkdir(exist_ok=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        given = ("SLURM_", "TORCHELASTIC_")
        env = {key: value for key, value in os.environ.items() if not key.startswith(given)}
        env |= {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "NOTES": str(folder / "notes"),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": str(4000 + os.getpid() % 9000),
            "SLURM_JOB_NAME": "test",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "127.0.0.1",
            "SLURM_RESTART_COUNT": str(life),
            **variables,
        }
        self.folder, self.log = folder, folder / "log"
        self.run_dir = folder / "runs" / f"test-{env['SLURM_JOB_ID']}"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), *WORDS, *words],
                cwd=folder,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def rows(self) -> list[dict]:
        return jobs.rows(self.run_dir) if (self.run_dir / "metrics.jsonl").exists() else []

    def stop_after_step(self, step: int) -> list[dict]:
        """Ask only the script to stop, as --signal=B:USR1@120 does. Returns the rows of the run."""

        def exists() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return any(row["step"] >= step for row in self.rows())

        try:
            jobs.wait_for(exists, 300)
            self.process.send_signal(signal.SIGUSR1)
        finally:
            code = self.end()
        assert code == 75, self.log.read_text()
        return self.rows()

    def end(self) -> int:
        try:
            return self.process.wait(timeout=120)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


def start_twice(folder: Path, *words: str, **variables: str) -> str:
    """A job that is asked to stop after three steps, and its next start, which is asked too."""
    first = Batch(folder, 0, *words, **variables)
    reached = first.stop_after_step(3)[-1]["step"]
    job = first.run_dir.name.rpartition("-")[2]
    assert (folder / "notes").read_text() == f"requeue {job}\n"
    saved = max(path.name for path in (first.run_dir / "checkpoints").glob("step-*"))
    assert saved == f"step-{reached:08d}"

    rows = Batch(folder, 1, *words, **variables).stop_after_step(reached + 2)
    assert (folder / "notes").read_text() == f"requeue {job}\n" * 2
    # nothing twice, nothing left out
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len({row["data/batch_hash"] for row in rows}) == len(rows)
    assert len(list((folder / "runs").iterdir())) == 1
    assert first.log.read_text().count("asked to stop by SIGUSR1: saving") == 2
    return first.log.read_text()


@pytest.mark.slow
def test_signal_saves_and_requeues_and_the_next_start_resumes(folder):
    """Ranks by srun: one node, two tasks."""
    start_twice(folder, START="ranks", TASKS_PER_NODE="2")


@pytest.mark.soak
def test_launchers_on_two_nodes_save_requeue_and_resume(folder):
    """Both nodes are this machine: two launchers with a rank each, which meet where others could,
    as launchers refuse loopback.
    """
    addresses = [each.address for each in list_interfaces() if not is_loopback(each.address)]
    address = next((each for each in addresses if ":" not in each), None)
    if address is None:
        pytest.skip("this machine has no address beside loopback")
    nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": address}
    assert "waiting for launch.nnodes=2 nodes" in start_twice(
        folder, "launch.nproc_per_node=1", **nodes
    )


def run_stand_in(
    folder: Path, program: str, signals: tuple[int, ...] = (), **variables: str
) -> tuple[int, str, str]:
    """The script with ``program`` (bash) where `python -m parallel2d.train` would run. Returns
    exit code, log and notes.
    """
    stand_in = folder / "stand-in"
    stand_in.write_text(f"#!/bin/bash\n{program}\n")
    stand_in.chmod(0o755)
    batch = Batch(folder, int(variables.pop("INCARNATION", "0")), PYTHON=str(stand_in), **variables)
    try:
        for number in signals:
            jobs.wait_for(lambda: "up" in batch.log.read_text())
            batch.process.send_signal(number)
    finally:
        code = batch.end()
    notes = folder / "notes"
    return code, batch.log.read_text(), notes.read_text() if notes.exists() else ""


SAVES = 'trap "sleep 0.2; exit 75" USR1; echo up; while :; do sleep 0.02; done'


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_tasks_receive_sigusr1_with_time_to_save(folder, number):
    # the second comes while they save
    code, log, notes = run_stand_in(folder, SAVES, (number, number))
    assert code == 75
    assert notes.startswith("requeue ")
    assert notes.count("\n") == 1
    assert f"asked to stop by {signal.Signals(number).name}" in log


@pytest.mark.parametrize(
    ("code", "life", "again"), [(0, 0, False), (1, 0, False), (75, 0, True), (75, 200, False)]
)
def test_only_saved_run_is_requeued_a_bounded_number_of_times(folder, code, life, again):
    ended, _, notes = run_stand_in(folder, f"exit {code}", INCARNATION=str(life))
    assert ended == code
    assert bool(notes) is again


@pytest.mark.parametrize("nodes", [1, 2])
def test_launchers_of_several_nodes_use_the_first_node_and_are_not_ranks(folder, nodes):
    program = 'echo "words $*, rank ${SLURM_PROCID:-none}"'
    _, log, _ = run_stand_in(
        folder,
        program,
        SLURM_JOB_NUM_NODES=str(nodes),
        SLURM_JOB_NODELIST="gpu7",
        SLURM_JOB_ID="17",
    )
    words = [line for line in log.splitlines() if line.startswith("words -m parallel2d.train")]
    assert len(words) == nodes
    for line in words:
        # The train command refuses words about several nodes on one.
        assert ("launch.nnodes=2 launch.rdzv_endpoint=gpu7:20017" in line) is (nodes == 2)
        assert ("launch." in line) is (nodes == 2)
        assert f"hydra.run.dir={folder}/runs/test-17 data=text" in line
        assert line.endswith("rank none")


def test_nodes_that_fail_preflight_do_not_train(folder):
    program = '[[ $2 == parallel2d.preflight ]] && exit 1; echo "trained"'
    code, log, notes = run_stand_in(folder, program, PREFLIGHT="1")
    assert (code, notes) == (1, "")
    assert "trained" not in log

"""Replicas that come and go while the others train, on one machine; several nodes are in `test_faults`."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jobs
import psutil
import pytest
from test_launch import command

from parallel2d.base.replicas.events import Events, post
from parallel2d.base.replicas.lasting_groups import Across, World
from parallel2d.base.store.client import StoreClient
from parallel2d.base.store.secret import new_secret
from parallel2d.base.store.server import StoreServer

SLOWLY = """
import time
from parallel2d.training.hooks import Hook

class Slowly(Hook):
    def step(self, run, step, metrics):
        time.sleep(0.03)
"""


def test_a_lost_replica_stops_nobody_and_comes_back(tmp_path):
    """Rank 0 is killed, which writes and speaks: rank 1 goes on in the same process, and takes that over."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    words = ["strategy=ddp", "launch.max_restarts=3", "train.steps=100000"]
    words += ["train.hooks=[slowly:Slowly]", "metrics.log_every=1"]
    with open(tmp_path / "said.txt", "w") as said:
        job = subprocess.Popen(command(tmp_path, *words), cwd=tmp_path, stderr=said)
    rows = tmp_path / "run/metrics.jsonl"

    def present():
        lines = rows.read_text().splitlines() if rows.exists() else []
        return json.loads(lines[-1])["replicas/present"] if lines else 0

    try:
        jobs.wait_for(lambda: present() == 2 and len(rows.read_text().splitlines()) > 5)
        first, second = jobs.ranks_of(job.pid)
        os.kill(first, signal.SIGKILL)
        jobs.wait_for(lambda: present() == 1)
        jobs.wait_for(lambda: present() == 2)
        assert second in jobs.ranks_of(job.pid)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 75, (tmp_path / "said.txt").read_text()
    finally:
        if job.poll() is None:
            for process in psutil.Process(job.pid).children(recursive=True):
                process.kill()
            job.kill()
    found = jobs.rows(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    last = found[-1]
    assert last["replicas/joined"] == 1
    assert last["replicas/repeated_samples"] in (0, 8), "in a step, or between two"
    assert len((tmp_path / "run/segments.jsonl").read_text().splitlines()) == 1
    log = (tmp_path / "run/train.log").read_text()
    assert "replicas   [1] of 2 are there: " in log
    assert "replicas   [0, 1] of 2 are there: from step" in log
    text = (tmp_path / "said.txt").read_text()
    assert "Its replica starts again, the others go on" in text
    assert "Traceback" not in text


def test_what_replicas_that_come_and_go_cannot_do_is_said():
    for group in (World(None, "world", 0, 2), Across(None, "axis", 0, 2)):
        with pytest.raises(RuntimeError, match="scatter is not for groups across replicas"):
            group.scatter([], [])


def test_events_have_one_order_for_all():
    """Four write at once; nobody's event is lost, and all read the same."""
    server = StoreServer.at("127.0.0.1", 0, secret := new_secret())
    store = StoreClient(server.address, secret)
    try:
        posts = [
            threading.Thread(target=post, args=(store, "dead", (replica, life)))
            for replica, life in itertools.product(range(4), range(5))
        ]
        for each in posts:
            each.start()
        for each in posts:
            each.join()
        post(store, "join", (1, 5))
        post(store, "break", 7)
        read = [Events(store), Events(store)]
        for events in read:
            while events.read(0.0):
                pass
            assert events.dead == set(itertools.product(range(4), range(5)))
            assert (events.joining, events.broken, events.count) == ({(1, 5)}, 7, 22)
        assert not read[0].read(0.05)
    finally:
        store.close()
        server.close()


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on(tmp_path):
    """Both replicas are lost once, the first of them with the rank that prints. Steps and losses are those of one start."""
    script = (Path(__file__).parent.parent / "examples/own_loop.py").read_text()
    script = script.replace("STEPS, GLOBAL", "_, GLOBAL").replace(
        "def build_model", "STEPS = 80\n\n\ndef build_model", 1
    )
    (tmp_path / "plain.py").write_text(script)
    slowly = "        norm = clip_gradient_norm"
    (tmp_path / "slow.py").write_text(
        script.replace(slowly, f"        __import__('time').sleep(0.1)\n{slowly}")
    )

    def start(name):
        words = ["run", "launch.nproc_per_node=4", "launch.max_restarts=5", str(tmp_path / name)]
        with (
            open(tmp_path / f"{name}.txt", "w") as said,
            open(tmp_path / f"{name}.err", "w") as errors,
        ):
            return subprocess.Popen(
                [sys.executable, "-m", "parallel2d.launch", *words], stdout=said, stderr=errors
            )

    def losses(name):
        return dict(
            re.findall(r"step +(\d+) loss ([\d.]+)", (tmp_path / f"{name}.txt").read_text())
        )

    assert start("plain.py").wait(300) == 0
    job = start("slow.py")
    try:
        for step, victim in ((6, 2), (40, 1)):
            jobs.wait_for(lambda step=step: str(step) in losses("slow.py"))
            before = jobs.ranks_of(job.pid)
            os.kill(before[victim], signal.SIGKILL)
            others = slice(0, 2) if victim > 1 else slice(2, 4)
            jobs.wait_for(
                lambda old=before: (
                    len({*old} - {*jobs.ranks_of(job.pid)}) == 2
                    and len(jobs.ranks_of(job.pid)) == 4
                )
            )
            assert before[others] == jobs.ranks_of(job.pid)[others]
        assert job.wait(300) == 0, (tmp_path / "slow.py.err").read_text()
    finally:
        job.kill()
    text = (tmp_path / "slow.py.err").read_text()
    assert text.count("Its replica starts again, the others go on") == 2
    assert "Traceback" not in text
    found, expected = losses("slow.py"), losses("plain.py")
    assert list(found) == list(expected) == [str(step) for step in range(1, 81)]
    assert [float(each) for each in found.values()] == pytest.approx(
        [float(each) for each in expected.values()], abs=1.1e-4
    )

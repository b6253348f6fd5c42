"""Forked ranks: what they inherit and what not, how they end, and who ends with whom."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from parallel2d.launch.endings import WorkersFailed
from parallel2d.launch.nursery import Nursery, Rank, possible

pytestmark = pytest.mark.skipif(not possible(), reason="ranks are not forked on this machine")


def rank_main(words):
    """What the words ask for."""
    task, *rest = words
    if task == "tell":
        import torch

        facts = {
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
            "leads": os.getsid(0) == os.getpid(),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, set())],
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            "name": Path("/proc/self/comm").read_text().strip(),
        }
        Path(rest[0]).write_text(json.dumps(facts))
    elif task == "say":
        print("to stdout")
        print("to stderr", file=sys.stderr)
    elif task == "raise":
        raise ValueError("this rank is broken")
    elif task == "leave":
        sys.exit(int(rest[0]))
    elif task == "thread":
        threading.Timer(0.3, lambda: Path(rest[0]).write_text("written")).start()
    elif task == "sleep":
        time.sleep(1000)
    return 0


@pytest.fixture(scope="module")
def nursery():
    made = Nursery(rank_main)
    yield made
    made.close()


def start(nursery: Nursery, *words: object, out: Path | None = None, **environment: str) -> Rank:
    paths = (None, None) if out is None else (f"{out}.out", f"{out}.err")
    return nursery.start(
        [str(word) for word in words], {"RANK": "3", "OMP_NUM_THREADS": "1", **environment}, *paths
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_has_what_a_process_of_its_own_would_have(nursery, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_LAUNCHER", "1")
    told = tmp_path / "facts"
    assert start(nursery, "tell", told, OMP_NUM_THREADS="2", ONLY="here").wait(60) == 0
    facts = json.loads(told.read_text())
    assert facts["environment"] == {"RANK": "3", "OMP_NUM_THREADS": "2", "ONLY": "here"}
    assert facts["threads"] == 2
    assert facts["leads"]
    assert facts["blocked"] == []
    assert facts["interrupt"]
    assert facts["terminate"]
    assert facts["name"] == "rank 3"


def test_streams_go_to_files(nursery, tmp_path):
    assert start(nursery, "say", out=tmp_path / "log").wait(60) == 0
    assert (tmp_path / "log.out").read_text() == "to stdout\n"
    assert (tmp_path / "log.err").read_text() == "to stderr\n"


def test_every_way_to_end_is_told(nursery, tmp_path):
    ranks = [
        start(nursery, "leave", 0),
        start(nursery, "leave", 75),
        start(nursery, "raise", out=tmp_path / "log"),
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 75, 1]
    assert "ValueError: this rank is broken" in (tmp_path / "log.err").read_text()
    sleeper = start(nursery, "sleep")
    assert sleeper.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.1)
    sleeper.close(signal.SIGKILL)
    assert sleeper.wait(60) == -signal.SIGKILL
    sleeper.close(signal.SIGKILL)  # of one that has ended: nothing


def test_threads_of_a_rank_are_waited_for_and_what_the_launcher_wants_at_its_end_is_not_done(
    tmp_path,
):
    done = tmp_path / "done by the launcher"
    atexit.register(done.write_text, "x")
    nursery = Nursery(rank_main)
    try:
        assert start(nursery, "thread", tmp_path / "thread").wait(60) == 0
    finally:
        nursery.close()
        atexit.unregister(done.write_text)
    assert (tmp_path / "thread").read_text() == "written"
    assert not done.exists()


def test_signals_to_every_process_of_a_job_do_not_end_the_nursery(nursery):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(nursery._pid, number)
    assert start(nursery, "leave", 5).wait(60) == 5


def test_the_end_of_the_nursery_is_that_of_its_ranks():
    nursery = Nursery(rank_main)
    rank = start(nursery, "sleep")
    os.kill(nursery._pid, signal.SIGKILL)
    assert rank.wait(60) == 255
    wait_for_end(rank.pid)
    assert not nursery.alive
    with pytest.raises(WorkersFailed, match="the process that starts ranks was ended"):
        start(nursery, "sleep")
    nursery.close()


def test_closing_ends_ranks_that_run():
    nursery = Nursery(rank_main)
    rank = start(nursery, "sleep")
    nursery.close()
    wait_for_end(rank.pid)


def test_killing_the_launcher_ends_nursery_and_ranks(tmp_path):
    script = (
        "import sys, time\nfrom parallel2d.launch.nursery import Nursery\n"
        "nursery = Nursery(lambda words: time.sleep(1000) or 0)\n"
        "print(nursery._pid, nursery.start([], {'RANK': '0'}, None, None).pid, flush=True)\ntime.sleep(1000)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert all(alive(pid) for pid in pids)
    launcher.kill()
    launcher.wait()
    for pid in pids:
        wait_for_end(pid)

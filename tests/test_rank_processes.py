"""Forked ranks: what they inherit and what not, how they end, and who ends with whom."""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from parallel2d.launch.processes import LAUNCHER
from parallel2d.launch.rank_processes import RankProcess, start_rank, start_server

MAIN = "test_rank_processes:rank_main"


def rank_main(words):
    """What the words ask for."""
    task, *rest = words
    if task == "tell":
        facts = {
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
            "leads": os.getsid(0) == os.getpid(),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, set())],
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            "name": Path("/proc/self/comm").read_text().strip(),
            "folder": os.getcwd(),
            "path": sys.path,
            "main": vars(sys.modules["__main__"]).get("__file__"),
            "cuda": torch.cuda.is_initialized(),
            "parent": os.getppid(),
        }
        Path(rest[0]).write_text(json.dumps(facts))
    elif task == "say":
        print("to stdout")
        print("to stderr", file=sys.stderr)
    elif task == "raise":
        raise ValueError("this rank is broken")
    elif task == "leave":
        sys.exit(int(rest[0]))
    elif task == "later":
        threading.Timer(0.3, lambda: Path(rest[0]).write_text("written")).start()
        atexit.register(Path(rest[1]).write_text, "written")
    elif task == "children":
        child = multiprocessing.Process(target=time.sleep, args=(0,))
        child.start()
        child.join()
        return child.exitcode
    elif task == "sleep":
        time.sleep(1000)
    return 0


def start(*words: object, out: Path | None = None, **environment: str) -> RankProcess:
    paths = (None, None) if out is None else (f"{out}.out", f"{out}.err")
    variables = {"RANK": "3", "OMP_NUM_THREADS": "1", **environment}
    return start_rank(MAIN, [str(word) for word in words], variables, *paths)


def server_of(folder: Path) -> psutil.Process:
    start_server()
    assert start("tell", folder / "server").wait(60) == 0
    return psutil.Process(json.loads((folder / "server").read_text())["parent"])


def folders_of_its_own(temporary: Path) -> dict[str, str]:
    """Variables of a process that keeps its temporary files there. torch's cache stands beside."""
    return {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": f"{temporary}-torch"}


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


def test_a_rank_has_what_a_new_process_would_have(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_LAUNCHER", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "added")
    before = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, set())
    told = tmp_path / "facts"
    assert start("tell", told, OMP_NUM_THREADS="2", ONLY="here").wait(60) == 0
    facts = json.loads(told.read_text())
    assert facts["environment"] == {"RANK": "3", "OMP_NUM_THREADS": "2", "ONLY": "here"}
    assert facts["threads"] == 2
    assert facts["leads"]
    assert facts["blocked"] == []
    assert facts["interrupt"]
    assert facts["terminate"]
    assert facts["name"] == "rank 3"
    assert facts["folder"] == str(tmp_path)
    assert facts["path"][0] == str(tmp_path / "added")
    assert facts["main"] is None, "it has not run the launcher's script"
    assert not facts["cuda"]
    assert before == (dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, set()))


def test_streams_go_to_files(tmp_path):
    assert start("say", out=tmp_path / "log").wait(60) == 0
    assert (tmp_path / "log.out").read_text() == "to stdout\n"
    assert (tmp_path / "log.err").read_text() == "to stderr\n"


def test_every_way_to_end_is_told(tmp_path):
    ranks = [start("leave", 0), start("leave", 75), start("raise", out=tmp_path / "log")]
    assert [rank.wait(60) for rank in ranks] == [0, 75, 1]
    assert "ValueError: this rank is broken" in (tmp_path / "log.err").read_text()
    sleeper = start("sleep")
    assert sleeper.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.1)
    sleeper.close(signal.SIGKILL)
    assert sleeper.wait(60) == -signal.SIGKILL
    sleeper.close(signal.SIGKILL)  # of one that has ended: nothing


def test_threads_and_exit_handlers_of_a_rank_finish_and_those_of_the_launcher_do_not_run(tmp_path):
    launchers = tmp_path / "done by the launcher"
    atexit.register(launchers.write_text, "x")
    try:
        assert start("later", tmp_path / "thread", tmp_path / "handler").wait(60) == 0
    finally:
        atexit.unregister(launchers.write_text)
    assert (tmp_path / "thread").read_text() == "written"
    assert (tmp_path / "handler").read_text() == "written"
    assert not launchers.exists()


def test_signals_to_every_process_of_a_job_do_not_end_the_server(tmp_path):
    server = server_of(tmp_path)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        server.send_signal(number)
    assert start("leave", 5).wait(60) == 5
    assert server_of(tmp_path) == server


def test_the_end_of_the_server_is_that_of_its_ranks_and_the_next_start_has_another(tmp_path):
    server = server_of(tmp_path)
    rank = start("sleep")
    server.kill()
    assert rank.wait(60) == 255
    wait_for_end(rank.pid)
    assert start("leave", 5).wait(60) == 5
    assert server_of(tmp_path) != server


@pytest.mark.parametrize("way", ["kill", "terminate"])
def test_ending_the_launcher_ends_server_and_ranks(tmp_path, way):
    """Its script is not guarded against being run again in a rank."""
    script = tmp_path / "launcher.py"
    script.write_text(
        "import psutil, time\n"
        "from parallel2d.launch.rank_processes import start_rank\n"
        "rank = start_rank('test_rank_processes:rank_main', ['sleep'], {'RANK': '0'}, None, None)\n"
        "print(rank.pid, psutil.Process(rank.pid).ppid(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    path = os.pathsep.join(sys.path)
    launcher = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **folders_of_its_own(temporary)},
    )
    assert launcher.stdout is not None
    told = [int(word) for word in launcher.stdout.readline().split()]
    assert len(told) == 2
    processes = psutil.Process(launcher.pid).children(recursive=True)
    assert set(told) <= {process.pid for process in processes}
    getattr(launcher, way)()
    launcher.wait()
    for process in processes:
        wait_for_end(process.pid)
    assert list(temporary.iterdir()) == []


def test_a_server_whose_launcher_has_ended_meanwhile_ends_before_it_imports_anything():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    script = (
        "import os, sys\n"
        "os._exit = lambda code: sys.exit(10 + code + ('torch._dynamo' in sys.modules))\n"
        "import parallel2d.launch.rank_server\n"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), LAUNCHER: str(ended.pid)}
    server = subprocess.run([sys.executable, "-c", script], timeout=120, env=variables)
    assert server.returncode == 11


def test_nothing_that_the_server_imports_asks_for_an_accelerator():
    """What it asks may start the driver, which does not survive a fork. In a process of its own,
    since here everything is imported."""
    script = (
        "import importlib, torch\n"
        "def refuse(*given, **named): raise AssertionError('asked for an accelerator')\n"
        "for module in (torch.cuda, torch.accelerator):\n"
        "    for name in ('is_available', 'device_count', 'init', 'current_accelerator', 'get_device_properties'):\n"
        "        if hasattr(module, name): setattr(module, name, refuse)\n"
        "import parallel2d.launch.rank_server\n"
        "assert torch.cuda.is_initialized() is False\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_name_of_the_temporary_folder_may_be_longer_than_that_of_a_socket(tmp_path):
    folder = tmp_path / ("a" * 120)
    folder.mkdir()
    script = (
        "from parallel2d.launch.rank_processes import start_rank\n"
        "rank = start_rank('test_rank_processes:rank_main', ['leave', 5], {'RANK': '0'}, None, None)\n"
        "assert rank.wait(60) == 5\n"
    )
    path = os.pathsep.join(sys.path)
    variables = {**os.environ, "PYTHONPATH": path, **folders_of_its_own(folder)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=variables)
    assert list(folder.iterdir()) == []


def _pid(told) -> None:
    told.send((os.getppid(), list(signal.pthread_sigmask(signal.SIG_BLOCK, set()))))


def test_other_users_of_multiprocessing_do_not_get_this_server(tmp_path):
    server = server_of(tmp_path)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=_pid, args=(theirs,))
    process.start()
    assert ours.poll(60)
    parent, blocked = ours.recv()
    process.join()
    assert parent != server.pid
    assert blocked == []


def test_nothing_is_left_when_the_launcher_returns():
    script = (
        "import psutil\n"
        "from parallel2d.launch.rank_processes import start_rank\n"
        "rank = start_rank('test_rank_processes:rank_main', ['leave', 0], {'RANK': '0'}, None, None)\n"
        "children = psutil.Process().children(recursive=True)\n"
        "assert len(children) >= 2, children\n"
        "print(*(child.pid for child in children), flush=True)\n"
        "rank.wait()\n"
    )
    # What it leaves becomes a child of this process, which sees it until it waits for it.
    libc, subreaper = ctypes.CDLL(None), 36  # PR_SET_CHILD_SUBREAPER
    libc.prctl(subreaper, 1, 0, 0, 0)
    try:
        launcher = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert launcher.stdout is not None
        children = [int(pid) for pid in launcher.stdout.readline().split()]
        assert launcher.wait(60) == 0
    finally:
        libc.prctl(subreaper, 0, 0, 0, 0)
    left = [pid for pid in children if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.waitpid(pid, 0)
    assert left == []


def _start_with_children(told) -> None:
    told.send(start("children").wait(60))


def test_a_daemonic_process_starts_ranks_that_may_have_children():
    """As a worker of a pool of multiprocessing or joblib does."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_start_with_children, args=(theirs,), daemon=True
    )
    process.start()
    assert ours.poll(60)
    assert ours.recv() == 0
    process.join()


def test_a_fork_of_a_launcher_has_a_server_of_its_own(tmp_path):
    server = server_of(tmp_path)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_start_with_children, args=(theirs,)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert ours.poll(0)
    assert ours.recv() == 0
    assert server_of(tmp_path) == server

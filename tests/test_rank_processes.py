"""Forked ranks: inherited state, exits, and the processes that end together."""

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from jobs import wait_for

from parallel2d.base.exit_codes import LOST
from parallel2d.launching import rank_processes
from parallel2d.launching.rank_processes import PRELOADED, RankProcess, start_rank

MAIN = "test_rank_processes:rank_main"
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def rank_main(words):
    task, *rest = words
    if task == "tell":
        import torch

        facts = {
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
            "leads": os.getsid(0) == os.getpid(),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, set())],
            "handlers": [
                signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            ],
            "name": Path("/proc/self/comm").read_text().strip(),
            "folder": os.getcwd(),
            "path": sys.path[0],
            "main": vars(sys.modules["__main__"]).get("__file__"),
            "sockets": sum(
                "socket" in os.readlink(f"/proc/self/fd/{n}")
                for n in range(3, 20)
                if os.path.exists(f"/proc/self/fd/{n}")
            ),
        }
        Path(rest[0]).write_text(json.dumps(facts))
        print("to stdout")
        print("to stderr: \udc80", file=sys.stderr)
    elif task == "raise":
        raise ValueError("this rank is broken")
    elif task == "later":
        threading.Timer(0.3, lambda: Path(rest[0]).write_text("written")).start()
        atexit.register(Path(rest[1]).write_text, "written")
        sys.exit(75)
    elif task == "children":
        child = multiprocessing.Process(target=time.sleep, args=(0,))
        child.start()
        child.join()
        return child.exitcode
    elif task == "sleep":
        time.sleep(1000)
    return 0


@pytest.fixture(autouse=True)
def _quick_servers(monkeypatch):
    """Servers of this file import nothing, but for one test."""
    monkeypatch.setattr(rank_processes, "PRELOADED", ())


def start(*words: object, out: Path | None = None, **environment: str) -> RankProcess:
    paths = (None, None) if out is None else (f"{out}.out", f"{out}.err")
    variables = {"RANK": "3", "OMP_NUM_THREADS": "1", **environment}
    return start_rank(MAIN, [str(word) for word in words], variables, *paths)


def server() -> psutil.Process:
    return psutil.Process(rank_processes._servers[0].process.pid)


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that may stay a zombie of another parent."""

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(has_ended)


def test_forked_rank_has_the_state_of_a_new_process(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "PRELOADED", ("torch",))
    rank_processes._end_server()
    assert start("").wait(60) == 0, "the server was there before"
    monkeypatch.setenv("OF_THE_LAUNCHER", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "added")
    before = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, set())
    told = tmp_path / "facts"
    others = [start("sleep"), start("sleep")]
    given = {"ONLY": "here", **{f"LARGE_{number}": "x" * 100_000 for number in range(5)}}
    assert (
        start("tell", told, out=tmp_path / "log", **{**given, "OMP_NUM_THREADS": "2"}).wait(60) == 0
    )
    assert json.loads(told.read_text()) == {
        "environment": {"RANK": "3", "OMP_NUM_THREADS": "2", **given},
        "threads": 2,
        "leads": True,
        "blocked": [],
        "handlers": [True, True],
        # not the launcher's script
        "name": "rank 3",
        "folder": str(tmp_path),
        "path": str(tmp_path / "added"),
        "main": None,
        "sockets": 0,  # processes of a rank must not hold the descriptors of the server
    }
    assert (tmp_path / "log.out").read_text() == "to stdout\n"
    assert (tmp_path / "log.err").read_text() == "to stderr: \\udc80\n"
    assert before == (dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, set()))
    for each in others:
        each.close(signal.SIGKILL)
        assert each.wait(60) == -signal.SIGKILL


def test_every_exit_of_a_rank_is_reported(tmp_path):
    launchers = tmp_path / "done by the launcher"
    atexit.register(launchers.write_text, "x")
    try:
        broken = start("raise", out=tmp_path / "log")
        late = start("later", tmp_path / "thread", tmp_path / "handler")
        assert [rank.wait(60) for rank in (start(""), broken, late)] == [0, 1, 75]
    finally:
        atexit.unregister(launchers.write_text)
    assert "ValueError: this rank is broken" in (tmp_path / "log.err").read_text()
    assert (tmp_path / "thread").read_text() == "written"
    assert (tmp_path / "handler").read_text() == "written"
    assert not launchers.exists()
    sleeper = start("sleep")
    assert sleeper.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.1)
    sleeper.close()
    assert sleeper.wait(60) == sleeper.poll() == -signal.SIGTERM
    sleeper.close()  # of one that has ended: nothing


def test_server_survives_signals_to_the_job_and_its_end_ends_its_ranks():
    rank = start("sleep")
    first = server()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        first.send_signal(number)
    assert start("").wait(60) == 0
    assert server() == first
    first.kill()
    assert rank.wait(60) == LOST
    wait_for_end(rank.pid)
    # The parent of a launcher may have set it to ignore the end of children.
    ignored = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGCHLD, signal.SIGTERM)
    }
    try:
        assert start("").wait(60) == 0
        rank = start("sleep")
        rank.close()
        assert rank.wait(60) == -signal.SIGTERM
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)
    assert server() != first
    # Also without the kernel's help: when no process has the other end any more.
    rank_processes._servers[0].socket.close()
    assert rank_processes._servers[0].process.wait(60) == 0


LAUNCHER = """
import os, psutil, sys, time
from parallel2d.base.exit_codes import LOST
from parallel2d.launching import rank_processes
way, rank_processes.PRELOADED = sys.argv[1], tuple(sys.argv[2:])
rank_processes.start_server()
if not rank_processes.PRELOADED:
    word = "" if way == "return" else "sleep"
    rank = rank_processes.start_rank("test_rank_processes:rank_main", [word], {"RANK": "0"}, None, None)
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
if way == "return":
    rank.wait()
else:
    time.sleep(1000)
"""


@pytest.mark.parametrize("way", ["return", "kill", "terminate", "kill while the server imports"])
def test_ended_launcher_leaves_no_processes(tmp_path, way):
    """Neither a process nor a file. Its script is not guarded against being run again in a rank."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    # longer than the name of a socket may be
    temporary = tmp_path / ("a" * 120)
    temporary.mkdir()
    preloaded = ["slow"] if "imports" in way else []
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    # Its remaining processes become children of this process, which sees them until it waits for
    # them.
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        words = [sys.executable, script, way, *preloaded]
        launcher = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=variables)
        children = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(children) == (1 if preloaded else 2)
        if way != "return":
            getattr(launcher, way.split()[0])()
        assert launcher.wait(60) == {"k": -signal.SIGKILL, "t": -signal.SIGTERM}.get(way[0], 0)
    finally:
        libc.prctl(SUBREAPER, 0, 0, 0, 0)
    left = [pid for pid in children if psutil.pid_exists(pid)]
    for pid in left:
        wait_for_end(pid)
        with contextlib.suppress(ChildProcessError):  # another process has reaped it
            os.waitpid(pid, 0)
    assert left == [] or way != "return"
    assert list(temporary.iterdir()) == []


def test_server_of_an_ended_launcher_exits_before_imports():
    ended = subprocess.Popen(["true"])
    ended.wait()
    program = (
        f"from parallel2d.launching.rank_processes import serve; serve(0, {ended.pid}, ['this'])"
    )
    late = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert (late.returncode, late.stdout, late.stderr) == (1, b"", b"")


@pytest.mark.slow
def test_server_imports_initialize_no_accelerator():
    """An accelerator query may start the driver, which does not survive a fork. Runs in a separate
    process, since here everything is imported.
    """
    script = (
        "import importlib, sys, torch\n"
        "def refuse(*given, **named): raise AssertionError('asked for an accelerator')\n"
        "for module in (torch.cuda, torch.accelerator):\n"
        "    for name in ('is_available', 'device_count', 'init', 'current_accelerator', "
        "'get_device_properties'):\n"
        "        if hasattr(module, name): setattr(module, name, refuse)\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert torch.cuda.is_initialized() is False\n"
    )
    subprocess.run([sys.executable, "-c", script, *PRELOADED], check=True, timeout=120)


def test_open_device_driver_is_detected_before_fork(tmp_path):
    driver = tmp_path / "nvidia0"
    driver.touch()
    assert rank_processes.opened_files((str(tmp_path),)) == []
    with driver.open():
        assert rank_processes.opened_files((str(tmp_path),)) == [str(driver)]
    assert rank_processes.opened_files(rank_processes.DRIVERS) == []


def _start_with_children(told) -> None:
    told.send((start("children").wait(60), server().pid))


def test_daemonic_launcher_has_its_own_server_and_ranks_may_fork():
    assert start("").wait(60) == 0
    first = server()
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_start_with_children, args=(theirs,), daemon=True)
    process.start()
    process.join(60)
    assert ours.poll(60)
    code, other = ours.recv()
    assert code == 0
    assert other != first.pid
    wait_for_end(other)
    assert start("").wait(60) == 0
    assert server() == first


def test_rank_of_an_ended_server_is_reported_as_failed():
    start("").wait(60)
    running = rank_processes._servers[0]
    running.process.send_signal(signal.SIGSTOP)  # it does not end before the request
    running.socket.close()
    running.socket, nobody = socket.socketpair()
    nobody.close()
    assert start("").wait(60) == LOST
    running.process.send_signal(signal.SIGCONT)
    running.process.wait(60)

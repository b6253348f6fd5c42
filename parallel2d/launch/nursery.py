"""Ranks that need not import anything, because they are forked from a process in which everything
is loaded: `Nursery`.

A launcher that has checked its job makes a `Nursery` and gets, for each rank, a `Rank` to wait for.
torch's agent holds them through `StartedProcesses`.

[Note: why ranks are forked] Importing torch and this package takes seconds of CPU time per process,
which is most of what a restart costs after a failure. The launcher has imported all of it to check
the job. So it forks a copy of itself, the nursery, before it has threads or sockets. The nursery is
forked again for every rank, at the start and at every restart, and shares its memory. A driver of
an accelerator does not survive a fork, so there ranks are started as processes of their own; see
`possible`.

[Note: who ends whom] The nursery ends when its launcher does, because their socket closes, and the
kernel ends every rank with the nursery. Signals reach a rank from the launcher alone: the nursery
blocks those that a scheduler sends to every process of a job, and a rank is the leader of a session
of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from parallel2d.launch.endings import WorkersFailed
from parallel2d.launch.processes import end_with_parent, set_process_name

Main = Callable[[Sequence[str]], int]  # of a rank: from its words to its exit code

# in their first step, and not by the launcher
_NEEDED_BY_RANKS = ("torch._dynamo", "torch.utils.tensorboard")
_BLOCKED = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_LOST = 255  # the exit code of a rank whose nursery has ended, as multiprocessing has it


def possible() -> bool:
    """Whether ranks may be forked on this machine. See [Note: why ranks are forked]."""
    import torch

    return sys.platform == "linux" and not torch.accelerator.is_available()


class Rank:
    """One forked rank, as torch's agent wants a process: ``pid``, `poll`, `wait`, `close`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid, self._nursery = pid, nursery
        self.proc = self  # the agent reads a handler's process

    def poll(self) -> int | None:
        """Its exit code, below 0 for the signal that ended it; None while it runs."""
        return self._nursery.ended(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            self._nursery.listen(0.05)
        return code

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Sends ``death_sig`` to it and whatever it has started."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, death_sig or signal.SIGTERM)


class Nursery:
    """Forks this process; the copy forks a rank whenever `start` is called. ``main`` runs in a
    rank, with its words; what it returns is the exit code."""

    def __init__(self, main: Main) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._codes: dict[int, int] = {}  # of the ranks that have ended
        self._started: list[int] = []
        self.alive = True
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            _leave(lambda: _serve(theirs, main))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdout: str | None,
        stderr: str | None,
    ) -> Rank:
        """Starts a rank with these words and exactly this environment. ``stdout``, ``stderr``:
        files; None: as this process.

        Raises `WorkersFailed` when the nursery has ended.
        """
        pid: int | None = None
        try:
            self._ours.send((list(words), dict(environment), stdout, stderr))
            while pid is None:
                pid = self._receive()
        except (OSError, EOFError):
            self._lose()
            raise WorkersFailed("the process that starts ranks was ended") from None
        self._started.append(pid)
        return Rank(self, pid)

    def ended(self, pid: int) -> int | None:
        """The exit code of the rank with this process id, or None."""
        self.listen(0.0)
        return self._codes.get(pid)

    def listen(self, timeout: float) -> None:
        """Receives the ends of ranks for up to ``timeout`` seconds, until the first."""
        try:
            while self.alive and self._ours.poll(timeout):
                self._receive()
                timeout = 0.0
        except (OSError, EOFError):
            self._lose()

    def close(self) -> None:
        """Ends the nursery and every rank that still runs."""
        self._ours.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _receive(self) -> int | None:
        """Reads one message. The id of a process that was started, None for one that has ended."""
        pid, code = self._ours.recv()
        if code is None:
            return int(pid)
        self._codes[pid] = code
        return None

    def _lose(self) -> None:
        """It was killed, and so the kernel has killed its ranks."""
        self.alive = False
        self._codes = dict.fromkeys(self._started, _LOST) | self._codes


def _serve(own: multiprocessing.connection.Connection, main: Main) -> int:
    """The nursery: forks a rank for each message and reports every end to the launcher, until the
    launcher ends."""
    end_with_parent()
    set_process_name("parallel2d ranks")
    for module in _NEEDED_BY_RANKS:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is there now stays shared between all ranks
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([own.fileno(), woken], [], [])
        if own.fileno() in ready:
            try:
                words, environment, stdout, stderr = own.recv()
            except EOFError:
                return 0
            settled, settle = os.pipe()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                end_with_parent()
                os.setsid()
                for descriptor in (own.fileno(), woken, wake, settled, settle):
                    os.close(descriptor)
                _dress(environment, stdout, stderr)
                return main(words)
            os.close(settle)
            # Returns once the rank leads its session. Its id is sent only then, because whoever has
            # it may signal the rank.
            os.read(settled, 1)
            os.close(settled)
            own.send((pid, None))
        if woken in ready:
            os.read(woken, 4096)
            for pid, code in _ends():
                own.send((pid, code))


def _ends() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((end[0], os.waitstatus_to_exitcode(end[1])))
    return found


def _dress(environment: Mapping[str, str], stdout: str | None, stderr: str | None) -> None:
    """Gives a forked rank what a process of its own would have: signals, streams, environment,
    name, threads."""
    import torch

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in _BLOCKED:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        if path:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(opened, descriptor)
            os.close(opened)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(descriptor, "w"), errors="backslashreplace", write_through=True)
        for descriptor in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environment)
    set_process_name(f"rank {environment['RANK']}")
    # libgomp read the launcher's long ago
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def _leave(body: Callable[[], int]) -> None:
    """Runs ``body`` in a forked process and ends it as an interpreter would, except for the exit
    handlers of the launcher."""
    code = 1
    try:
        code = body()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

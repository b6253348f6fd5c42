"""The processes of the ranks that this launcher starts: `start_rank`, and `start_server`, which
makes that quick.

[Note: why ranks are forked] Importing torch and this package takes seconds of CPU time per process,
which would be most of what a start or a restart costs. So ranks are forked from one process that
has imported everything, a fork server of Python's multiprocessing. It is a new process, with
nothing of the launcher's threads, sockets or devices, and it never touches an accelerator, whose
driver does not survive a fork. It is not the server that other users of multiprocessing in this
process share, because it imports other modules and blocks signals.

[Note: who ends whom] The kernel ends the server with its launcher, and every rank with the server
(Linux). Signals reach a rank from the launcher alone: the server blocks those that a scheduler
sends to every process of a job, and a rank leads a session of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.popen_forkserver import Popen
from typing import Any

from parallel2d.launch.processes import (
    BATCH_SIGNALS,
    LAUNCHER,
    end_with_parent,
    set_process_name,
)
from parallel2d.store.address import unix_path

LOST = 255  # the exit code of a rank whose server has ended, as multiprocessing has it
_SECONDS_FOR_TRACKER = 1.0


class _RankServer(forkserver.ForkServer):
    """The process that ranks are forked from. See [Note: why ranks are forked]."""

    _socket: int | None = None
    _owner: int | None = None  # the process that started it

    def ensure_running(self) -> None:
        """Starts it unless it runs. On Linux its socket has no name then: nobody else can connect
        to it, and nothing is left in the temporary folder when this process is killed."""
        if self._owner not in (None, os.getpid()):
            self._leave_to_owner()
        self._owner = os.getpid()
        if sys.platform != "linux":
            with _for_server():
                super().ensure_running()
            return
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        before = config.get("tempdir")
        with (
            _for_server(),
            tempfile.TemporaryDirectory(prefix="parallel2d-") as folder,
            unix_path(os.path.join(folder, "sockets")) as place,
        ):
            # Where multiprocessing puts the socket, under a name that is short enough for one.
            os.mkdir(place)
            config["tempdir"] = place
            try:
                super().ensure_running()
            finally:
                config["tempdir"] = before
            address: str = self._forkserver_address
            if address.startswith(place):
                self._keep_socket(address)

    def _leave_to_owner(self) -> None:
        """In a fork of a launcher: that one's server is no child of this process, and ends with its
        own launcher. This process starts another."""
        with contextlib.suppress(OSError, TypeError):
            os.close(self._forkserver_alive_fd)  # type: ignore[attr-defined]
        # multiprocessing has no public way to have a server forgotten.
        for name in ("address", "alive_fd", "pid"):
            setattr(self, f"_forkserver_{name}", None)

    def _keep_socket(self, address: str) -> None:
        """Reaches the socket by a descriptor of its file from now on, which may go then."""
        if self._socket is not None:
            os.close(self._socket)
        self._socket = os.open(address, os.O_PATH | os.O_CLOEXEC)
        self._forkserver_address = f"/proc/self/fd/{self._socket}"


_SERVER = _RankServer()
_SERVER.set_forkserver_preload(["parallel2d.launch.rank_server"])


class RankProcess:
    """One rank, as torch's agent wants a process: ``pid``, `poll`, `wait`, `close`."""

    def __init__(self, process: Popen) -> None:
        self.pid, self._process = process.pid, process
        self.proc = self  # the agent reads a handler's process

    def poll(self) -> int | None:
        """Its exit code, below 0 for the signal that ended it; None while it runs; `LOST` when the
        server was ended, and the rank with it."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        code = self._process.wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return code

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Sends ``death_sig`` to it and whatever it has started."""
        if self.poll() is not None:
            return
        number = death_sig or signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                # It does not lead a session yet, so it has started nothing.
                os.kill(self.pid, number)


def start_server() -> None:
    """Starts the process that ranks are forked from, unless there is one. Returns at once, while it
    imports. See [Note: why ranks are forked]."""
    _SERVER.ensure_running()
    atexit.unregister(_end_server)
    atexit.register(_end_server, os.getpid())


def start_rank(
    main: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    stdout: str | None,
    stderr: str | None,
) -> RankProcess:
    """Starts a rank, which calls ``main`` ("package.module:function") with ``words`` and exits with
    what it returns. ``environment``: exactly its own. ``stdout``, ``stderr``: files; None: as this
    process."""
    start_server()
    server: int = _SERVER._forkserver_pid  # type: ignore[attr-defined]
    # A rank may have children, whatever this process is.
    process = multiprocessing.get_context("forkserver").Process(
        target=_run_rank,
        args=(server, main, list(words), dict(environment), stdout, stderr),
        daemon=False,
    )
    with _from_our_server():
        # Not by its `start`, which a daemonic process (one of a pool of joblib's) may not call.
        return RankProcess(Popen(process))


@contextlib.contextmanager
def _for_server() -> Iterator[None]:
    """What a server that starts meanwhile gets from this process: it finds the same modules,
    writes no warnings of torch's C++ code, and blocks what a scheduler or a terminal sends to
    every process of a job. The launcher passes on to ranks what they need to know, and the server
    must not end before they have saved."""
    before = dict(os.environ)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, BATCH_SIGNALS)
    os.environ.update(
        PYTHONPATH=os.pathsep.join(os.fspath(path) or os.getcwd() for path in sys.path),
        PYTHONSAFEPATH="1",
        **{LAUNCHER: str(os.getpid())},
        TORCH_CPP_LOG_LEVEL=before.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        # Should a library ask for GPUs while it is imported, torch answers without starting the
        # driver.
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
    )
    try:
        # multiprocessing starts this process before a server, and unblocks two signals then.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, BATCH_SIGNALS)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _end_server(launcher: int) -> None:
    """At the end of this process: ends what `start_server` has started, and waits for it, so that
    nothing is left when the command returns. multiprocessing has no public name for either."""
    if os.getpid() != launcher:
        return  # a fork, whose children they are not
    with contextlib.suppress(OSError, AttributeError):
        server: int = _SERVER._forkserver_pid  # type: ignore[attr-defined]
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    with contextlib.suppress(OSError, AttributeError, TypeError):
        tracker = resource_tracker._resource_tracker
        # It ends with the last process that has the other end. Others may have it too, so it is
        # not waited for without a limit.
        os.close(tracker._fd)  # type: ignore[attr-defined]
        tracker._fd = None  # type: ignore[attr-defined]
        deadline = time.monotonic() + _SECONDS_FOR_TRACKER
        while time.monotonic() < deadline:
            if os.waitpid(tracker._pid, os.WNOHANG)[0]:  # type: ignore[attr-defined]
                return
            time.sleep(0.005)


@contextlib.contextmanager
def _from_our_server() -> Iterator[None]:
    """multiprocessing starts processes from our server and not from the common one, and prepares
    them as ranks."""
    connect, prepare = forkserver.connect_to_new_process, spawn.get_preparation_data

    def prepare_rank(name: str) -> dict[str, Any]:
        data = prepare(name)
        # Otherwise a rank would run the script of this process again, and with it launch the job
        # unless the script is guarded against that. And it would fail where joblib has set a start
        # method of its own.
        for key in ("init_main_from_name", "init_main_from_path", "start_method"):
            data.pop(key, None)
        return data

    forkserver.connect_to_new_process = _SERVER.connect_to_new_process
    spawn.get_preparation_data = prepare_rank
    try:
        yield
    finally:
        forkserver.connect_to_new_process, spawn.get_preparation_data = connect, prepare


def _run_rank(
    server: int,
    main: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    stdout: str | None,
    stderr: str | None,
) -> None:
    end_with_parent(server)
    os.setsid()
    _redirect(stdout, stderr)
    os.environ.clear()
    os.environ.update(environment)
    set_process_name(f"rank {environment['RANK']}")
    _take_signals()
    _set_threads(environment)
    try:
        sys.exit(pkgutil.resolve_name(main)(words))
    finally:
        # As at the end of any process; Python leaves it out after a fork.
        atexit._run_exitfuncs()


def _redirect(stdout: str | None, stderr: str | None) -> None:
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        if path:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(opened, descriptor)
            os.close(opened)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(descriptor, "w"), errors="backslashreplace", write_through=True)
        for descriptor in (1, 2)
    )


def _take_signals() -> None:
    """As in a new process: the server has blocked some."""
    for number in BATCH_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _set_threads(environment: Mapping[str, str]) -> None:
    """OpenMP has read the variable in the server, which has another value."""
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))

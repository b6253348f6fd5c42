"""Forks ranks (`start_rank`) from a server process that has imported their modules
(`start_server`).

[Note: why ranks are forked] Importing torch and this package takes seconds of CPU time per process.
These seconds would be most of the cost of a start or a restart. Therefore ranks are forked from a
server: a separate process without the launcher's threads and devices. The server never uses an
accelerator, because the driver of an accelerator does not survive a fork. For each rank the
launcher creates a socket pair and sends one end to the server. Through this pair the rank receives
the launcher's request and sends its process id; later the server sends the exit code of the rank.

[Note: lifetimes of processes] On Linux the kernel kills the server when its launcher ends, and
every rank when the server ends. A scheduler may send signals to every process of a job, so the
server blocks signals. A rank is the leader of a new session, so Ctrl-C in the terminal does not
reach the rank. The launcher forwards signals to the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from parallel2d.base.exit_codes import LOST
from parallel2d.launching.processes import BATCH_SIGNALS, end_with_parent, set_process_name

# Modules that the server imports. Ranks need the last two in their first step.
PRELOADED = (
    "parallel2d.rank",
    "parallel2d.training.assemble",
    "torch._dynamo",
    "torch.utils.tensorboard",
)
DRIVERS = ("/dev/nvidia", "/dev/kfd")  # device files of accelerators
_REPORT_S = 0.02  # interval of the server's polls of running ranks


class RankProcess:
    """The process of one rank, for its launcher: process id, exit code, and signals."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection = pid, connection

    def poll(self) -> int | None:
        """Return the exit code of the rank: negative for a signal, None while the rank runs, and
        `LOST` if the server has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the rank ends, and return its exit code. Raises `subprocess.TimeoutExpired`
        after ``timeout`` seconds."""
        self._connection.settimeout(timeout)
        try:
            # The code stays in the socket: if a signal handler raises an exception here, a later
            # call still reads the code.
            code = self._connection.recv(4, socket.MSG_PEEK)
        except (BlockingIOError, TimeoutError):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0) from None
        except ConnectionResetError:
            return LOST
        return int.from_bytes(code, "big", signed=True) if code else LOST

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send ``death_sig`` to the rank and all processes that it has started."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, death_sig or signal.SIGTERM)


class _RankServer:
    """The process that ranks are forked from, and the launcher's socket to this process."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        program = (
            f"import sys; sys.argv, sys.path = {sys.argv}, {list(map(os.fspath, sys.path))}"
            "\nfrom parallel2d.launching.rank_processes import serve"
            f"\nserve({theirs.fileno()}, {os.getpid()}, {PRELOADED})"
        )
        # Ranks inherit -O, -W, -X and similar flags.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # The new process inherits the set of blocked signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BATCH_SIGNALS)
        try:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()


_servers: list[_RankServer] = []  # the server of this process; empty before its start


def start_server() -> None:
    """Start the process that ranks are forked from, unless it runs already. Does not wait for the
    imports of the server. See [Note: why ranks are forked]."""
    if not _servers or _servers[0].process.poll() is not None:
        _servers[:] = [_RankServer()]


@atexit.register
def _end_server() -> None:
    for server in _servers:
        server.process.kill()
        server.process.wait()


# The server belongs to the launcher: a fork of the launcher must start another server.
os.register_at_fork(after_in_child=_servers.clear)


def start_rank(
    main: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    stdout: str | None,
    stderr: str | None,
) -> RankProcess:
    """Start a rank. The rank calls ``main`` ("package.module:function") with ``words``, and exits
    with the result.

    Args:
        environment: the complete environment of the rank.
        stdout, stderr: files for the output of the rank; None: the streams of this process.
    """
    start_server()
    place = [os.getcwd(), list(map(os.fspath, sys.path))]
    request = [main, list(words), dict(environment), [stdout, stderr], *place]
    ours, theirs = socket.socketpair()
    pid = b""
    # If the server has ended, the result is a rank that has failed with `LOST`.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), theirs:
        socket.send_fds(_servers[0].socket, [b"."], [theirs.fileno()])
        theirs.close()
        ours.sendall(json.dumps(request).encode())
        ours.shutdown(socket.SHUT_WR)
        pid = ours.recv(4)
    return RankProcess(int.from_bytes(pid, "big"), ours)


def serve(descriptor: int, launcher: int, preloaded: Sequence[str]) -> NoReturn:
    """Run the server: fork ranks until the launcher ends.

    Args:
        descriptor: the server's end of the socket pair.
        launcher: process id of the launcher.
        preloaded: modules to import.
    """
    end_with_parent(launcher)
    set_process_name("parallel2d ranks")
    # The launcher may have inherited ignored signals. If SIGCHLD is ignored, the exit codes of
    # ranks are lost.
    for number in (*BATCH_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # If a library asks torch for GPUs during its import, torch now answers without starting the
    # driver.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    gc.disable()  # during imports, garbage collections find little and take a tenth of the time
    for name in preloaded:
        importlib.import_module(name)
    opened = opened_files(DRIVERS)
    if opened:
        sys.exit(
            f"parallel2d: an import opened {', '.join(opened)}, and the driver of an accelerator "
            "does not survive the fork of a rank: start the ranks by torchrun or srun, or remove "
            "the library that opens it while it is imported"
        )
    # Exclude the existing objects from garbage collection: a collection writes to their pages, and
    # ranks could then no longer share these pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    requests, server = socket.socket(fileno=descriptor), os.getpid()
    ranks: dict[int, socket.socket] = {}  # by process id
    while True:
        if select.select([requests], [], [], _REPORT_S if ranks else None)[0]:
            _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
            if not descriptors:
                os._exit(0)  # the launcher has ended
            connection = socket.socket(fileno=descriptors[0])
            others = [requests, *ranks.values()]
            # `multiprocessing` is not used, because each later rank would inherit two open pipes of
            # each earlier rank.
            pid = os.fork()
            if not pid:
                _exit_with(_run_rank, server, connection, others)
            ranks[pid] = connection
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            # Other processes may be children of a preloaded module.
            if pid in ranks:
                with ranks.pop(pid) as connection, contextlib.suppress(OSError):
                    connection.send(code.to_bytes(4, "big", signed=True))


def _exit_with(run: Callable[..., object], *arguments: Any) -> NoReturn:
    """Call ``run`` in this fork of the server, then end the process as Python would: with its exit
    code, its traceback, and flushed streams."""
    code: object = 1
    try:
        run(*arguments)
        code = 0
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads of the rank
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # Not `sys.exit`: the frames of the server are on this stack.
        os._exit(code if isinstance(code, int) else int(code is not None))


def opened_files(beginnings: tuple[str, ...]) -> list[str]:
    """Return the open files of this process whose path starts with one of ``beginnings``."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry.path))
    return sorted(path for path in found if path.startswith(beginnings))


# In a rank with a log: file descriptor of a stream -> copy of the launcher's descriptor
_console: dict[int, int] = {}


def has_own_log() -> bool:
    """True if the output of this rank goes to a log and not to the console."""
    return bool(_console)


def log_for_all_ranks() -> None:
    """Redirect this rank's output from its log to the launcher's console. Called when this rank
    becomes the leader."""
    while _console:
        number, kept = _console.popitem()
        os.dup2(kept, number)
        os.close(kept)


def _run_rank(server: int, connection: socket.socket, others: Sequence[socket.socket]) -> NoReturn:
    end_with_parent(server)
    os.setsid()
    for inherited in others:
        inherited.close()
    with connection, connection.makefile("rb") as request:
        connection.send(os.getpid().to_bytes(4, "big"))
        main, words, environment, streams, folder, path = json.load(request)
    for number, file in enumerate(streams, start=1):
        if file:
            _console[number] = os.dup(number)
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
            os.dup2(opened, number)
            os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    if "RANK" in environment:  # `run_once` does not set RANK
        set_process_name(f"rank {environment['RANK']}")
    signal.pthread_sigmask(signal.SIG_SETMASK, set())  # the default of a new process
    # OpenMP has read OMP_NUM_THREADS in the server, where its value differs.
    if "torch" in sys.modules:
        threads = int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        sys.modules["torch"].set_num_threads(threads)
    try:
        sys.exit(pkgutil.resolve_name(main)(words))
    finally:
        # `_exit_with` ends this process with `os._exit`, which runs no exit handlers.
        atexit._run_exitfuncs()

"""A node that behaves like a separate machine. It has a network namespace of the cluster, and
separate process, mount and host-name namespaces. Start at `Node`.

The first process of a node, *init*, keeps its namespaces alive. If init is killed, the kernel kills
all processes of the node. Init also ends when the process that has started it ends for any reason.
The file system is shared, as on a cluster; each node has a separate ``/dev/shm``, ``/etc/hosts``,
host name and ``TMPDIR``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from tools.cluster.network import ClusterError

_INIT = """
echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && mount -t tmpfs -o mode=1777 tmpfs /dev/shm || exit 1
echo up
exec 3<&0 > /dev/null 2>&1
cat <&3 &
wait $!
"""  # cat ends with the pipe to the tool; init ends with cat, and all processes with init; `wait` collects orphans
_ENTER = 'cd "$1" && shift && exec "$@"'
_OF_A_LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip


def node_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process and ``extra``. The variables of a launcher that has
    started this process are removed."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in _OF_A_LAUNCHER and not k.startswith(("TORCHELASTIC_", "SLURM_"))
    }
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONUNBUFFERED": "1", **extra}


def pid_namespace(pid: int) -> str | None:
    """Return the identity of a process's pid namespace; None if the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _child(pid: int) -> int | None:
    """Return the process id of the only child of process ``pid``, which is ``nsenter`` or
    ``unshare``. The child is the command."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children():
            return process.pid
    return None


class Process:
    """A command on a node. ``sink`` receives the output line by line, until all processes have
    closed the stream."""

    def __init__(
        self,
        node: Node,
        words: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        sink: Callable[[bytes], None],
    ) -> None:
        self.node = node
        self.words = list(words)
        self._popen = subprocess.Popen(
            ["nsenter", f"--target={node.init_pid}", "--net", "--uts", "--mount", "--pid", "--", "sh", "-c", _ENTER, "sh", cwd, *words],
            env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(sink,), daemon=True)
        self._reader.start()

    def _read(self, sink: Callable[[bytes], None]) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as stream:
            for line in stream:
                sink(line)

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that ended it), None while it runs."""
        return self._popen.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and for all output; return the exit code. Raises `ClusterError` after ``timeout`` seconds."""
        try:
            code = self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"{self.node.name}: still running after {timeout:g} s: {' '.join(self.words)}"
            ) from None
        # a child of the command may still run and keep the stream open
        self._reader.join(timeout=5)
        return code

    @property
    def pid(self) -> int:
        """The command's process id outside of the node. Raises `ClusterError` after its end."""
        while self.poll() is None:  # the command may not have started yet
            if (pid := _child(self._popen.pid)) is not None:
                return pid
        raise ClusterError(
            f"{self.node.name}: the process has ended with code {self._popen.poll()}"
        )

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGCONT:
            self.wake()

    def wake(self) -> None:
        """Continue ``nsenter``. It stops together with its command, and a stopped ``nsenter`` does
        not notice the end of the command."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGCONT)


class Node:
    """A machine of the cluster.

    Args:
        name: host name.
        address: IPv4 address of ``eth0``.
        namespace: network namespace.
        folder: holds the temporary folder of the node.
        hosts: file that becomes ``/etc/hosts``.
    """

    def __init__(self, name: str, address: str, namespace: str, folder: Path, hosts: Path) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace
        self.temporary = folder / name
        self.hosts = hosts
        self.init_pid = 0
        self._holder: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Start init. Raises `ClusterError` with the output of a failed command."""
        assert not self.alive
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        unshare = [
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
        ]
        words = [*unshare, _INIT, "init", self.name, str(self.hosts)]
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        first = self._holder.stdout.readline()
        if first != b"up\n":
            rest = self._holder.stdout.read()
            self.kill()
            raise ClusterError(
                f"{self.name} does not start: {(first + rest).decode(errors='replace').strip()}"
            )
        self.init_pid = _child(self._holder.pid) or 0

    @property
    def alive(self) -> bool:
        return self._holder is not None and self._holder.poll() is None

    def kill(self) -> None:
        """Kill all processes of the node, and wait until they have ended."""
        if self._holder is None:
            return
        if self.alive and self.init_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid, signal.SIGKILL)
        elif self.alive:
            self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()
        self._holder, self.init_pid = None, 0

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        sink: Callable[[bytes], None],
    ) -> Process:
        """Start a command on this node. ``sink`` receives each line of its output."""
        if not self.alive:
            raise ClusterError(f"{self.name} is down")
        return Process(self, words, {**environment, "TMPDIR": str(self.temporary)}, cwd, sink)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this node except init and its helper, with their ids outside of the node."""
        space = pid_namespace(self.init_pid) if self.alive else None
        if space is None:
            return []
        found = []
        for process in psutil.process_iter(["ppid", "name", "status"]):
            of_init = process.info["ppid"] == self.init_pid and process.info["name"] == "cat"
            is_dead = process.info["status"] == psutil.STATUS_ZOMBIE
            if pid_namespace(process.pid) == space and not of_init and not is_dead:
                found.append(process)
        return [process for process in found if process.pid != self.init_pid]

    def worker(self, local_rank: int) -> int:
        """Return the process id, outside of the node, of the worker with this LOCAL_RANK. Raises `ClusterError` if it does not exist.

        Workers of torchrun have LOCAL_RANK in their environment. Workers that our launcher forks are named ``rank N``.
        """
        started: dict[
            int, str
        ] = {}  # also processes that a worker started: they inherit its environment
        workers: dict[int, int] = {}
        forked: dict[int, int] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if rank := process.environ().get("LOCAL_RANK"):
                    started[process.pid] = rank
                if process.name().startswith("rank "):
                    forked[int(process.name().split()[1])] = process.pid
        for pid, rank in started.items():
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).ppid() not in started:
                    workers[int(rank)] = pid
        workers.update(enumerate(pid for _, pid in sorted(forked.items())))
        if local_rank not in workers:
            there = sorted(map(str, workers)) or "none at all"
            raise ClusterError(
                f"{self.name} has no worker with local rank {local_rank}, only {there}"
            )
        return workers[local_rank]

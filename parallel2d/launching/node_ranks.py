"""Starts, polls and ends the processes of the ranks of one node: `NodeRanks`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from parallel2d.launching.failures import RankFailure, read_error_file, read_waiting
from parallel2d.launching.rank_processes import RankProcess, start_rank

# After a failure, the other ranks of the node receive SIGTERM, and SIGKILL this time later: a rank
# that is stopped or blocked does not react to SIGTERM.
GRACE_AFTER_FAILURE_S = 5.0
_POLL_S = 0.1


class NodeRanks:
    """The ranks of this node.

    Args:
        main: each rank calls this function ("package.module:function") with ``words``.
        words: the arguments of ``main``.
        folder: folder for logs and error files.
        has_logs: True if every rank except the first writes its output to a log in ``folder``.

    Attributes:
        processes: the processes by local rank.
        numbers: the global ranks by local rank.
    """

    def __init__(self, main: str, words: Sequence[str], folder: str, has_logs: bool) -> None:
        self._main, self._words, self._has_logs = main, words, has_logs
        os.makedirs(folder, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="start_", dir=folder)
        self._environments: dict[int, dict[str, str]] = {}
        self.processes: dict[int, RankProcess] = {}
        self.numbers: dict[int, int] = {}

    def start(self, attempt: int, environments: Sequence[Mapping[str, str]]) -> None:
        """Start all ranks, one per environment. ``attempt`` is the number of this start, which
        differs from all earlier starts."""
        self.processes, self.numbers = {}, {}
        for local, environment in enumerate(environments):
            folder = os.path.join(self._folder, f"attempt_{attempt}", str(local))
            os.makedirs(folder)
            report = os.path.join(folder, "error.json")
            self._environments[local] = {**environment, "TORCHELASTIC_ERROR_FILE": report}
            self.numbers[local] = int(environment["RANK"])
            self.start_one(local, {})

    def start_one(self, local: int, variables: Mapping[str, str]) -> None:
        """Start or restart the rank with local rank ``local``. A restart gets the environment of
        the previous start, updated with ``variables``."""
        environment = self._environments[local]
        environment.update(variables)
        report = environment["TORCHELASTIC_ERROR_FILE"]
        for left in (report, f"{report}.waiting"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)
        logs: list[str | None] = [None, None]
        if self._has_logs and local > 0:
            folder = os.path.dirname(report)
            logs = []
            for name in ("stdout.log", "stderr.log"):
                logs.append(os.path.join(folder, name))
        self.processes[local] = start_rank(self._main, self._words, environment, *logs)

    def codes(self) -> list[int | None]:
        """Return the exit codes of all ranks; None for a running rank."""
        return [process.poll() for process in self.processes.values()]

    def failure(self, local: int) -> RankFailure:
        """Return the failure of a rank that has ended with a code other than 0."""
        code = self.processes[local].wait()
        report = self._environments[local]["TORCHELASTIC_ERROR_FILE"]
        error = read_error_file(report)
        return RankFailure(self.numbers[local], code, error, read_waiting(report))

    def end_after_failure(self) -> list[RankFailure]:
        """End the running ranks. Return all failures, first the failures from before this call."""
        first = [local for local, process in self.processes.items() if process.poll()]
        self.end(signal.SIGTERM, GRACE_AFTER_FAILURE_S)
        failed = [local for local, process in self.processes.items() if process.poll()]
        failed.sort(key=lambda local: local not in first)
        return list(map(self.failure, failed))

    def end(
        self, number: signal.Signals, grace_s: float, poll: Callable[[], object] = lambda: None
    ) -> None:
        """Send the signal to all running ranks, and kill ranks that still run after ``grace_s``
        seconds. ``poll`` is called repeatedly while they run."""
        for sent, seconds in ((number, grace_s), (signal.SIGKILL, GRACE_AFTER_FAILURE_S)):
            running = []
            for each in self.processes.values():
                if each.poll() is None:
                    running.append(each)
            for process in running:
                process.close(sent)
            # SIGKILL does not end a process that is blocked in the kernel, so the wait has a
            # deadline.
            deadline = time.monotonic() + seconds
            while running and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running[0].wait(_POLL_S)
                running = [each for each in running if each.poll() is None]
                poll()

"""The processes of one node's ranks, from their start to their end: `NodeRanks`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

from parallel2d.launching.failures import RankFailure, read_error_file, read_waiting
from parallel2d.launching.rank_processes import RankProcess, start_rank

# Between SIGTERM and SIGKILL for ranks of a node of which one has failed: one that is stopped or
# stuck does not react to SIGTERM.
GRACE_AFTER_FAILURE_S = 5.0


class NodeRanks:
    """Each calls ``main`` ("package.module:function") with ``words``. ``folder``: of what they
    leave; ``has_logs``: those beside the first print there. ``processes``: by local rank, as are
    ``numbers``, their ranks in the job."""

    def __init__(self, main: str, words: Sequence[str], folder: str, has_logs: bool) -> None:
        self._main, self._words, self._has_logs = main, words, has_logs
        os.makedirs(folder, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="start_", dir=folder)
        self._environments: dict[int, dict[str, str]] = {}
        self.processes: dict[int, RankProcess] = {}
        self.numbers: dict[int, int] = {}

    def start(self, attempt: int, environments: Sequence[Mapping[str, str]]) -> None:
        """Starts all. ``attempt``: another number than at the starts before."""
        self.processes, self.numbers = {}, {}
        for local, environment in enumerate(environments):
            folder = os.path.join(self._folder, f"attempt_{attempt}", str(local))
            os.makedirs(folder)
            report = os.path.join(folder, "error.json")
            self._environments[local] = {**environment, "TORCHELASTIC_ERROR_FILE": report}
            self.numbers[local] = int(environment["RANK"])
            self.start_one(local, {})

    def start_one(self, local: int, variables: Mapping[str, str]) -> None:
        """Starts the rank with this local number, once more where it has ended. ``variables``: of
        its environment, beside those that it had."""
        environment = self._environments[local]
        environment.update(variables)
        report = environment["TORCHELASTIC_ERROR_FILE"]
        for left in (report, f"{report}.waiting"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)
        logs: list[str | None] = [None, None]
        if self._has_logs and local > 0:
            folder = os.path.dirname(report)
            logs = [os.path.join(folder, name) for name in ("stdout.log", "stderr.log")]
        self.processes[local] = start_rank(self._main, self._words, environment, *logs)

    def codes(self) -> list[int | None]:
        """The exit codes of all; None of one that runs."""
        return [process.poll() for process in self.processes.values()]

    def failure(self, local: int) -> RankFailure:
        """That of a rank that has ended with another code than 0."""
        code = self.processes[local].wait()
        report = self._environments[local]["TORCHELASTIC_ERROR_FILE"]
        error = read_error_file(report)
        return RankFailure(self.numbers[local], code, error, read_waiting(report))

    def end_after_failure(self) -> list[RankFailure]:
        """Ends those that run, and returns all failures, first those that were there before."""
        first = [local for local, process in self.processes.items() if process.poll()]
        self.end(signal.SIGTERM, GRACE_AFTER_FAILURE_S)
        failed = [local for local, process in self.processes.items() if process.poll()]
        failed.sort(key=lambda local: local not in first)
        return list(map(self.failure, failed))

    def end(self, number: signal.Signals, grace_s: float) -> None:
        """Sends all that run this signal, and kills those that are there after ``grace_s``
        seconds."""
        for sent, seconds in ((number, grace_s), (signal.SIGKILL, GRACE_AFTER_FAILURE_S)):
            running = [each for each in self.processes.values() if each.poll() is None]
            for process in running:
                process.close(sent)
            deadline = time.monotonic() + seconds
            for process in running:
                # One that the kernel holds does not end even when it is killed.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))

"""One job on the nodes of a cluster: `Job`, with a launcher per node, their output, and the rows of
the job.

`launcher_words` makes the command line of each node's launcher from the arguments of the job. If
the arguments include the run directory (``hydra.run.dir=...``), `Job` can wait for a step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.cluster.network import ClusterError
from tools.cluster.node import Process

if TYPE_CHECKING:
    from tools.cluster.cluster import Cluster

LAUNCHERS = ("torchrun", "own", "none")
PORT = 29400  # the same number on every node, because each node has a separate network namespace
# With these values torchrun detects a failed node after 3 s instead of 30 s, and then waits 5 s
# instead of 30 s for late nodes.
_DETECTION = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"


def launcher_words(
    launcher: str,
    words: Sequence[str],
    *,
    nodes: int,
    min_nodes: int,
    ranks: int,
    endpoint: str,
    job_id: str,
    max_restarts: int | None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command of one node and its additional environment.

    ``words`` are the arguments of ``python``, or with launcher ``none`` the complete command.
    """
    count = str(nodes) if min_nodes == nodes else f"{min_nodes}:{nodes}"
    if launcher == "torchrun":
        options = [
            f"--nnodes={count}",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={max_restarts or 0}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={job_id}",
            f"--rdzv-conf={_DETECTION}",
        ]
        # Without this variable, restarted ranks read the addresses of dead peers from the agent's store.
        extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [sys.executable, "-m", "torch.distributed.run", *options, *words], extra
    if launcher == "own":
        options = [
            f"launch.nnodes={count}",
            f"launch.nproc_per_node={ranks}",
            f"launch.rdzv_endpoint={endpoint}",
            f"launch.job_id={job_id}",
        ]
        if max_restarts is not None:
            options.append(f"launch.max_restarts={max_restarts}")
        return [sys.executable, *words, *options], {}
    return list(words), {}


class Job:
    """A job that `Cluster.run` has started. ``run_dir`` is None if the arguments do not name the run directory."""

    def __init__(
        self,
        cluster: Cluster,
        words: Sequence[str],
        launcher: str,
        options: dict[str, Any],
        environment: Mapping[str, str],
        cwd: str,
    ) -> None:
        self.cluster = cluster
        self.words = list(words)
        self.launcher = launcher
        self.cwd = cwd
        self._options = options
        self._environment = dict(environment)
        named = [word.partition("=")[2] for word in self.words if word.startswith("hydra.run.dir=")]
        self.run_dir = Path(cwd, named[-1]) if named else None
        self.processes: dict[int, Process] = {}

    def start(self, node: int) -> None:
        """Start the launcher of one node, also after the node was restored."""
        running = self.processes.get(node)
        if running is not None and running.poll() is None:
            raise ClusterError(f"{self.cluster.nodes[node].name}: the launcher still runs")
        words, extra = launcher_words(
            self.launcher, self.words, ranks=self.cluster.ranks[node], **self._options
        )
        self.processes[node] = self.cluster.start(
            node, words, environment={**self._environment, **extra}, cwd=self.cwd
        )

    def poll(self) -> dict[int, int | None]:
        """Return node -> exit code of its launcher, None while it runs."""
        return {node: process.poll() for node, process in self.processes.items()}

    def is_running(self) -> bool:
        """True if the launcher of any node still runs."""
        return any(code is None for code in self.poll().values())

    def wait(self, timeout: float | None = None) -> dict[int, int]:
        """Wait for all launchers and return node -> exit code. Raises `ClusterError` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_running():
            if deadline is not None and time.monotonic() > deadline:
                raise ClusterError(
                    f"after {timeout:g} s the job still runs: {self.poll()}\n{self.tail()}"
                )
            time.sleep(0.05)
        return {node: process.wait() for node, process in self.processes.items()}

    def check(self, timeout: float | None = None) -> None:
        """Wait for all launchers. Raises `ClusterError` with the end of the output if a launcher
        ends with another exit code than 0."""
        codes = self.wait(timeout)
        if any(codes.values()):
            raise ClusterError(f"exit codes by node: {codes}\n{self.tail()}")

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete rows of ``metrics.jsonl`` so far."""
        if self.run_dir is None:
            raise ClusterError(
                "the job's words name no hydra.run.dir=, so its metrics.jsonl is unknown"
            )
        try:
            text = (self.run_dir / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def step(self) -> int:
        """Return the newest step in ``metrics.jsonl``, 0 before the first."""
        return max((row["step"] for row in self.rows() if "step" in row), default=0)

    def wait_for_step(self, step: int, timeout: float = 120.0) -> int:
        """Wait for ``step`` and return the newest step. Raises `ClusterError` if the job ends before, or after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (newest := self.step()) < step:
            if not self.is_running() and self.step() < step:
                raise ClusterError(
                    f"the job ended before step {step}: {self.poll()}\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                late = f"step {step} was not reached within {timeout:g} s, only {newest}"
                raise ClusterError(f"{late}\n{self.tail()}")
            time.sleep(0.05)
        return newest

    def send_signal(self, number: int, node: int | None = None) -> None:
        """Send a signal to the launcher of one node, or of all."""
        for which in self.processes if node is None else [node]:
            self.processes[which].send_signal(number)

    def output(self, node: int) -> str:
        """Return the output of this node's processes so far: standard output and standard error."""
        return self.cluster.log_path(node).read_text(errors="replace")

    def tail(self, characters: int = 3000) -> str:
        """Return the end of every node's output."""
        return "\n".join(
            f"--- {self.cluster.nodes[node].name}\n{self.output(node)[-characters:]}"
            for node in self.processes
        )

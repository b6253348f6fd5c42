"""The section ``launch``: ranks and nodes, rendezvous, restarts, heartbeats, timeouts, and the exit
code after SIGTERM. The module `job` defines the other sections of a job."""

from __future__ import annotations

from dataclasses import dataclass

from parallel2d.base.config.options import option
from parallel2d.base.errors import ConfigError
from parallel2d.base.exit_codes import PREEMPTED


@dataclass
class LaunchConfig:
    """Settings of the launcher, which starts ranks without torchrun or srun: on this machine, or on
    every node that runs the same command."""

    nproc_per_node: int | str = option("auto", "Ranks of a node; auto: one per GPU, else 4", min=1)
    nnodes: int | str = option(
        1, "Nodes; 2:4: continue with fewer, grow again, with one loss curve"
    )
    rdzv_endpoint: str | None = option(
        None, "HOST:PORT where nodes meet: an address of one of them, or of a store outside of them"
    )
    job_id: str | None = option(
        None, "Tells jobs that share an endpoint apart, for a store outside"
    )
    secret_file: str | None = option(
        None,
        "File with the secret of the job's nodes; null: it is in PARALLEL2D_SECRET. `python -m "
        "parallel2d.launch secret` makes one",
    )
    insecure: bool = option(False, "No secret: any process that reaches the endpoint can run code")
    rendezvous_timeout: float = option(600.0, "Seconds to wait for a store and enough nodes", min=1)
    max_restarts: int | str = option(
        "auto", "Failures without a step in between. auto: 0 on one node, 5 on several", min=0
    )
    min_replicas: int = option(
        1, "Live replicas with which training continues after a failure; fewer wait", min=1
    )
    on_replica_loss: str = option(
        "auto",
        "auto: the others train on, on GPUs only where preflight has passed; docs/failures.md",
        choices=("auto", "continue", "restart"),
    )
    replica_backend: str = option(
        "auto",
        "Of collectives over replicas that may be lost; auto: as preflight has passed, else gloo",
        choices=("auto", "gloo", "nccl2"),
    )
    heartbeat_interval_s: float = option(
        0.5, "Seconds between heartbeats of a launcher; equal on all nodes", min=0.01
    )
    heartbeat_timeout_s: float = option(
        3.0, "Seconds without a heartbeat, or of a stopped rank (SIGSTOP), until others continue"
    )
    timeout: float = option(600.0, "Seconds that a collective may wait for a late rank", above=0)
    first_step_timeout: float | None = option(
        None, "Seconds of the same in the first step; null: 1800, or `timeout` if larger"
    )
    grace_s: int = option(60, "Seconds that workers have to save after SIGTERM or SIGUSR1", min=1)
    requeue_exit_code: int = option(
        PREEMPTED,
        "Exit code of a run that saved after such a signal (EX_TEMPFAIL)",
        between=(1, 255),
    )
    host_id: str | None = option(None, "Host identity; null: host name and network namespace")

    @property
    def longest_wait(self) -> float:
        """Seconds that ranks may wait for each other until the first step is done."""
        if self.first_step_timeout is not None:
            return self.first_step_timeout
        return max(1800.0, self.timeout)

    @property
    def node_range(self) -> tuple[int, int]:
        """The smallest and the largest number of nodes: (4, 4) for ``nnodes=4``, and (2, 4) for
        ``2:4``. Raises `ConfigError` for other values."""
        low, colon, high = str(self.nnodes).partition(":")
        if not colon:
            high = low
        if low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high):
            return int(low), int(high)
        raise ConfigError(
            f"launch.nnodes={self.nnodes} must be a number of nodes, at least 1, or a range such "
            "as 2:4"
        )

    @property
    def elastic(self) -> bool:
        """True if the number of nodes may change while the job runs."""
        smallest, largest = self.node_range
        return smallest != largest

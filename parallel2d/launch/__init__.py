"""Who is a rank, and how ranks come to be.

A process that torchrun or srun started is a rank already; anything else starts ranks itself, with
torch's elastic agent: all of them on this machine, or this node's share of a job on several. The
environment flows in; out come a `Place` (which rank this is) or running workers. Every way ends in
the same `Job` on every rank: composed once, one run directory.
"""

from parallel2d.launch.agreement import (
    agree_on_job,
    failures_told_once,
    forget_run,
    telling_progress,
)
from parallel2d.launch.endings import Preempted, WorkersFailed
from parallel2d.launch.place import Place, end_with_parent, find_place, first_host, workers_per_node
from parallel2d.launch.workers import start_node, start_workers

__all__ = [
    "Place",
    "Preempted",
    "WorkersFailed",
    "agree_on_job",
    "end_with_parent",
    "failures_told_once",
    "find_place",
    "first_host",
    "forget_run",
    "start_node",
    "start_workers",
    "telling_progress",
    "workers_per_node",
]

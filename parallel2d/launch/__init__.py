"""Starts the ranks of a job: all of them on this machine, or this node's share on several.

A process that torchrun or srun started is a rank already; any other starts ranks with torch's
elastic agent. However they were started, all ranks get the same `Job`, which was composed once, and
one run directory.
"""

from parallel2d.launch.failures import Preempted, WorkersFailed
from parallel2d.launch.launcher import start_node, start_workers
from parallel2d.launch.processes import open_standard_streams, workers_per_node
from parallel2d.launch.rank_processes import start_server
from parallel2d.rank_environment import RankIdentity, find_rank, first_host

__all__ = [
    "Preempted",
    "RankIdentity",
    "WorkersFailed",
    "find_rank",
    "first_host",
    "open_standard_streams",
    "start_node",
    "start_server",
    "start_workers",
    "workers_per_node",
]

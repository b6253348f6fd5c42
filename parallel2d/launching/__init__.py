"""Starts the ranks of a job: all of them on this machine, or this node's share on several.

A process that torchrun or srun started is a rank already; any other starts ranks. However they were
started, all ranks get the same `Job`, which was composed once, and one run directory.
"""

from parallel2d.base.topology import RankIdentity, find_rank, first_host
from parallel2d.launching.failures import Preempted, WorkersFailed
from parallel2d.launching.launcher import exit_code_of, run_once, start_node, start_workers
from parallel2d.launching.processes import (
    keep_others_from_writing,
    open_standard_streams,
    workers_per_node,
)
from parallel2d.launching.rank_processes import start_server

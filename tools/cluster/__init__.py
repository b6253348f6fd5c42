"""Simulates several nodes on one Linux machine. Nodes are network namespaces with limited links,
and run launchers of torchrun or this package. The module counts bytes and injects faults.

Start at `Cluster` from Python and at ``python -m tools.cluster`` from the command line. Guide:
docs/cluster.md.
"""

from tools.cluster.cluster import Cluster, why_not
from tools.cluster.faults import Fault, parse_fault
from tools.cluster.job import Job
from tools.cluster.network import ClusterError, difference

__all__ = ["Cluster", "ClusterError", "Fault", "Job", "difference", "parse_fault", "why_not"]

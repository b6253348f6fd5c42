"""Checks whether a cluster is fit to train on, with one process per node. Start at `check`.

Each node collects facts about itself (`facts`) and measures its links to the others (`probes`),
over the pairs that `schedule` names. The results are exchanged through a key-value store
(`meeting`). Node 0 turns them into findings, each of which names a node and a cause (`judge`),
prints them and writes the cluster file that the planner reads (`outcome`). No process group is
formed, so that the check also works where gloo or NCCL cannot.
"""

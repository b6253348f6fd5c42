"""Checks whether a cluster is fit to train on, and measures it for the planner.

Ordinary ranks, started as those of the train command, report on their nodes (`node_facts`), measure
themselves and the axes of the job's mesh (`rank_measurement`), and judge what they have found
(`verdict`). Rank 0 writes the cluster file (`cluster_description`, `link_fit`).
"""

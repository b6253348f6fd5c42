"""Preflight check of a cluster before training, and measurements of the cluster for the planner.

Ordinary ranks, started as by the train command, measure themselves and the axes of the job's mesh
(`rank_measurement`), report on their nodes and judge the results (`verdict`).
"""

"""Checks whether a cluster is fit to train on, and measures it for the planner.

Ordinary ranks, started as those of the train command, measure themselves and the axes of the job's
mesh (`rank_measurement`), report on their nodes and judge what they have found (`verdict`).
"""

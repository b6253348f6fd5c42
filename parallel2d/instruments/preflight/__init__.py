"""Preflight check of a cluster before training, and measurements of the cluster for the planner.

The check starts ranks as the train command does. The ranks measure their devices and the axes of
the job's mesh (`rank_measurement`), collect facts about their nodes, and evaluate the results
(`verdict`).
"""

"""Planner: the cost of a job on a cluster, computed in one process without starting the job.

`planner.layout_cost.cost_of` computes the cost of one layout, and `planner.layout_search` searches
for the fastest layout.
"""

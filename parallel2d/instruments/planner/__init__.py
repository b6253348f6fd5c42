"""What a job would do on a cluster, computed in one process and started nowhere.

`planner.layout_cost.cost_of` is about one layout, `planner.layout_search`
finds one.
"""

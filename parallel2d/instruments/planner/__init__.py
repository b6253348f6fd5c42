"""What a job would do on a cluster, computed in one process and started nowhere.

`parallel2d.instruments.planner.layout_cost.cost_of` is about one layout, `parallel2d.instruments.planner.layout_search`
finds one.
"""

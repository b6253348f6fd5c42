"""Is this cluster fit to train on? One process per node looks, measures and tells; node 0 judges.

What every node finds out about itself (`facts`) and about its way to the others (`probes`, over the
pairs that `schedule` names) meets in a key-value store (`meeting`); `judge` turns it into findings,
each of which names a node and a cause; `report` prints them and writes the cluster file that a
planner reads. `check` runs the whole on one node. No process group is formed, so that the report
can also be given where gloo or NCCL cannot work.
"""

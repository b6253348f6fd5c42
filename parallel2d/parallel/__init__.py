"""Parallelism of a model over a mesh.

`mesh` builds the mesh, `parallelize` shards the model, `sync` synchronizes the replicas, `weights`
initializes, loads and returns weights and states, and `cost` predicts the communication, memory and
FLOPs of a layout.
"""

"""Parallelism of a model over a mesh.

`mesh` builds the mesh, `parallelize` shards the model, `sync` reduces over replicas, `weights`
fills and reads sharded states, and `cost` computes the bytes, memory and FLOPs of a layout.
"""

"""The subject: a model laid over a mesh. `mesh` builds it, `parallelize` shards the model, `sync`
averages over replicas, `weights` fills and reads sharded states, `cost` says what a layout needs.
"""

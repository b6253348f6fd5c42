"""The engine of reductions over replicas: groups, buckets, and the hooks of a backward pass."""

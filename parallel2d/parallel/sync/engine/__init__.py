"""The engine that reduces gradients over replicas: groups, buckets, and hooks of a backward pass."""

"""The engine that reduces gradients over replicas: groups, buckets, and backward hooks."""

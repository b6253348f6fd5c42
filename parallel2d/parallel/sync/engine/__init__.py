"""What reduces gradients over the replicas: buckets, groups, and the pass through backward."""

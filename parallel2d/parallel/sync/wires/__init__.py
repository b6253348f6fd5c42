"""The forms in which replicas send values."""

"""Base layer: configuration, errors, files, the process group, rank and host identity, the
authenticated store. No module of this layer knows about models."""

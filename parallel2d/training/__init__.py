"""A training run on a parallelized model: data, loop, optimizer, checkpoints, metrics and run
directory. `assemble` builds all these parts in order."""

"""A training run on a parallelized model: its data, loop, optimizer, checkpoints, metrics and
directory. `assemble` builds all of it in order."""

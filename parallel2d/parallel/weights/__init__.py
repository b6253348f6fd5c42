"""Weights of parallelized models: read from a folder of pretrained files, loaded from a state dict
of one rank, and gathered to be viewed or changed whole. What is to survive the process is written
by `checkpoint`."""

"""Weights of parallelized models.

They are read from a folder of pretrained files, loaded from the state dict of one rank, and
unsharded for inspection and changes. `checkpoint` writes states that outlive the process.
"""

"""Weights of parallelized models.

This package initializes weights, reads them from pretrained files, loads the state dict of one
rank, and unshards parameters for inspection and changes. The package `checkpoint` saves states.
"""

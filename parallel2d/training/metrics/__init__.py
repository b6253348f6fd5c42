"""Measures a run and writes the results. The measurements do not change the results of training."""

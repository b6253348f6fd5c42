"""Assigns samples to global batches, and reads them on each rank.

`opening.open_data` opens the sample streams of a `DataConfig`. `feed.BatchPlan` computes the
positions that a rank reads, and `feed.BatchFeed` reads the samples at these positions ahead of the
training step.
"""

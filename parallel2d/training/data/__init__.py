"""Assigns samples to global batches, and reads them on each rank.

`opening.open_data` opens the sample streams that a `DataConfig` describes, `feed.BatchPlan` gives
the positions that a rank reads, and `feed.BatchFeed` reads them ahead of the training step.
"""

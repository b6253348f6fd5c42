"""What crosses the replicate axis, and when. Modules sharded by `parallel2d.parallelize` flow in; they are told, before each
micro-batch, which of its collectives to run."""

from parallel2d.sync.accumulation import accumulate, no_sync

__all__ = ["accumulate", "no_sync"]

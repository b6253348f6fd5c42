"""Synchronization methods of the replicate axis: `method_of` selects one by the configuration.

- every step, on all replicas: gradients are all-reduced.
- every step, split (``strategy=hybrid_full``): gradients are reduced to the replica that updates
  them, and updated parameters are all-gathered.
- ``sync=diloco``: gradients stay on their replica, and parameter changes are averaged every few
  steps.
"""

from __future__ import annotations

from parallel2d.base.config import StrategyConfig, SyncConfig
from parallel2d.parallel.sync.methods.diloco import DiLoCo
from parallel2d.parallel.sync.methods.every_step import EveryStep
from parallel2d.parallel.sync.methods.method import SyncMethod
from parallel2d.parallel.sync.methods.split_updates import SplitUpdates


def method_of(strategy: StrategyConfig, sync: SyncConfig, replicas: int) -> SyncMethod:
    """Return the method for ``replicas`` replicas."""
    # With DiLoCo a single replica takes outer steps too.
    if sync.name == "diloco":
        return DiLoCo(sync)
    if replicas == 1:
        return SyncMethod(sync)
    if strategy.placement.splits_updates:
        return SplitUpdates(sync)
    return EveryStep(sync)

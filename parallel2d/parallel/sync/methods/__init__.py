"""Synchronization methods of the replicate axis: `method_of` selects one by the configuration.

- `EveryStep` (default): gradients are all-reduced in every step.
- `SplitUpdates` (``strategy=hybrid_full``): each replica updates a part of each parameter.
  Gradients are reduce-scattered to these parts, and updated parameters are all-gathered.
- `DiLoCo` (``sync=diloco``): gradients are not communicated, and parameter changes are averaged
  every few steps.
"""

from __future__ import annotations

from parallel2d.base.config import StrategyConfig, SyncConfig
from parallel2d.parallel.sync.methods.diloco import DiLoCo
from parallel2d.parallel.sync.methods.every_step import EveryStep
from parallel2d.parallel.sync.methods.method import SyncMethod
from parallel2d.parallel.sync.methods.split_updates import SplitUpdates


def method_of(strategy: StrategyConfig, sync: SyncConfig, replicas: int) -> SyncMethod:
    """Return the method for ``replicas`` replicas."""
    # With DiLoCo a single replica also makes outer steps.
    if sync.name == "diloco":
        return DiLoCo(sync)
    if replicas == 1:
        return SyncMethod(sync)
    if strategy.placement.splits_updates:
        return SplitUpdates(sync)
    return EveryStep(sync)

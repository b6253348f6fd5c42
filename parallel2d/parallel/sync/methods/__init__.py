"""What crosses the replicate axis: `method_of` chooses one method from the configuration.

- every step, whole: gradients are reduced on all replicas.
- every step, split (``strategy=hybrid_full``): gradients are reduced to the replica that updates
  them, updated parameters are gathered.
- ``sync=diloco``: gradients stay on their replica, changes of parameters are averaged now and then.
"""

from __future__ import annotations

from parallel2d.base.config import StrategyConfig, SyncConfig
from parallel2d.parallel.sync.methods.diloco import DiLoCo
from parallel2d.parallel.sync.methods.every_step import EveryStep
from parallel2d.parallel.sync.methods.method import SyncMethod
from parallel2d.parallel.sync.methods.split_updates import SplitUpdates


def method_of(strategy: StrategyConfig, sync: SyncConfig, replicas: int) -> SyncMethod:
    """The method of ``replicas`` replicas."""
    # A single replica that trains with DiLoCo takes outer steps too.
    if sync.name == "diloco":
        return DiLoCo(sync)
    if replicas == 1:
        return SyncMethod(sync)
    if strategy.placement.splits_updates:
        return SplitUpdates(sync)
    return EveryStep(sync)

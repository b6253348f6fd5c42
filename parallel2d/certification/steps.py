"""How many steps a certification takes, and of what layout it is."""

from __future__ import annotations

from parallel2d.config import ParallelConfig, SyncConfig
from parallel2d.mesh import MeshShape
from parallel2d.sync.outer_settings import describe_sync

FEWEST = 5


def shorten_period(sync: SyncConfig, notes: list[str]) -> None:
    """With ``sync=diloco``: few enough steps between outer ones that some can be seen."""
    if sync.name != "diloco":
        return
    every = max(sync.delay + 1, sync.fragments, 3)
    if every < sync.every:
        notes.append(f"sync.every={every} instead of {sync.every}, to see outer steps")
        sync.every = every


def steps_of(sync: SyncConfig) -> int:
    """With ``sync=diloco`` two periods, and until the last part has arrived."""
    if sync.name != "diloco":
        return FEWEST
    return max(FEWEST, 2 * sync.every + sync.delay + 1)


def layout_of(config: ParallelConfig, shape: MeshShape) -> str:
    """For people."""
    crosses = describe_sync(config.strategy, config.sync, shape.replicate)
    return (
        f"replicate={shape.replicate} shard={shape.shard} tensor={shape.tensor} "
        f"strategy={config.strategy.name} precision={config.precision.name} ({crosses})"
    )

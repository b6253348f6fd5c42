"""The settings of ``sync=diloco``, with numbers for ``auto``."""

from __future__ import annotations

from parallel2d.base.config import StrategyConfig, SyncConfig


def mix_of(config: SyncConfig) -> float:
    """``sync.mix``, or what ``auto`` stands for."""
    if config.mix == "auto":
        return 0.5 if config.delay else 0.0
    return float(config.mix)


def outer_settings(config: SyncConfig) -> tuple[float, float]:
    """The learning rate and the momentum of the outer step, or what ``auto`` stands for."""
    lr, momentum = 0.7, 0.6
    if config.outer_lr != "auto":
        lr = float(config.outer_lr)
    if config.outer_momentum != "auto":
        momentum = float(config.outer_momentum)
    return lr, momentum


def describe_sync(strategy: StrategyConfig, sync: SyncConfig, replicas: int) -> str:
    """What crosses the replicate axis, for people, with numbers for ``auto``."""
    if replicas == 1 and sync.name != "diloco":
        return "one replica: nothing crosses the replicate axis"
    wire = "precision.reduce" if sync.wire == "auto" else sync.wire
    if sync.name != "diloco":
        what = "gradients and updated parameters" if strategy.splits_updates else "gradients"
        return f"every step, {what} in {wire}"
    lr, momentum = outer_settings(sync)
    wire = "fp32" if sync.wire == "auto" else sync.wire
    text = f"diloco every {sync.every} steps in {wire}, outer lr {lr:g}, momentum {momentum:g}"
    if sync.fragments > 1 or sync.delay:
        text += f", {sync.fragments} fragments, delay {sync.delay}, mix {mix_of(sync):g}"
    return text

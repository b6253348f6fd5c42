"""Hooks of users that reduce the gradients of a model over the replicate axis."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from parallel2d.errors import ConfigError
from parallel2d.sync.engine import engine_of
from parallel2d.sync.gradient_sync import GradientSync
from parallel2d.sync.reduction import Hook


def register_sync_hook(model: nn.Module, hook: Hook, state: Any = None) -> None:
    """Lets ``hook`` reduce the gradients of ``model`` over the replicate axis, in its own way.

    Args:
        hook: ``hook(state, bucket)`` gets the gradients of this replica, averaged over its shard
            group, as ``bucket.buffer()``, a flat tensor in the dtype of gradients; `Bucket` has the
            methods of torch's ``GradBucket``. It returns a future of their mean over the replicas,
            or the mean itself, or None if it has changed the buffer in place. It runs on every
            replica for the same buckets in the same order, one after the other.
        state: passed to the hook; default: the process group of the replicate axis.

    The hooks of `torch.distributed.algorithms.ddp_comm_hooks` work, among them
    ``default_hooks.bf16_compress_hook`` and ``powerSGD_hook``, whose state takes the group that
    ``replicate_group(model)`` returns. Raises `ConfigError` where no replicate axis is reduced by
    this package: one replica, or ``sync.engine=torch``.
    """
    _engine_with_replicas(model).register_hook(state, hook)


def replicate_group(model: nn.Module) -> dist.ProcessGroup:
    """The process group on which the gradients of ``model`` are reduced over the replicas. Raises
    `ConfigError` as `register_sync_hook` does."""
    group = _engine_with_replicas(model).replicate_group
    assert group is not None
    return group


def _engine_with_replicas(model: nn.Module) -> GradientSync:
    engine = engine_of(model)
    if not isinstance(engine, GradientSync) or engine.replicate_group is None:
        raise ConfigError(
            "no gradients cross a replicate axis here: the mesh has one replica, or "
            "sync.engine=torch reduces over it"
        )
    return engine

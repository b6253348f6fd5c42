"""Trades memory for compute: what a block keeps for backward and what it computes again.

A block's ``forward`` is replaced on the instance, so that names do not change and the sharding hooks, which live on the module
call, stay outside of what is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel2d.config import ActivationCheckpointingConfig, ConfigError

# Results worth keeping: expensive to compute, small against what they save.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: ActivationCheckpointingConfig
) -> nn.Module:
    """Checkpoints every ``config.every``-th of ``blocks``. Raises `ConfigError` when there are no blocks."""
    if config.name == "none":
        return model
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing={config.name}: {type(model).__name__} has no repeated blocks; name their classes in "
            "bucketing.blocks"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if config.name == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)
    for index, (_, block) in enumerate(blocks):
        if index % config.every == 0:
            block.forward = functools.partial(checkpoint, block.forward, **options)
    return model

"""``torch.compile`` of each repeated block on its own: short compilations, one for all equal blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from parallel2d.config import CompileConfig, ConfigError


def compile_blocks(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: CompileConfig) -> nn.Module:
    """Compiles the ``forward`` of ``blocks``; the sharding hooks stay outside. Raises `ConfigError` without blocks or for an
    unknown backend."""
    if config.name == "none":
        return model
    if not blocks:
        raise ConfigError(
            f"compile={config.name}: {type(model).__name__} has no repeated blocks; name their classes in bucketing.blocks"
        )
    check_backend(config)
    for _, block in blocks:
        block.forward = torch.compile(block.forward, backend=config.backend)
    return model


def check_backend(config: CompileConfig) -> None:
    """Raises `ConfigError` for a backend that torch.compile does not know."""
    if config.name != "none" and config.backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = sorted({"eager", "aot_eager", *torch.compiler.list_backends()})
        raise ConfigError(f"compile.backend={config.backend} is not one of {', '.join(usual)}")

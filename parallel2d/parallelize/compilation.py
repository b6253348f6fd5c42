"""``torch.compile`` of each repeated block on its own: short compilations, one for all equal blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from parallel2d.config import CompileConfig, ConfigError


def compile_blocks(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: CompileConfig, tensor: int) -> nn.Module:
    """Compiles the ``forward`` of ``blocks``; the sharding hooks stay outside. ``tensor``: size of the tensor axis.

    Raises `ConfigError` without blocks and for what `check_compilation` refuses."""
    if config.name == "none":
        return model
    if not blocks:
        raise ConfigError(
            f"compile={config.name}: {type(model).__name__} has no repeated blocks; name their classes in bucketing.blocks"
        )
    check_compilation(config, tensor)
    for _, block in blocks:
        block.forward = torch.compile(block.forward, backend=config.backend)
    return model


def check_compilation(config: CompileConfig, tensor: int) -> None:
    """Raises `ConfigError` for a backend that torch.compile does not know, and together with tensor parallelism: with torch 2.13
    a compiled tensor-parallel block returned a zero gradient for its input, without any error."""
    if config.name == "none":
        return
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = sorted({"eager", "aot_eager", *torch.compiler.list_backends()})
        raise ConfigError(f"compile.backend={config.backend} is not one of {', '.join(usual)}")
    if tensor > 1 and config.backend != "eager":
        raise ConfigError(
            f"compile={config.name} with mesh.tensor={tensor}: compiled tensor-parallel blocks return wrong gradients in this "
            "torch; choose compile=none or mesh.tensor=1"
        )

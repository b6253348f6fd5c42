"""Compiles each repeated block on its own: compilations are short that way, and all equal blocks
share one."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from parallel2d.base.config import CompileConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.files.private_folders import make_private
from parallel2d.parallel.mesh_sizes import MeshShape


def compile_blocks(
    blocks: Sequence[tuple[str, nn.Module]], config: CompileConfig, memory_budget: float | None
) -> None:
    """Compiles the ``forward`` of ``blocks``. ``memory_budget``: share of a block's activations
    that may be kept for backward; None: all but what costs no time to recompute."""
    if config.name == "none":
        return
    _use_private_cache()
    backend: Any = config.backend
    if memory_budget is not None:
        backend = _within_budget(config.backend, memory_budget)
    for _, block in blocks:
        # On the instance: hooks run in the module's call, around what is compiled.
        block.forward = torch.compile(block.forward, backend=backend)


_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def _use_private_cache() -> None:
    """Has torch keep compiled code in a folder of this user.

    torch unpickles files of its cache. Its own default is a folder of the temporary folder with a
    name that can be guessed, which another user may have made before. Triton's cache is inside.
    Raises `ConfigError` for a folder of another user.
    """
    path = os.environ.get(_CACHE, "")
    try:
        if not path:
            path = os.path.join(tempfile.gettempdir(), f"parallel2d-compiled-{os.getuid()}")
            make_private(path)
            os.environ[_CACHE] = path
        elif os.path.exists(path) and os.stat(path).st_uid != os.getuid():
            raise PermissionError("another user owns it")
    except OSError as error:
        raise ConfigError(
            f"compiled code is not kept in {path}: {error}; set {_CACHE} to a folder of your own"
        ) from None


# One function per budget: compiled code is shared between blocks and models with the same backend,
# and only then.
@functools.cache
def _within_budget(backend: str, budget: float) -> Callable[..., Any]:
    """A backend that splits forward from backward within ``budget``, by torch's own solver (a
    knapsack over the graph)."""
    compiler = torch._dynamo.lookup_backend(backend)

    def compile_within_budget(graph: Any, inputs: Any, **options: Any) -> Any:
        # torch has this setting for the whole process only, and reads it while it compiles.
        with functorch_config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs, **options)

    return compile_within_budget


def check_compilation(config: CompileConfig, shape: MeshShape) -> None:
    """Raises `ConfigError` for a backend that torch.compile does not have, and for compilation
    together with context or tensor parallelism: with torch 2.13 a compiled tensor-parallel block
    returned a zero gradient for its input."""
    if config.name == "none":
        return
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        # The message lists the back ends for users, not the many that are for debugging torch.
        usual = sorted({"eager", "aot_eager", *torch.compiler.list_backends()})
        raise ConfigError(f"compile.backend={config.backend} is not one of {', '.join(usual)}")
    if shape.context > 1:
        raise ConfigError(
            f"compile={config.name} with mesh.context={shape.context}: a compiled block cannot "
            "exchange what its attention needs; choose compile=none or mesh.context=1"
        )
    if shape.tensor > 1 and config.backend != "eager":
        raise ConfigError(
            f"compile={config.name} with mesh.tensor={shape.tensor}: compiled tensor-parallel "
            "blocks return wrong gradients in this torch; choose compile=none or mesh.tensor=1"
        )

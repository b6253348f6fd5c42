"""Compile each repeated block separately: `compile_blocks`.

Compilation is short, and all equal blocks share one compiled function.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from parallel2d.base.config import CompileConfig
from parallel2d.base.config.parallel import AUTOMATIC
from parallel2d.base.device import can_compile
from parallel2d.base.errors import ConfigError
from parallel2d.base.files.private_folders import make_private
from parallel2d.parallel.mesh_sizes import MeshShape

log = logging.getLogger(__name__)


def compile_blocks(
    blocks: Sequence[tuple[str, nn.Module]], config: CompileConfig, memory_budget: float | None
) -> None:
    """Compile the ``forward`` of ``blocks``. ``memory_budget``: share of a block's activations that
    may be saved for backward. None: the compiler recomputes only activations that cost no time."""
    if config.name == "none":
        return
    _use_private_cache()
    backend: Any = config.backend
    if memory_budget is not None:
        backend = _within_budget(config.backend, memory_budget)
    for name, block in blocks:
        # On the instance: hooks run in the module's call, outside of the compiled code.
        compiled = torch.compile(block.forward, backend=backend, dynamic=False)
        block.forward = _CompiledForward(name, compiled)


class _CompiledForward:
    """The compiled ``forward`` of the block ``name``. Logs graph breaks of the first call, each
    cause once per process. ``compiled``: the result of `torch.compile`."""

    def __init__(self, name: str, compiled: Callable[..., Any]) -> None:
        functools.update_wrapper(self, compiled)
        self._name, self._compiled = name, compiled
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The output of a tensor-parallel layer wraps the tensor that its collective fills.
        # torch.compile replaces this wrapper by the inner tensor, which has a separate autograd
        # history: gradients would omit the layer's conversion from DTensor.
        args, kwargs = tree_map_only(AsyncCollectiveTensor, _Waited.apply, (args, kwargs))
        if self._has_run:
            return self._compiled(*args, **kwargs)
        self._has_run = True
        # torch.compile has imported this module, which takes 0.6 s.
        breaks = torch._dynamo.utils.counters["graph_break"]
        before = set(breaks)
        output = self._compiled(*args, **kwargs)
        for cause in breaks.keys() - before:
            log.warning(
                "%s is compiled in several graphs, which is slower: %s (TORCH_LOGS=graph_breaks "
                "shows the lines of code)",
                self._name,
                cause.strip().partition("\n")[0],
            )
        return output


class _Waited(torch.autograd.Function):
    """The plain tensor of an `AsyncCollectiveTensor`, with the autograd history of the wrapper."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def _use_private_cache() -> None:
    """Make torch keep compiled code in a folder of this user.

    torch unpickles files of its cache. torch's default folder is in the temporary folder and has a
    guessable name, so another user may have created it before. Triton's cache is inside it.
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


# One function per budget: blocks and models share compiled code only if they share the backend
# object.
@functools.cache
def _within_budget(backend: str, budget: float) -> Callable[..., Any]:
    """Return a backend that splits forward from backward within ``budget``.

    torch's own solver makes the split (a knapsack over the graph).
    """
    compiler = torch._dynamo.lookup_backend(backend)

    def compile_within_budget(graph: Any, inputs: Any, **options: Any) -> Any:
        # The setting is process-wide in torch and is read during compilation.
        with functorch_config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs, **options)

    return compile_within_budget


def choose_compilation(
    config: CompileConfig, shape: MeshShape, device_type: str, *, has_blocks: bool
) -> CompileConfig:
    """Return ``config`` with ``block`` or ``none`` in the place of ``auto``."""
    if config.name != AUTOMATIC:
        return config
    compiles = has_blocks and shape.context == 1 and can_compile(device_type)
    return replace(config, name="block" if compiles else "none")


def check_compilation(config: CompileConfig, shape: MeshShape) -> None:
    """Raise `ConfigError` for compilation settings that torch or this mesh does not support.

    Refused are an unknown backend, and compilation together with context parallelism.
    """
    if config.name == "none":
        return
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        # The message lists the backends for users, without the backends for debugging torch.
        usual = sorted({"eager", "aot_eager", *torch.compiler.list_backends()})
        raise ConfigError(f"compile.backend={config.backend} is not one of {', '.join(usual)}")
    if shape.context > 1:
        raise ConfigError(
            f"compile={config.name} with mesh.context={shape.context}: a compiled block cannot "
            "exchange the keys and values of its attention; choose compile=none or mesh.context=1"
        )

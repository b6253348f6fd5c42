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
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
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
from parallel2d.parallel.model_structure import find_blocks

log = logging.getLogger(__name__)


def compile_blocks(
    blocks: Sequence[tuple[str, nn.Module]],
    config: CompileConfig,
    memory_budget: float | None,
    *,
    intercepts: bool = False,
) -> None:
    """Compile the ``forward`` of ``blocks``.

    Args:
        blocks: names and modules.
        config: the compilation settings.
        memory_budget: share of a block's activations that may be saved for backward. None: the
            compiler recomputes only activations that cost no time.
        intercepts: True if the blocks redirect their calls of attention, for a context axis. Each
            block is then compiled as one graph, or not at all.
    """
    if config.name == "none":
        return
    _use_private_cache()
    backend: Any = config.backend
    if memory_budget is not None:
        backend = _within_budget(config.backend, memory_budget)
    if intercepts:
        backend = _of_intercepted(backend)
    kind = _OneGraphForward if intercepts else _CompiledForward
    for name, block in blocks:
        # On the instance: hooks run in the module's call, outside of the compiled code.
        block.forward = kind(name, block.forward, backend)


class _CompiledForward:
    """The compiled ``forward`` of the block ``name``. Logs graph breaks of the first call, each
    cause once per process."""

    _fullgraph = False

    def __init__(self, name: str, forward: Callable[..., Any], backend: Any) -> None:
        compiled = torch.compile(forward, backend=backend, dynamic=False, fullgraph=self._fullgraph)
        functools.update_wrapper(self, compiled)
        self._name, self._forward, self._compiled = name, forward, compiled
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


class _OneGraphForward(_CompiledForward):
    """A compiled ``forward`` with intercepted attention.

    Interception cannot continue after a graph break, so a block that is not one graph runs
    uncompiled, which is logged. Ranks with the same code and shapes decide alike.
    """

    _fullgraph = True
    _logged: ClassVar[set[str]] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is self._forward:
            return self._forward(*args, **kwargs)
        errors = torch._dynamo.exc
        try:
            # Otherwise the compiler refuses to enter a function mode in a checkpoint.
            with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
                return super().__call__(*args, **kwargs)
        except errors.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _NotInterceptedError):
                raise
            cause = str(error.inner_exception)
        except (errors.Unsupported, errors.FailOnRecompileLimitHit) as error:
            cause = str(error).strip().partition("\n")[0]
        except RuntimeError as error:
            # After its limit torch skips the code of a block, in other models too.
            if "found no compiled frames" not in str(error):
                raise
            cause = "torch has compiled its code too often in this process"
        if cause not in self._logged:
            self._logged.add(cause)
            log.warning("%s is not compiled, which is slower: %s", self._name, cause)
        self._compiled = self._forward
        return self._forward(*args, **kwargs)


class _NotInterceptedError(RuntimeError):
    """Compiled code would call torch's attention on slices of sequences."""


@functools.cache
def _of_intercepted(backend: Any) -> Callable[..., Any]:
    """Return a backend that compiles graphs only if each call of attention in them is redirected.

    torch calls no function mode inside of some operators, such as a checkpoint.
    """
    compiler = torch._dynamo.lookup_backend(backend)

    def compile_intercepted(graph: Any, inputs: Any, **options: Any) -> Any:
        for module in graph.modules():
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                is_attention = node.target is F.scaled_dot_product_attention
                if is_attention and "in attention_in_graph" not in (node.stack_trace or ""):
                    raise _NotInterceptedError("a checkpoint inside of it calls attention")
        return compiler(graph, inputs, **options)

    return compile_intercepted


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
    config: CompileConfig,
    shape: MeshShape,
    device_type: str,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
) -> CompileConfig:
    """Return ``config`` with ``block`` or ``none`` in the place of ``auto``.

    Raises `ConfigError` if ``blocks`` of ``model`` cannot be compiled.
    """
    if config.name == "none":
        return config
    problem = ""
    if not blocks:
        problem = (
            f"{type(model).__name__} has no repeated blocks; name their classes in bucketing.blocks"
        )
    elif shape.context > 1 and not set(blocks) <= set(find_blocks(model)):
        problem = (
            f"mesh.context={shape.context} compiles the repeated blocks of {type(model).__name__}, "
            "and bucketing.blocks names others; leave bucketing.blocks out, or use compile=none"
        )
    if config.name == AUTOMATIC:
        compiles = not problem and can_compile(device_type)
        return replace(config, name="block" if compiles else "none")
    if problem:
        raise ConfigError(f"compile={config.name}: {problem}")
    return config


def check_compilation(config: CompileConfig) -> None:
    """Raise `ConfigError` for a backend that `torch.compile` does not have."""
    if config.name == "none":
        return
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        # The message lists the backends for users, without the backends for debugging torch.
        usual = sorted({"eager", "aot_eager", *torch.compiler.list_backends()})
        raise ConfigError(f"compile.backend={config.backend} is not one of {', '.join(usual)}")

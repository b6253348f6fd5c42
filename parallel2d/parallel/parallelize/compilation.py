"""Compile each repeated block separately: `compile_blocks`.

Compilation time does not grow with the number of blocks, because blocks of the same class and
shapes share compiled code.
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
        memory_budget: fraction of a block's activations that may be saved for backward. None: the
            compiler recomputes only activations whose recomputation costs no time.
        intercepts: True if the mesh has a context axis, so that the blocks redirect their calls of
            attention. Each block is then compiled as one graph, or not compiled.
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
        # Replace `forward` of the instance and not the module's call: the call runs FSDP hooks,
        # which must stay outside of the compiled code.
        block.forward = kind(name, block.forward, backend)


class _CompiledForward:
    """The compiled ``forward`` of the block ``name``.

    The first call logs the graph breaks that no other block of the process has logged.
    """

    _fullgraph = False

    def __init__(self, name: str, forward: Callable[..., Any], backend: Any) -> None:
        compiled = torch.compile(forward, backend=backend, dynamic=False, fullgraph=self._fullgraph)
        functools.update_wrapper(self, compiled)
        self._name, self._forward, self._compiled = name, forward, compiled
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The output of a tensor-parallel layer may be an `AsyncCollectiveTensor`, a wrapper around
        # the output of its collective. torch.compile would replace the wrapper by the inner tensor.
        # The inner tensor lacks the last autograd node of the layer, so gradients would be wrong.
        args, kwargs = tree_map_only(AsyncCollectiveTensor, _Waited.apply, (args, kwargs))
        if self._has_run:
            return self._compiled(*args, **kwargs)
        self._has_run = True
        # torch._dynamo is imported by now. An import at the top of this file would cost 0.6 s.
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

    Attention cannot be intercepted after a graph break. Therefore a block that is not one graph
    runs without compilation, and a warning is logged. Ranks with the same code and shapes come to
    the same result.
    """

    _fullgraph = True
    _logged: ClassVar[set[str]] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is self._forward:
            return self._forward(*args, **kwargs)
        errors = torch._dynamo.exc
        try:
            # Without this setting the compiler rejects a function mode inside of a checkpoint.
            with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
                return super().__call__(*args, **kwargs)
        except errors.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _NotInterceptedError):
                raise
            cause = str(error.inner_exception)
        except (errors.Unsupported, errors.FailOnRecompileLimitHit) as error:
            cause = str(error).strip().partition("\n")[0]
        except RuntimeError as error:
            # After too many recompilations torch no longer compiles the code of this block, in any
            # model of the process.
            if "found no compiled frames" not in str(error):
                raise
            cause = "torch has compiled its code too often in this process"
        if cause not in self._logged:
            self._logged.add(cause)
            log.warning("%s is not compiled, which is slower: %s", self._name, cause)
        self._compiled = self._forward
        return self._forward(*args, **kwargs)


class _NotInterceptedError(RuntimeError):
    """A graph calls torch's attention without redirection, on slices of sequences."""


@functools.cache
def _of_intercepted(backend: Any) -> Callable[..., Any]:
    """Return a backend that raises `_NotInterceptedError` if a call of attention is not redirected.

    The redirection is a function mode, and torch skips function modes inside of some operators,
    such as a checkpoint.
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
    """Wait for an `AsyncCollectiveTensor` and return its tensor, as a differentiable operation."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def _use_private_cache() -> None:
    """Make torch cache compiled code in a folder that belongs to this user.

    torch unpickles the files of its cache. Its default folder is in the temporary folder and has a
    predictable name, so another user could create it with malicious files. The folder also contains
    Triton's cache. Raises `ConfigError` if the folder belongs to another user.
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


# Cached, because blocks and models share compiled code only if they have the same backend object.
@functools.cache
def _within_budget(backend: str, budget: float) -> Callable[..., Any]:
    """Return ``backend`` with the activation memory budget ``budget``.

    torch's partitioner chooses the activations to save, by a knapsack over the graph.
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
    """Return ``config`` with ``auto`` replaced by ``block`` or ``none``.

    Raises `ConfigError` if ``config`` asks for compilation and the ``blocks`` of ``model`` do not
    allow it.
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

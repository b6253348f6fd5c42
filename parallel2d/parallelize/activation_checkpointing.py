"""Trades memory for compute: what a block keeps for backward and what it computes again.

A block's ``forward`` is replaced on the instance, so that names do not change and the sharding
hooks, which live on the module call, stay outside of what is recomputed.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from parallel2d.config import ActivationCheckpointingConfig
from parallel2d.errors import ConfigError
from parallel2d.model_structure import find_blocks

_NAMESPACES = ("aten", "_c10d_functional")  # whose operators are named without it
# dispatch key of operators that run as others, which alone are seen
_COMPOSITE = "CompositeImplicitAutograd"


def checkpoint_activations(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: ActivationCheckpointingConfig
) -> nn.Module:
    """Checkpoints every ``config.every``-th of ``blocks``, or of what ``config.blocks`` or
    ``config.policy`` names instead.

    ``budget`` is left to compilation. Raises `ConfigError` when there are no blocks, and for what
    `kept_operators` refuses.
    """
    if config.name in ("none", "budget"):
        return model
    if config.blocks or config.policy is not None:
        blocks = find_blocks(
            model, config.blocks, config.policy, section="activation_checkpointing"
        )
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing={config.name}: {type(model).__name__} has no repeated "
            "blocks; name the classes to "
            "checkpoint in activation_checkpointing.blocks"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if config.name == "selective":
        policy = functools.partial(_keep, kept_operators(config.keep))
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for index, (_, block) in enumerate(blocks):
        if index % config.every == 0:
            block.forward = functools.partial(checkpoint, block.forward, **options)
    return model


def select_without_hooks(model: nn.Module, config: ActivationCheckpointingConfig) -> nn.Module:
    """Lets the sharding hooks inside of what ``selective`` recomputes run unseen by the selection,
    which compares operators of forward and recomputation one by one: the hooks gather in one and
    may find parameters there in the other. Comes after sharding."""
    if config.name == "selective":
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in hooks.items():
                    if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                        hooks[key] = functools.partial(_unseen, hook)
    return model


def _unseen(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes() if _selecting() else contextlib.nullcontext():
        return hook(*args, **kwargs)


def _selecting() -> bool:
    return any(
        isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)
        for mode in _get_current_dispatch_mode_stack()
    )


def _keep(
    kept: Collection[str], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operator.name().partition(".")[0] in kept
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def kept_operators(patterns: Sequence[str]) -> frozenset[str]:
    """Full names (``aten::mm``) of the operators that ``patterns`` name.

    A pattern such as ``mm`` or ``scaled_dot_product_*`` means torch's own operators and its
    functional collectives, whatever underscores their names begin with; others are named in full
    (``namespace::name``). Raises `ConfigError` for a pattern without a match, with near ones, and
    for one that matches only operators that are computed as others.
    """
    operators = _operators()
    found: set[str] = set()
    for pattern in patterns:
        names = fnmatch.filter(operators, pattern)
        if not names:
            near = difflib.get_close_matches(pattern.replace("*", ""), operators, n=3, cutoff=0.6)
            hint = (
                f"; did you mean {' or '.join(near)}?"
                if near
                else "; names are those of torch.ops.aten, such as mm"
            )
            raise ConfigError(
                f"activation_checkpointing.keep: no operator is called {pattern}{hint}"
            )
        matches = {full for name in names for full in operators[name]}
        visible = {
            full
            for full in matches
            if not torch._C._dispatch_has_kernel_for_dispatch_key(full, _COMPOSITE)
        }
        if not visible:
            raise ConfigError(
                f"activation_checkpointing.keep: {pattern} is computed as other operators, and "
                "only their results can be kept: "
                "name those (matrix products are mm, bmm and addmm, attention is "
                "scaled_dot_product_*)"
            )
        found |= visible
    return frozenset(found)


@functools.cache
def _operators() -> dict[str, list[str]]:
    """Full names of all registered operators by what a pattern is compared with."""
    found: dict[str, list[str]] = defaultdict(list)
    for full in sorted({name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}):
        namespace, _, name = full.partition("::")
        found[full].append(full)
        if namespace in _NAMESPACES:
            found[name.lstrip("_")].append(full)
    return dict(found)

"""Activation checkpointing: `checkpoint_activations`.

A block's ``forward`` is replaced on the instance. Names of parameters do not change, and the
sharding hooks, which run in ``Module.__call__``, stay outside of the recomputed code.
"""

from __future__ import annotations

import fnmatch
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import chain, filterfalse
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

from parallel2d.base.config import ActivationCheckpointingConfig
from parallel2d.base.errors import ConfigError, nearest_matches
from parallel2d.parallel.model_structure import find_blocks

# Operators of these namespaces are named without the namespace.
_NAMESPACES = ("aten", "_c10d_functional")
# An operator with this dispatch key is decomposed into other operators before a policy sees it.
_COMPOSITE = "CompositeImplicitAutograd"


def checkpoint_activations(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: ActivationCheckpointingConfig
) -> nn.Module:
    """Checkpoint every ``config.every``-th block.

    ``config.blocks`` or ``config.policy``, if set, select other modules than ``blocks``.
    ``config.name="budget"`` is applied by compilation. Raises `ConfigError` when the model has no
    blocks, and for patterns that `saved_operators` refuses.
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
            "blocks; name the classes to checkpoint in activation_checkpointing.blocks"
        )
    # Reentrant checkpointing has no context_fn, which selects operators.
    options: dict[str, Any] = {"use_reentrant": False}
    if config.name == "selective":
        policy = functools.partial(_keep, saved_operators(config.keep))
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for _, block in blocks[:: config.every]:
        block.forward = functools.partial(checkpoint, block.forward, **options)
    return model


def _keep(
    kept: Collection[str], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Policy of ``selective``; torch calls it for each operator that a block runs."""
    # An operator's name ends with the name of its overload: aten::add.Tensor.
    if operator.name().partition(".")[0] in kept:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def select_without_hooks(model: nn.Module, config: ActivationCheckpointingConfig) -> nn.Module:
    """Hide operators that run inside sharding hooks from selective checkpointing.

    torch matches the operators of recomputation with the operators of forward one by one. An FSDP
    hook inside of a checkpointed block may run an all-gather in forward and find the parameters
    unsharded in recomputation, or the other way round. The match therefore excludes the operators
    of these hooks.
    """
    if config.name != "selective":
        return model
    for module in model.modules():
        hooks_of_kind: list[dict[int, Callable[..., Any]]]
        hooks_of_kind = [module._forward_pre_hooks, module._forward_hooks]
        for hooks in hooks_of_kind:
            for key, hook in hooks.items():
                # Other hooks, also user hooks, belong to the recomputed code.
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    hooks[key] = functools.partial(_call_hidden, hook)
    return model


def _call_hidden(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Most calls are outside of checkpointed blocks and return here.
    selecting = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    if not any(isinstance(mode, selecting) for mode in _get_current_dispatch_mode_stack()):
        return hook(*args, **kwargs)
    with _disable_current_modes():
        return hook(*args, **kwargs)


def saved_operators(patterns: Sequence[str]) -> frozenset[str]:
    """Return the full names (``aten::mm``) of the operators that match ``patterns``.

    A pattern such as ``mm`` or ``scaled_dot_product_*`` matches torch's own operators and its
    functional collectives, with or without leading underscores in their names. Other operators are
    named in full (``namespace::name``). Raises `ConfigError` for a pattern without a match, with
    near names, and for a pattern that matches only composite operators.
    """
    found: set[str] = set()
    operators = _operators()
    for pattern in patterns:
        names = fnmatch.filter(operators, pattern)
        if not names:
            # Up to three, because several names may be one or two letters away from the pattern.
            near = nearest_matches(pattern.replace("*", ""), operators)
            advice = "use the names of torch.ops.aten, such as mm"
            if near:
                advice = f"did you mean {' or '.join(near)}?"
            raise ConfigError(
                f"activation_checkpointing.keep: no operator is called {pattern}; {advice}"
            )
        matches = chain.from_iterable(operators[name] for name in names)
        visible = set(filterfalse(_is_composite, matches))
        # One visible operator is enough: scaled_dot_product_* matches visible and composite ones.
        if not visible:
            raise ConfigError(
                f"activation_checkpointing.keep: {pattern} is decomposed into other operators, "
                "and only their results can be kept: name these operators (matrix products are mm, "
                "bmm and addmm, attention is scaled_dot_product_*)"
            )
        found |= visible
    return frozenset(found)


def _is_composite(full: str) -> bool:
    """Return True if the operator ``full`` is always decomposed into other operators."""
    # torch generates overloads with an `out` argument differently, and blocks do not call them.
    overloads = [name for name in _overloads()[full] if not name.endswith("out")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(overloads) and all(has_kernel(name, _COMPOSITE) for name in overloads)


@functools.cache
def _overloads() -> dict[str, list[str]]:
    """Map the full name of each registered operator to its overloads: aten::add.Tensor."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in torch._C._dispatch_get_all_op_names():
        found[name.partition(".")[0]].append(name)
    return dict(found)


@functools.cache
def _operators() -> dict[str, list[str]]:
    """Map the names that a pattern can match to the full names of operators."""
    # Overloads, such as aten::add.Tensor and aten::add.Scalar, are kept or recomputed together.
    found: dict[str, list[str]] = defaultdict(list)
    for full in sorted(_overloads()):
        namespace, _, name = full.partition("::")
        found[full].append(full)
        if namespace in _NAMESPACES:
            found[name.lstrip("_")].append(full)
    return dict(found)

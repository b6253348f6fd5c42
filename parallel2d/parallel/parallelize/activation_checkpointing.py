"""Activation checkpointing: `checkpoint_activations`. A block's ``forward`` is replaced on the
instance, so that names do not change and the sharding hooks, which live on the module call, stay
outside of what is recomputed.
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

# Operators of these namespaces are named without it.
_NAMESPACES = ("aten", "_c10d_functional")
# Operators with this dispatch key run as others, and a policy is asked about those others alone.
_COMPOSITE = "CompositeImplicitAutograd"


def checkpoint_activations(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: ActivationCheckpointingConfig
) -> nn.Module:
    """Checkpoints every ``config.every``-th of ``blocks``, or of what ``config.blocks`` or
    ``config.policy`` names instead. ``budget`` is left to compilation. Raises `ConfigError` when
    there are no blocks, and for what `saved_operators` refuses."""
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
    # Reentrant checkpointing has no context_fn, which chooses operators.
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
    """The policy of ``selective``, which torch calls for each operator that a block runs."""
    # The name of an operator ends with that of its overload: aten::add.Tensor.
    if operator.name().partition(".")[0] in kept:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def select_without_hooks(model: nn.Module, config: ActivationCheckpointingConfig) -> nn.Module:
    """Hides the operators that sharding hooks run from the selection of ``selective``, which
    compares those of forward and of recomputation one by one: hooks inside of what is recomputed
    gather parameters in one of them and may find them gathered in the other."""
    if config.name != "selective":
        return model
    for module in model.modules():
        hooks_of_kind: list[dict[int, Callable[..., Any]]]
        hooks_of_kind = [module._forward_pre_hooks, module._forward_hooks]
        for hooks in hooks_of_kind:
            for key, hook in hooks.items():
                # Other hooks, those of users too, belong to what is recomputed.
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    hooks[key] = functools.partial(_call_hidden, hook)
    return model


def _call_hidden(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Most calls are not inside of a checkpointed block, and go on at once.
    selecting = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    if not any(isinstance(mode, selecting) for mode in _get_current_dispatch_mode_stack()):
        return hook(*args, **kwargs)
    with _disable_current_modes():
        return hook(*args, **kwargs)


def saved_operators(patterns: Sequence[str]) -> frozenset[str]:
    """Full names (``aten::mm``) of the operators that ``patterns`` name.

    A pattern such as ``mm`` or ``scaled_dot_product_*`` means torch's own operators and its
    functional collectives, whatever underscores their names begin with; others are named in full
    (``namespace::name``). Raises `ConfigError` for a pattern without a match, with near ones, and
    for one that matches only operators that are computed as others.
    """
    found: set[str] = set()
    operators = _operators()
    for pattern in patterns:
        names = fnmatch.filter(operators, pattern)
        if not names:
            # Up to three, because several may differ from what was meant in a letter or two.
            near = nearest_matches(pattern.replace("*", ""), operators)
            advice = "names are those of torch.ops.aten, such as mm"
            if near:
                advice = f"did you mean {' or '.join(near)}?"
            raise ConfigError(
                f"activation_checkpointing.keep: no operator is called {pattern}; {advice}"
            )
        matches = chain.from_iterable(operators[name] for name in names)
        visible = set(filterfalse(_is_composite, matches))
        # One that is seen is enough: a pattern such as scaled_dot_product_* matches both kinds.
        if not visible:
            raise ConfigError(
                f"activation_checkpointing.keep: {pattern} is computed as other operators, and "
                "only their results can be kept: name those (matrix products are mm, bmm and "
                "addmm, attention is scaled_dot_product_*)"
            )
        found |= visible
    return frozenset(found)


def _is_composite(full: str) -> bool:
    """Whether the operator ``full`` is computed as other operators."""
    # Torch generates overloads with an `out` argument, which blocks do not call, in another way.
    overloads = [name for name in _overloads()[full] if not name.endswith("out")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(overloads) and all(has_kernel(name, _COMPOSITE) for name in overloads)


@functools.cache
def _overloads() -> dict[str, list[str]]:
    """Full name of each registered operator -> names of its overloads: aten::add.Tensor."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in torch._C._dispatch_get_all_op_names():
        found[name.partition(".")[0]].append(name)
    return dict(found)


@functools.cache
def _operators() -> dict[str, list[str]]:
    """Full names of all registered operators by what a pattern is compared with."""
    # Overloads, such as aten::add.Tensor and aten::add.Scalar, are kept or recomputed together.
    found: dict[str, list[str]] = defaultdict(list)
    for full in sorted(_overloads()):
        namespace, _, name = full.partition("::")
        found[full].append(full)
        if namespace in _NAMESPACES:
            found[name.lstrip("_")].append(full)
    return dict(found)

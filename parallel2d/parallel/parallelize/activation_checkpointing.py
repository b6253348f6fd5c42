"""Activation checkpointing: `checkpoint_activations`.

The ``forward`` of each block instance is replaced. The names of parameters do not change, and the
FSDP hooks, which run in ``Module.__call__``, stay outside of the recomputed code.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    _RECOMPUTE,
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _VersionWrapper,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from parallel2d.base.config import ActivationCheckpointingConfig
from parallel2d.base.errors import ConfigError, nearest_matches
from parallel2d.parallel.fsdp_internals.tensors import storage_of, version_of
from parallel2d.parallel.model_structure import find_blocks, tensor_leaves, trained_tensors_in
from parallel2d.parallel.parallelize.activation_offload import SavedTensor, offload_blocks

# Operators of these namespaces are named without the namespace.
_NAMESPACES = ("aten", "_c10d_functional")
# An operator with this dispatch key is decomposed into other operators before a policy sees it.
_COMPOSITE = "CompositeImplicitAutograd"


def checkpoint_activations(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: ActivationCheckpointingConfig
) -> nn.Module:
    """Checkpoint every ``config.every``-th block.

    ``config.blocks`` or ``config.policy``, if set, replaces ``blocks``. For the names ``none``,
    ``budget`` (applied in `compile_blocks`) and ``offload`` (applied in `offload_activations`)
    the model does not change. Raises `ConfigError` when the model has no blocks, and for patterns
    that `saved_operators` refuses.
    """
    if config.name in ("none", "budget", "offload"):
        return model
    chosen = chosen_blocks(model, blocks, config)
    _without_cache(model)
    # Reentrant checkpointing has no context_fn, and selective checkpointing needs one.
    options: dict[str, Any] = {"use_reentrant": False}
    if config.name == "selective":
        policy = functools.partial(_keep, saved_operators(config.keep))
        options["context_fn"] = functools.partial(_contexts, policy)
    if config.name == "selective" and config.offloads:
        # Without this option, results saved by selective checkpointing would bypass the offload.
        options["respect_saved_tensors_hooks"] = True
    for name, block in chosen:
        block.forward = _checkpointed(name, block, options)
    return model


def _checkpointed(name: str, block: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the checkpointed forward of ``block``.

    The returned functions are closures, not bound methods or partials: torch.compile would compile
    a partial again for each block, but blocks of one class can share the code of a closure.
    """
    given = vars(block).get("forward")

    def run(*args: Any, **kwargs: Any) -> Any:
        forward = given or functools.partial(type(block).forward, block)
        return _run(name, forward, *args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(run, *args, **options, **kwargs)

    return forward


def chosen_blocks(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: ActivationCheckpointingConfig
) -> list[tuple[str, nn.Module]]:
    """Return the blocks that ``config`` selects. Raises `ConfigError` when there are none."""
    if config.blocks or config.policy is not None:
        blocks = find_blocks(
            model, config.blocks, config.policy, section="activation_checkpointing"
        )
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing={config.name}: {type(model).__name__} has no repeated "
            "blocks; name the classes to checkpoint in activation_checkpointing.blocks"
        )
    return list(blocks[:: config.every])


def offload_activations(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: ActivationCheckpointingConfig
) -> None:
    """Move the saved tensors of the selected blocks to host memory, if ``config.offloads``.

    Call this after `checkpoint_activations` and `compile_blocks`, because they change which tensors
    are saved.
    """
    if config.offloads:
        offload_blocks(chosen_blocks(model, blocks, config))


def _run(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the block ``name``, and raise if it changes its arguments.

    Called in the forward pass and in the recomputation.
    """
    # torch.compile replaces in-place operators, so compiled blocks need no check.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    modes = []
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _KeepingMode):
            mode.block = name
            modes.append(mode)
    given, objects = [], []
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, Tensor):
            given.append(each)
        elif hasattr(each, "__dict__"):
            objects.append(each)
    before = list(map(version_of, given)), list(map(_tensors_of, objects))
    output = forward(*args, **kwargs)
    # torch reports an in-place change only in the backward pass, and not for keyword arguments.
    if before[0] != list(map(version_of, given)):
        raise RuntimeError(
            f"{name} changes an argument in place, and activation_checkpointing recomputes it from "
            "its arguments; change a copy (x = x + y instead of x += y)"
        )
    for each, earlier in zip(objects, before[1], strict=True):
        if list(map(id, earlier)) != list(map(id, _tensors_of(each))):
            raise RuntimeError(
                f"{name} stores tensors in its {type(each).__name__} argument, and "
                "activation_checkpointing recomputes it from its arguments; call the model "
                "without this argument (for a cache of keys and values: use_cache=False)"
            )
    for mode in modes:
        mode.forget(trained_tensors_in(output))
    return output


def _tensors_of(value: Any, depth: int = 4) -> list[Tensor]:
    """Return the tensors in ``value``, down to ``depth`` nested containers or objects. Modules are
    skipped."""
    if isinstance(value, Tensor):
        return [value]
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        inner = vars(value).values()
    found: list[Tensor] = []
    for each in inner if depth else ():
        found += _tensors_of(each, depth - 1)
    return found


def _without_cache(model: nn.Module) -> None:
    """Disable the key-value cache of transformers models in training.

    Recomputed blocks would fill the cache twice. transformers also disables the cache for its own
    activation checkpointing.
    """

    def switch_off(position: int, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        if len(args) > position:
            return (*args[:position], False, *args[position + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}

    for module in model.modules():
        parameters = list(inspect.signature(module.forward).parameters)
        has_cache = hasattr(getattr(module, "config", None), "use_cache")
        if has_cache and "use_cache" in parameters:
            hook = functools.partial(switch_off, parameters.index("use_cache"))
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _keep(
    kept: Collection[str], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Policy of selective checkpointing. torch calls it for each operator that a block runs."""
    # The name of an operator ends with the name of its overload: aten::add.Tensor. An overload that
    # writes to an argument must run again, because later operators of the recomputation read the
    # changed argument.
    if operator.name().partition(".")[0] in kept and not _is_mutable(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(policy: Callable[..., CheckpointPolicy]) -> tuple[Any, Any]:
    """Return the contexts of the forward of a block and of its recomputation."""
    forward, recomputation = create_selective_checkpoint_contexts(policy)
    return _KeepingMode(policy, forward.storage), recomputation


class _KeepingMode(_CachingTorchDispatchMode):
    """Dispatch mode of the forward that protects saved results from in-place changes.

    torch saves an alias of the result of an operator. If the block changes the result in place,
    the alias changes too, and the recomputation would apply the change to it a second time. torch
    does not notice a change through a view of the result, such as the output of `F.linear` for
    three dims. Therefore this mode copies a saved result before an in-place change.
    """

    block = ""  # name of the running block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_mutable(func) and not torch.compiler.is_compiling():
            if func.name().startswith("aten::_foreach_"):
                self._refuse_lost_gradients(func, args)
            written = _written(func, args, kwargs or {})
            self._replace(written, lambda result: _VersionWrapper(_kept_tensor(result).clone()))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _refuse_lost_gradients(self, operator: Any, args: Any) -> None:
        """Raise RuntimeError if an in-place foreach operator changes tensors that require grad.

        Under any dispatch mode torch loses a part of the gradients of these operators.
        """
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensor_leaves(args)):
            raise RuntimeError(
                f"{self.block} calls {operator.name().partition('::')[2]}, which has wrong "
                "gradients with activation_checkpointing=selective: change the tensors one by one, "
                "or use activation_checkpointing=full"
            )

    def forget(self, outputs: Sequence[Tensor]) -> None:
        """Recompute the results that share memory with the ``outputs`` of the block.

        The caller may change the outputs in place, so their saved values may be wrong. This rarely
        costs time, because the recomputation usually stops before it reaches the outputs.
        """
        self._replace(outputs, lambda _: _RECOMPUTE)

    def _replace(self, tensors: Sequence[Tensor], replacement: Callable[[Any], Any]) -> None:
        """Replace the saved results that share memory with ``tensors``."""
        storages = set(map(storage_of, tensors))

        def replace(result: Any) -> Any:
            kept = _kept_tensor(result)
            is_shared = isinstance(kept, Tensor) and storage_of(kept) in storages
            return replacement(result) if is_shared else result

        for results in self.storage.values():
            for number, kept in results.items():
                found = tree_map_only(_VersionWrapper, replace, kept)
                # If one result of an operator is recomputed, all its results are.
                results[number] = _RECOMPUTE if _RECOMPUTE in tree_leaves(found) else found


def _kept_tensor(result: _VersionWrapper) -> Any:
    """Return the tensor of a saved result during the forward of its block."""
    # Activation offload replaces the tensor by a `SavedTensor`, which holds the tensor until the
    # end of the forward.
    return result.val.tensor if isinstance(result.val, SavedTensor) else result.val


def _is_mutable(operator: Any) -> bool:
    """True if ``operator`` writes to an argument."""
    # Higher-order operators have no schema.
    schema = getattr(operator, "_schema", None)
    return schema is not None and schema.is_mutable


def _written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that ``operator`` changes in place."""
    found: list[Any] = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tree_leaves(given)
    return [each for each in found if isinstance(each, Tensor)]


def select_without_hooks(model: nn.Module, config: ActivationCheckpointingConfig) -> nn.Module:
    """Hide operators that run inside FSDP hooks from selective checkpointing.

    torch matches the operators of the recomputation with the operators of the forward one by one.
    An FSDP hook inside of a checkpointed block may run an all-gather in only one of the two,
    because the parameters may already be unsharded in the other. Therefore the operators of these
    hooks must not take part in the match.
    """
    if config.name != "selective":
        return model
    for module in model.modules():
        hooks_of_kind: list[dict[int, Callable[..., Any]]]
        hooks_of_kind = [module._forward_pre_hooks, module._forward_hooks]
        for hooks in hooks_of_kind:
            for key, hook in hooks.items():
                # All other hooks, including user hooks, belong to the recomputed code.
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
    functional collectives; leading underscores of their names may be omitted. Patterns for other
    operators need the namespace (``namespace::name``). Raises `ConfigError` for a pattern without a
    match (the message names similar operators), and for a pattern that matches only composite or
    in-place operators.
    """
    found: set[str] = set()
    operators = _operators()
    for pattern in patterns:
        names = fnmatch.filter(operators, pattern)
        if not names:
            # The message names up to three operators, because several may be close to the pattern.
            near = nearest_matches(pattern.replace("*", ""), operators)
            advice = "use the names of torch.ops.aten, such as mm"
            if near:
                advice = f"did you mean {' or '.join(near)}?"
            raise ConfigError(
                f"activation_checkpointing.keep: no operator is called {pattern}; {advice}"
            )
        matches = chain.from_iterable(operators[name] for name in names)
        # A trailing underscore in a name marks an in-place operator.
        visible = set()
        for name in matches:
            if not (name.endswith("_") or _is_composite(name)):
                visible.add(name)
        # One visible operator is enough: scaled_dot_product_* matches visible and composite
        # operators.
        if not visible:
            raise ConfigError(
                f"activation_checkpointing.keep: {pattern} is decomposed into other operators, "
                "or changes an argument in place, and only results can be kept: name the operators "
                "that compute them (matrix products are mm, bmm and addmm, attention is "
                "scaled_dot_product_*)"
            )
        found |= visible
    return frozenset(found)


def _is_composite(full: str) -> bool:
    """Return True if the operator ``full`` is always decomposed into other operators."""
    # Overloads with an `out` argument are skipped: torch generates them without the composite
    # kernel, and blocks do not call them.
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
    # One full name stands for all overloads (aten::add.Tensor, aten::add.Scalar), which are saved
    # or recomputed together.
    found: dict[str, list[str]] = defaultdict(list)
    for full in sorted(_overloads()):
        namespace, _, name = full.partition("::")
        found[full].append(full)
        if namespace in _NAMESPACES:
            found[name.lstrip("_")].append(full)
    return dict(found)

"""Checks of the torch functions that a script calls, by a torch function mode.

The mode intercepts each call of a torch function in the thread that has activated the mode. Calls
inside of an intercepted call, such as the operators of a backward pass, are not intercepted.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals import function_modes
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.fsdp_internals.tensors import GATHERED_AS, SHARDED_AS, is_copied_view
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.parallelize.block_calls import MIXED, MixedTensorsError
from parallel2d.parallel.parallelize.script_checks.freed_memory import NameOf, refusing_reads
from parallel2d.parallel.parallelize.unsharded_parameters import data_was_set

_WHOLE = (
    "change unsharded values with parallel2d.apply_full(model, function), or inside "
    "parallel2d.summon_full_params(model, writeback=True, with_grads=True)"
)
_UNSUPPORTED = re.compile(
    "sharding strategy registered|require placement changes|without redistribution|"
    "Cannot (un)?flatten unevenly|not supported with DTensor"
)
_NO_SUBCLASSES = "is not supported for tensor subclasses"
# Matches torch's errors about operations that `DTensor` does not support
_SHARDED = re.compile(r"DTensor|[Ss]harding|placement")

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
# Calls that return a tensor with the same memory that torch does not record as a view. `_COPIED` is
# the attribute that marks their result if the argument is a copied view.
_SHARING = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
_COPIED = "_parallel2d_copied"
# For each function: the position of its argument ``inputs``, and attributes that a tensor in
# ``inputs`` must not have. Backward may write gradients of unsharded parameters, because FSDP
# averages them. The gradients that `torch.autograd.grad` returns are not averaged.
_DIFFERENTIATING: dict[Callable[..., Any], tuple[int, tuple[str, ...]]] = {
    Tensor.backward: (4, (SHARDED_AS,)),
    torch.autograd.backward: (5, (SHARDED_AS,)),
    torch.autograd.grad: (1, (SHARDED_AS, GATHERED_AS)),
}
# Methods that return a Python number
_NUMBERS = ("item", "__float__", "__int__", "__bool__", "__index__", "__complex__", "__format__")
_RANDOM = (
    *("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_"),
    *("geometric_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"),
)
# Types of an index that selects a view
_VIEWING = (int, slice, type(None), type(...))
_ASSIGNING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__")


class ScriptMode(TorchFunctionMode):
    """Raises errors for calls that would compute with local shards or would have no effect.

    Args:
        changed: returns the groups with parameters that changed between a forward and its backward.
        name_of: maps the id of a storage to the name of its unsharded parameter.
    """

    def __init__(self, changed: Callable[[], list[FSDPGroup]], name_of: NameOf) -> None:
        super().__init__()
        self._changed, self._name_of = changed, name_of
        # The running optimizer, unless it runs a closure
        self.stepping: Optimizer | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # If the garbage collector deactivates the mode during a call, torch puts the mode back on
        # its stack after the call.
        if torch.compiler.is_compiling() or self is not _thread.mode:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func in _DIFFERENTIATING:
            return self._differentiate(func, args, kwargs)
        try:
            if func == _GET_GRAD:
                # Other code may only compare the gradient with None.
                if sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.clip_grad":
                    _check_gradient(args[0])
            elif args and isinstance(args[0], DTensor):
                _check_read(func, name, args)
            for written in _written(name, args, kwargs):
                if isinstance(written, DTensor):
                    _check_written(name, written, args)
            with refusing_reads(name, args, kwargs, self._name_of):
                result = func(*args, **kwargs)
            if func in _SHARING and isinstance(args[0], DTensor) and _is_copied(args[0]):
                setattr(result, _COPIED, True)
            return result
        except RuntimeError as error:
            explanation = self._explain(name, error)
            if explanation is None:
                raise
            raise explanation from error

    def _differentiate(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        position, marks = _DIFFERENTIATING[func]
        inputs = kwargs.get("inputs", args[position] if len(args) > position else None)
        called = "grad" if func is torch.autograd.grad else "backward"
        for given in tree_leaves(inputs):
            name = next(filter(None, [getattr(given, mark, "") for mark in marks]), "")
            if name:
                raise RuntimeError(
                    f"torch.autograd.{called}() with inputs={name}: the gradient for it would "
                    "not be averaged over the ranks; call loss.backward() without inputs and read "
                    ".grad (requires_grad_(False) freezes the others)"
                )
        # Groups with parameters that were changed since the forward
        changed = self._changed()
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            explanation: Exception | None = self._explain(called, error)
            # Without changed groups, torch's message is about another tensor of the script.
            if changed and "modified by an inplace operation" in str(error):
                explanation = RuntimeError(
                    f"parameters of {changed[0].called} were changed between a forward and its "
                    "backward, which needs the earlier values: call loss.backward() before "
                    "optimizer.step()"
                )
            if explanation is None:
                raise
            raise explanation from error

    def _explain(self, name: str, error: RuntimeError) -> RuntimeError | ConfigError | None:
        """Return a clearer error to raise in the place of ``error``.

        None if ``error`` is not about sharded tensors, or if it is already clear because this
        package has raised it.
        """
        text = str(error)
        if self.stepping is not None and _SHARDED.search(text):
            return refusal(self.stepping, "fails on sharded parameters")
        if isinstance(error, MixedTensorsError) or _WHOLE in text:
            return None
        if MIXED in text and (_changes_first(name) or name in _ASSIGNING):
            return MixedTensorsError(
                f"{name}() writes a plain tensor to a part of a sharded one: {_WHOLE}"
            )
        if MIXED in text:
            return MixedTensorsError(
                f"{name}() got a plain tensor and a sharded parameter, which is unsharded only "
                "while the block that gathers it runs: elsewhere use parameter.full_tensor(), and "
                "pass weights between blocks as outputs and arguments"
            )
        if _UNSUPPORTED.search(text):
            return RuntimeError(f"{name}() cannot be computed on a DTensor: {_WHOLE}")
        if _NO_SUBCLASSES in text:
            return RuntimeError(
                f"{name}() was called on a DTensor, and this rank has only a shard: use "
                "tensor.full_tensor() on all ranks first"
            )
        return None


def refusal(optimizer: Optimizer, reason: str) -> ConfigError:
    """Return the error to raise if ``optimizer`` does not support sharded parameters."""
    name = type(optimizer).__name__
    return ConfigError(
        f"{name}.step {reason}: build parallel2d.whole_matrices({name}, parameters), which runs it "
        "on unsharded ones; load the state of a single process with parallel2d.load_full_state"
    )


def _check_read(func: Any, name: str, args: tuple[Any, ...]) -> None:
    tensor: DTensor = args[0]
    if name in _NUMBERS:
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            if size > 1 and not placement.is_replicate():
                raise RuntimeError(
                    f"{name}() reads a number from a DTensor that is placed as "
                    f"{tensor.placements}, and this rank has only a shard: use "
                    "tensor.full_tensor() on all ranks first"
                )
    elif func == _SET_DATA and hasattr(tensor, SHARDED_AS):
        raise RuntimeError(data_was_set(getattr(tensor, SHARDED_AS)))


def _check_gradient(parameter: Tensor) -> None:
    name = getattr(parameter, GATHERED_AS, None)
    if name is not None:
        raise ConfigError(
            f"clip_grad_norm_() after a forward without backward: {name} is unsharded, and its "
            "gradient is on the sharded parameter; call parallel2d.clip_gradient_norm, or run that "
            "forward under torch.no_grad()"
        )
    if updated_as(parameter) is not parameter:
        raise ConfigError(
            "clip_grad_norm_() of model.parameters(): with strategy=hybrid_full the gradients are "
            "on parallel2d.updated_parameters(model); pass these"
        )


def _written(name: str, args: tuple[Any, ...], kwargs: Any) -> Iterable[Any]:
    """Return the tensors that a call writes to."""
    if kwargs.get("out") is not None:
        return tree_leaves(kwargs["out"])
    if not (_changes_first(name) or name in _ASSIGNING or kwargs.get("inplace") is True):
        return ()
    # Functions of `torch.nn.init` get the tensor by keyword.
    first = args[0] if args else kwargs.get("tensor")
    return first if isinstance(first, list | tuple) else (first,)


def _changes_first(name: str) -> bool:
    """True if the name is that of an in-place function, which writes to its first argument."""
    return name.endswith("_") and not name.endswith("__")


def _is_copied(tensor: DTensor) -> bool:
    """True if ``tensor`` is a copied view, or shares the memory of a copied view."""
    return is_copied_view(tensor) or hasattr(tensor, _COPIED)


def _check_written(name: str, written: DTensor, args: tuple[Any, ...]) -> None:
    if _is_copied(written) or (name == "__setitem__" and _assigns_to_copy(written, args[1])):
        raise RuntimeError(f"{name}() writes to rows or columns of a DTensor: {_WHOLE}")
    if name in _RANDOM and any(map(Placement.is_shard, written.placements)):
        raise RuntimeError(
            f"{name}() would draw the same values for all shards of a DTensor: {_WHOLE}"
        )


def _assigns_to_copy(tensor: DTensor, index: Any) -> bool:
    """True if ``tensor[index] = number`` would write to a copy, without an error of torch."""
    indices = index if isinstance(index, tuple) else (index,)
    # Other indices do not select a view.
    if not all(isinstance(each, _VIEWING) for each in indices):
        return False
    view: Any = tensor.detach()[index]
    return is_copied_view(view)


class _ActiveMode(threading.local):
    mode: ScriptMode | None = None


_thread = _ActiveMode()


def current_mode() -> ScriptMode | None:
    """Return the mode of this thread."""
    return _thread.mode


def activate(changed: Callable[[], list[FSDPGroup]], name_of: NameOf) -> None:
    """Activate a mode in this thread, unless one is active."""
    if _thread.mode is None:
        _thread.mode = ScriptMode(changed, name_of)
        function_modes.insert(_thread.mode)


def deactivate() -> None:
    """End the mode of this thread."""
    if _thread.mode is not None:
        function_modes.remove(_thread.mode)
        _thread.mode = None


def hide_in_forwards(model: nn.Module) -> list[Any]:
    """Deactivate the mode during forwards of ``model``. Return the handles of the hooks.

    Otherwise torch.compile would compile each block twice: with the mode and without it.
    """
    hidden: list[ScriptMode] = []

    @torch.compiler.disable
    def hide(*_: Any) -> None:
        if _thread.mode is not None:
            hidden.append(_thread.mode)
            function_modes.remove(_thread.mode)

    @torch.compiler.disable
    def show(*_: Any) -> None:
        if hidden:
            mode = hidden.pop()
            # The mode may have ended during the forward.
            if mode is _thread.mode:
                function_modes.insert(mode)

    return [
        model.register_forward_pre_hook(hide, prepend=True),
        model.register_forward_hook(show, always_call=True),
    ]

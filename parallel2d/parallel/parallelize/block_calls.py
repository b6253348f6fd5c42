"""Calls of modules that have hooks of `fully_shard`: `prepare_block_calls`.

A direct call of ``module.forward`` becomes a call of the module, so that hooks all-gather the
module's parameters. Calls of other methods do not run these hooks. If a method fails because the
parameters are sharded, the error names the remedy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from parallel2d.parallel.fsdp_internals.sharded_model import module_groups, runs_forward
from parallel2d.parallel.model_structure import class_name
from parallel2d.parallel.sync.engine.replica_reducer import engine_of
from parallel2d.parallel.weights.unsharded_tensors import sharded_modules

MIXED = "mixed torch.Tensor and DTensor"  # part of torch's message
# Part of torch's error if a module changes an argument in place: FSDP hooks have replaced the
# argument by a view.
_CHANGED_VIEW = "RegisterPostBackwardFunction is a view and is being modified inplace"


class MixedTensorsError(RuntimeError):
    """An operation received both a ``torch.Tensor`` and a sharded `DTensor`."""


def prepare_block_calls(model: nn.Module) -> None:
    """Prepare all modules of ``model`` that have hooks of `fully_shard`."""
    grouped: set[nn.Module] = set()
    for modules in module_groups(model):
        if len(modules) > 1:
            grouped.update(modules)
    for name, module in sharded_modules(model):
        _explain_methods(module, name)
        _watch_calls(module, name, model, is_alone=module not in grouped)


def _explain_methods(module: nn.Module, name: str) -> None:
    """Wrap the public methods of ``module``, so that their errors name the remedy.

    Only methods of the class that defines ``forward`` are wrapped.
    """
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    for method, function in vars(owner).items():
        is_public = not method.startswith("_") and method != "forward"
        if is_public and isinstance(function, FunctionType):
            vars(module)[method] = _explained(module, name, method)


def _explained(module: nn.Module, name: str, method: str) -> Callable[..., Any]:
    call = getattr(module, method)

    # `wraps` of the bound method leaves ``self`` out of the signature.
    @functools.wraps(call)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            is_mixed = isinstance(error, MixedTensorsError) or MIXED in str(error)
            # During the forward of the module its parameters are unsharded, so the error has
            # another cause.
            if runs_forward(module) or not is_mixed:
                raise
            raise RuntimeError(
                f"{name or class_name(module)}.{method} computes with parameters that only a call "
                "of the module gathers: call "
                f"torch.distributed.fsdp.register_fsdp_forward_method(module, {method!r}) once "
                "after parallelize"
            ) from error

    return explained


def _watch_calls(module: nn.Module, name: str, root: nn.Module, is_alone: bool) -> None:
    """Turn ``module.forward(x)`` into ``module(x)``, so that hooks all-gather the parameters.

    A call before the first forward of ``root`` raises RuntimeError.

    Args:
        module: the module, which has hooks of `fully_shard`.
        name: FQN of the module.
        root: the model.
        is_alone: True if no other module shares the FSDP group of ``module``.
    """
    # The arguments of the calls that are running, innermost last
    given: list[Any] = []
    forward = module.forward

    def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
        # FSDP allows direct calls of a submodule only after the first forward of the model.
        if module is not root and not (runs_forward(root) or engine_of(root).has_run):
            raise RuntimeError(
                f"{name} was called before the model that it is a part of: call the model first, "
                f"or the method that calls {name} through "
                "torch.distributed.fsdp.register_fsdp_forward_method(model, name of the method)"
            )
        given.append({**dict(enumerate(args)), **kwargs})

    def restore(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        # FSDP's pre-forward hook turns a tensor that is passed twice into two tensors, but only in
        # the forward pass and not in its recomputation. This hook makes them one tensor again,
        # because attention runs other operators if query, key and value are the same tensor.
        received = {**dict(enumerate(args)), **kwargs}
        first: dict[int, Any] = {}
        for key, value in given[-1].items():
            # A hook of the model may have removed arguments.
            if isinstance(value, Tensor) and key in received:
                received[key] = first.setdefault(id(value), received[key])
        positional = tuple(map(received.pop, range(len(args))))
        return positional, received

    def forget(*_: Any) -> None:
        if given:  # otherwise an earlier hook has raised
            given.pop()

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        # Inside a running call, or inside a method that gathers the parameters, run ``forward``
        # directly.
        if not (given or (is_alone and runs_forward(module))):
            return module(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if _CHANGED_VIEW not in str(error):
                raise
            raise RuntimeError(
                f"{name or class_name(module)} changes an argument in place, which sharded modules "
                "cannot: change a copy (x = x + y in the place of x += y)"
            ) from error

    module.forward = called
    module.register_forward_pre_hook(keep, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(restore, with_kwargs=True)
    module.register_forward_hook(forget, always_call=True)

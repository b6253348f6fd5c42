"""Errors for calls of a sharded model that would compute with parts of its parameters, or train
it wrongly without an error, and calls that scripts for ``DistributedDataParallel`` and transformers
make: `guard` installs them.

Under a tensor axis they cost one small collective in the first forward.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.parallel.fsdp_internals.computations import (
    MixedTensorsError,
    explain_mixed_tensors,
    is_differentiated_forward,
)
from parallel2d.parallel.fsdp_internals.sharded_model import (
    RunningForward,
    collect_grad_tensors,
    has_begun,
)
from parallel2d.parallel.mesh import axis_names
from parallel2d.parallel.model_structure import class_name
from parallel2d.parallel.parallelize.optimizer_steps import watch_steps
from parallel2d.parallel.sync import no_sync
from parallel2d.parallel.sync.engine.replica_reducer import engine_of
from parallel2d.parallel.sync.methods.method import UpdateFollower
from parallel2d.parallel.weights.whole_tensors import sharded_modules

log = logging.getLogger(__name__)


def guard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Installs the errors on ``model``, after `fully_shard`."""
    # With a tensor axis activations are `DTensor`s, whose operators shall cost nothing more.
    if "tensor" not in axis_names(mesh):
        explain_mixed_tensors()
    explain_calls(model)
    model.register_load_state_dict_pre_hook(_refuse_whole_tensors)
    for axis in ("context", "tensor"):
        check_ranks_share_data(model, mesh, axis)
    _accept_other_calls(model)
    watch_steps()
    # `pickle` asks this table before it asks the tensor; `copy` does not.
    copyreg.pickle(DTensor, _pickled)


def _pickled(tensor: DTensor) -> Any:
    """What a pickle of ``tensor`` holds: the part of one rank, which is said once."""
    _say_parts()
    return tensor.__reduce_ex__(2)


@functools.cache
def _say_parts() -> None:
    log.warning(
        "torch.save, or another pickle, of sharded tensors writes the parts that this rank has: "
        "call parallel2d.save_full(path, model, optimizer) on all ranks to write whole ones"
    )


def _refuse_whole_tensors(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before ``load_state_dict``: raises `ConfigError` for plain tensors in the place of sharded
    ones, which torch would refuse one by one."""
    if prefix:  # a part of another model, whose state this is
        return
    for name, parameter in model.named_parameters():
        value = state.get(name)
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_whole and isinstance(parameter, DTensor):
            raise ConfigError(
                f"load_state_dict: {name} is sharded, and the state holds a whole tensor; use "
                "parallel2d.load_state(model, state), which sends rank 0's tensors to their "
                'places, or load_full_state(model, optimizer, {"model": ..., "optimizer": ...})'
            )


def explain_calls(model: nn.Module) -> None:
    """Gives calls for which parameters are not gathered an error that says what to do: a block
    before the model, methods other than forward, and arguments that a block changes in place. A
    direct call of a forward becomes a call of the module."""
    for name, module in sharded_modules(model):
        _explain_methods(module, name)
        _watch_calls(module, name, model)


def _explain_methods(module: nn.Module, name: str) -> None:
    """Wraps the public methods of the class that defines ``module``'s forward."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    for method, function in vars(owner).items():
        is_public = not method.startswith("_") and method != "forward"
        if is_public and isinstance(function, FunctionType):
            vars(module)[method] = functools.wraps(function)(_explained(module, name, method))


def _explained(module: nn.Module, name: str, method: str) -> Callable[..., Any]:
    call = getattr(module, method)
    forward = RunningForward(module)

    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except MixedTensorsError as error:
            # In a forward of the module its parameters are gathered, and the error is another.
            if forward.now:
                raise
            raise RuntimeError(
                f"{name or class_name(module)}.{method} computes with parameters that only a call "
                "of the module gathers: call "
                f"torch.distributed.fsdp.register_fsdp_forward_method(module, {method!r}) once "
                "after parallelize"
            ) from error

    return explained


def _watch_calls(module: nn.Module, name: str, root: nn.Module) -> None:
    """Makes a call raise RuntimeError before the first one of ``root``; when ``module`` has changed
    a list or dict that it was given: the sharding engine gives it a copy, so the caller would never
    see the change; when it leaves its result in an object, where no hook finds it; and for a
    forward-mode derivative that it cannot compute. Makes ``module.forward(x)`` the call
    ``module(x)``, in which hooks gather parameters."""
    # The arguments of the calls that run
    given: list[Any] = []
    # Lists and dicts that the last one got, what was in them, and whether the caller sees them
    copied: list[tuple[Any, Any, bool]] = []
    running, forward = RunningForward(module), module.forward

    def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
        # Once the model itself has been called, its modules may be called alone.
        if module is not root and not has_begun(root):
            raise RuntimeError(
                f"{name} was called before the model that it is a part of: call the model first, "
                f"or the method that calls {name} through "
                "torch.distributed.fsdp.register_fsdp_forward_method(model, name of the method)"
            )
        if is_differentiated_forward((args, kwargs), running.frees):
            raise RuntimeError(
                f"{name or class_name(module)} was called with a derivative of "
                "torch.autograd.forward_ad, which sharded modules support under torch.no_grad() "
                "alone: use torch.func.jvp(model, (x,), (e,))"
            )
        given.append({**dict(enumerate(args)), **kwargs})

    def restore(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        # The sharding engine makes two tensors of one that is given twice, but not while
        # activations are recomputed: attention computes otherwise where query is key is value.
        received = {**dict(enumerate(args)), **kwargs}
        first: dict[int, Any] = {}
        for key, value in given[-1].items():
            # A hook of the model's own may have taken arguments away.
            if isinstance(value, Tensor) and key in received:
                received[key] = first.setdefault(id(value), received[key])
        own = set(map(id, _containers_in(list(given[-1].values()))))
        containers = list(_containers_in(list(received.values())))[1:]
        copied[:] = [(each, copy.copy(each), id(each) in own) for each in containers]
        positional = tuple(received.pop(index) for index in range(len(args)))
        return positional, received

    def compare(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not given:  # an earlier hook has raised
            return
        given.pop()
        no_result = torch.is_grad_enabled() and not collect_grad_tensors(output)
        changed = list(filter(_holds_result, tree_leaves((args, kwargs)))) if no_result else []
        for after, before, is_seen in copied:
            if _entries(after) != _entries(before) and (no_result or not is_seen):
                changed.append(after)
        copied.clear()
        if changed:
            raise RuntimeError(
                f"{name or class_name(module)} changed a {type(changed[0]).__name__} that it was "
                "given, which sharded modules cannot, because they get copies of their arguments "
                "and compute gradients of what they return: return the values instead"
            )

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        # Unless a call, or another method that gathers them, has come to it.
        if given or (running.is_alone and running.now):
            return forward(*args, **kwargs)
        return module(*args, **kwargs)

    module.forward = called
    module.register_forward_pre_hook(keep, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(restore, with_kwargs=True)
    module.register_forward_hook(compare, with_kwargs=True, always_call=True)


def _entries(container: list[Any] | dict[Any, Any]) -> list[Any]:
    """What is in ``container``, by identity."""
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]


def _holds_result(argument: object) -> bool:
    """Whether ``argument`` is an object with a tensor that a backward pass may reach."""
    values = vars(argument).values() if hasattr(argument, "__dict__") else ()
    held = [value for value in values if isinstance(value, Tensor)]
    return not isinstance(argument, Tensor) and any(value.requires_grad for value in held)


def _containers_in(value: Any) -> Iterator[list[Any] | dict[Any, Any]]:
    """The plain lists and dicts in ``value`` and in each other, those outside of them first."""
    if type(value) in (list, dict):
        yield value
    if type(value) not in (list, tuple, dict):
        return
    inside = value.values() if type(value) is dict else value
    for inner in inside:
        yield from _containers_in(inner)


def check_ranks_share_data(model: nn.Module, mesh: DeviceMesh, axis: str) -> None:
    """Makes the first forward under the context or tensor ``axis`` compare its inputs over that
    axis: a sampler keyed on the global rank feeds each of these ranks other data, which their parts
    of one sequence or of one matrix silently mix."""
    if axis not in axis_names(mesh):
        return
    group = mesh.get_group(axis)

    # In the first forward alone: a sampler that is right once is right ever after. A hook before
    # this one may have called the model: torch then calls it again, as one without ``kwargs``.
    def compare(_module: nn.Module, args: Any, kwargs: Any = None) -> None:
        handle.remove()
        if len(set(all_gather(_digest((args, kwargs)), group))) > 1:
            ranks = dist.get_process_group_ranks(group)
            raise ConfigError(
                f"ranks {ranks} share one {axis} axis and were fed different data: a sampler must "
                "be keyed on parallel2d.data_coordinate(mesh) and its number of ranks, "
                "mesh_shape(mesh).data_ranks, not on the global rank"
            )

    handle = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _digest(inputs: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(
                leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def _accept_other_calls(model: nn.Module) -> None:
    """Makes ``model.no_sync()`` that of `parallel2d.no_sync`, and gives ``model.module``,
    ``save_pretrained`` and late casts an error that says what to do."""
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = functools.partial(no_sync, model)
    _explain_missing_wrapper(type(model))
    for _, module in sharded_modules(model):
        # `to`, `half` and others go through it.
        vars(module)["_apply"] = functools.partial(_apply, model, module._apply)
    for module in model.modules():
        save = getattr(module, "save_pretrained", None)
        if callable(save):
            vars(module)["save_pretrained"] = functools.partial(_save_whole, save)


def _apply(
    model: nn.Module,
    apply: Callable[..., Any],
    function: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> Any:
    engine = engine_of(model)
    is_used = has_begun(model) or type(engine.updates) is not UpdateFollower
    for dtype in {parameter.dtype for parameter in model.parameters()}:
        wanted = function(torch.empty(0, dtype=dtype)).dtype
        # The wire to other replicas is no wider than what the configuration says.
        is_wider = engine.buckets is not None and wanted.itemsize > dtype.itemsize
        if wanted != dtype and (is_used or is_wider):
            raise ConfigError(
                f"model.to({wanted}): what gathers, reduces or updates parameters is made for "
                f"{dtype}; choose it by parallelize(..., ParallelConfig(precision=...))"
            )
    return apply(function, recurse)


def _save_whole(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None:
        raise ConfigError(
            "save_pretrained(...) would write this rank's parts of the parameters: gather them on "
            "all ranks by state = parallel2d.full_state(model) and give state_dict=state['model'] "
            "on rank 0, or save a checkpoint for python -m parallel2d.checkpoint convert"
        )
    return save(*args, **kwargs)


def _explain_missing_wrapper(kind: type) -> None:
    """``kind``: the class that `fully_shard` has made, or had made for an earlier model."""

    # Not a property, whose AttributeError torch replaces, and which would hide a child.
    def find(self: Any, name: str) -> Any:
        try:
            return super(kind, self).__getattr__(name)  # type: ignore[arg-type]
        except AttributeError as error:
            if name != "module":
                raise
            problem = "model.module: parallelize(...) returns the model itself, without a wrapper"
            raise AttributeError(f"{problem}; use model") from error

    kind.__getattr__ = find  # type: ignore[attr-defined]

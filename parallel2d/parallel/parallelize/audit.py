"""Errors for scripts that write to, swap or misuse parameters of a parallelized model, which would
lose what they wrote or train wrongly without one: `audit` installs them.

[Note: audited forwards] What costs a few integers for each parameter is compared in every forward.
Values of gathered parameters and the attributes of modules are looked through in the first two
forwards, in the fourth, the eighth and so on, apart with gradients and without, and every
``sync.compare_every`` steps. A write may show on some ranks alone, those whose part was written to:
where a backward pass follows, its agreement tells the others.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map

from parallel2d.parallel import fsdp_internals
from parallel2d.parallel.fsdp_internals import FSDPGroup, GroupWatch
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.model_structure import (
    fqn_of,
    held_parameters,
    join_names,
    plain_attributes,
    tensors_in,
)
from parallel2d.parallel.sync.engine.replica_reducer import ReplicaReducer, engine_of

_INSTEAD = (
    "change parameters in place under torch.no_grad() after optimizer.step(), or with "
    "parallel2d.apply_full(model, function)"
)


def audit(model: nn.Module, mesh: DeviceMesh, compare_every: int) -> None:
    """Installs the errors on ``model``, which has its weights."""
    _watch_process()
    watch = _Audit(model, mesh, compare_every)
    _audits.add(watch)
    model.register_forward_pre_hook(watch.begin, prepend=True)
    model.register_forward_hook(watch.end)


class _Audit:
    """What is compared of one model."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, compare_every: int) -> None:
        self._model = model
        self._engine = engine_of(model)
        self._shape = mesh_shape(mesh)
        self._compare_every = compare_every
        # By number the names of gathered parameters, once they have been
        self._storages: dict[int, str] = {}
        self._begun: Counter[bool] = Counter()
        self._auditing = False
        # The attributes that are managed parameters; those of `ignored` are no `DTensor`s.
        self._managed: dict[nn.Module, list[str]] = {}
        for module in model.modules():
            held = held_parameters(module)
            self._managed[module] = [key for key, each in held if isinstance(each, DTensor)]
        self._states = self._engine.batch.states
        self._watches: list[GroupWatch] = []
        for state in self._states:
            watch = state.group.begin_watch(self._storages, self._enter, self._leave)
            self._watches.append(watch)
            for inner in state.group.modules:
                # torch ends the forward of a group of several modules with that of the last one.
                if len(state.group.modules) > 1:
                    inner.register_forward_hook(lambda _module, _inputs, output: self._own(output))

    # Forwards of the model

    def begin(self, *_: Any) -> None:
        if fsdp_internals.in_backward():
            return
        if not self._begun:
            self._check_places()
        recorded = torch.is_grad_enabled()
        self._begun[recorded] += 1
        number = self._begun[recorded]
        # Powers of two, so that all of them together cost little.
        self._auditing = number & (number - 1) == 0 or self._is_due
        # No backward pass has come that could tell the others.
        if isinstance(self._engine, ReplicaReducer) and not self._engine.batch.pending:
            fault, self._engine.fault = self._engine.fault, ""
            if fault:
                raise RuntimeError(fault)
        for watch in self._watches:
            name = watch.reassigned()
            if name:
                raise RuntimeError(
                    f"{name}.data was set to another tensor, which has no effect on a sharded "
                    f"parameter: use {name}.data.copy_(value) with a value that is sharded alike, "
                    f"or {_INSTEAD}"
                )

    def _check_places(self) -> None:
        """Raises RuntimeError where a module has something else than a sharded parameter: in the
        first forward torch takes over what is there."""
        for module, managed in self._managed.items():
            for attribute in managed:
                found = module._parameters.get(attribute)
                if not (isinstance(found, nn.Parameter) and isinstance(found, DTensor)):
                    raise _misplaced(self._fqn(module, attribute))

    @property
    def _is_due(self) -> bool:
        if not self._compare_every or not isinstance(self._engine, ReplicaReducer):
            return False
        return self._engine.keys.step % self._compare_every == 0

    def end(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        self._check_modules()
        self._auditing = False
        if torch.is_grad_enabled() or fsdp_internals.in_backward():
            return None
        output = self._own(output)
        # Where no backward will follow, whoever asks for parameters gets the sharded ones.
        for state in self._states:
            if not state.forwards:
                state.group.release()
        return output

    def _check_modules(self) -> None:
        """Raises RuntimeError for a trained parameter that nothing averages over the ranks, and for
        what keeps the memory of a gathered one, which is freed."""
        trains = torch.is_grad_enabled() and self._shape.data_ranks > 1
        modules = [self._model]
        while modules:
            module = modules.pop()
            managed = self._managed.get(module, ())
            for attribute, each in module._parameters.items():
                if attribute not in managed and each is not None:
                    self._refuse_kept(module, attribute, each)
                    if trains and each.requires_grad:
                        raise RuntimeError(
                            f"{self._fqn(module, attribute)} was added or unfrozen after "
                            "parallelize, and nothing averages its gradient over the ranks: add it "
                            "before parallelize, trainable"
                        )
            if self._auditing:
                for attribute, value in chain(plain_attributes(module), module._buffers.items()):
                    for held in tensors_in(value):
                        self._refuse_kept(module, attribute, held)
            modules += [child for child in module._modules.values() if child is not None]

    def _refuse_kept(self, module: nn.Module, attribute: str, held: Tensor) -> None:
        name = self._storages.get(fsdp_internals.storage_of(held) or 0)
        if name is not None:
            raise RuntimeError(
                f"{self._fqn(module, attribute)} keeps {name} as it was gathered for a forward, "
                "whose memory is freed: keep a clone(), or return it from forward"
            )

    def _fqn(self, module: nn.Module, attribute: str) -> str:
        named = self._model.named_modules()
        return fqn_of(next(join_names(name, attribute) for name, each in named if each is module))

    # Forwards of groups

    def _enter(self, watch: GroupWatch) -> None:
        for name, expected, places in zip(watch.names, watch.registered, watch.places, strict=True):
            for module, attribute in places:
                if module._parameters.get(attribute) is not expected:
                    raise _misplaced(name)

    def _leave(self, group: FSDPGroup, output: Any) -> Any:
        assert group.watch is not None
        name = group.watch.written(by_value=self._auditing)
        if name:
            self._report(
                f"{name} was written to while it was gathered, in the forward of {group.called} or "
                f"before its backward: what is written there is lost; {_INSTEAD}"
            )
        return self._own(output)

    def _report(self, message: str) -> None:
        """Raises RuntimeError; in a forward with gradients the end of the backward pass raises."""
        if isinstance(self._engine, ReplicaReducer) and torch.is_grad_enabled():
            self._engine.fault = self._engine.fault or message
        else:
            raise RuntimeError(message)

    def _own(self, output: Any) -> Any:
        """Has what a group returns share no memory with gathered parameters, which is freed."""
        if not any(map(self._is_shared, tree_leaves(output))):
            return output
        return tree_map(self._own_leaf, output)

    def _is_shared(self, leaf: Any) -> bool:
        if isinstance(leaf, Tensor):
            return fsdp_internals.storage_of(leaf) in self._storages
        # A leaf for torch, which all the same puts its hooks on the tensors inside.
        return is_dataclass(leaf) and any(map(self._is_shared, tree_leaves(vars(leaf))))

    def _own_leaf(self, leaf: Any) -> Any:
        if not self._is_shared(leaf):
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.clone()
        copied = copy.copy(leaf)
        vars(copied).update(tree_map(self._own_leaf, vars(leaf)))
        return copied

    # Calls from elsewhere

    def follow_update(self) -> None:
        """Puts the sharded parameters back where gathered ones have the values of before."""
        for state in self._states:
            state.group.follow_update()

    def name_of(self, tensor: Tensor, call: str) -> str | None:
        """The name of the parameter that ``tensor`` is, if ``call`` cannot compute its gradient."""
        for state in self._states:
            for parameter in state.group.parameters:
                if parameter.sharded is tensor:
                    return parameter.name
        name = getattr(tensor, fsdp_internals.GATHERED, None)
        if name is None or tensor.untyped_storage()._cdata not in self._storages:
            return None
        # Gradients that backward leaves in a parameter are averaged, those that grad returns not.
        ranks = self._shape.shard if call == "backward" else self._shape.data_ranks
        return name if ranks > 1 else None

    @property
    def changed(self) -> list[str]:
        """The groups that were changed between a forward and its backward."""
        found = []
        for state in self._states:
            if state.forwards > state.group.forwards_after_change:
                found.append(state.group.called)
        return found


def _misplaced(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is not the parameter that parallelize has sharded: torch.func.functional_call("
        "model, weights), load_state_dict(assign=True) after a forward and parameters that are "
        f"set anew have no effect here; {_INSTEAD}"
    )


# All that are alive
_audits: weakref.WeakSet[_Audit] = weakref.WeakSet()


@functools.cache
def _watch_process() -> None:
    """Installs, once, what belongs to no model: hooks of optimizers, autograd's two functions, and
    numbers from `DTensor`s."""
    register_optimizer_step_pre_hook(_refuse_gathered)
    register_optimizer_step_post_hook(_count_update)
    torch.autograd.backward = _checked(torch.autograd.backward, "backward", 5)
    torch.autograd.grad = _checked(torch.autograd.grad, "grad", 1)
    fsdp_internals.refuse_numbers_of_parts()


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _refuse_gathered(optimizer: Optimizer, *_: Any) -> None:
    for parameter in _parameters_of(optimizer):
        name = getattr(parameter, fsdp_internals.GATHERED, None)
        if name is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} was built while {name} was gathered, between a "
                "forward and its backward, and would train nothing: build it after parallelize(), "
                "before the first forward"
            )


def _count_update(optimizer: Optimizer, *_: Any) -> None:
    """Counts an update as a change in place: updates of many `DTensor`s at once count nowhere."""
    updated = []
    for parameter in _parameters_of(optimizer):
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            updated.append(parameter)
    if not updated:
        return
    torch.autograd.graph.increment_version(updated)
    for watch in _audits:
        watch.follow_update()


def _checked(call: Callable[..., Any], called: str, position: int) -> Callable[..., Any]:
    """``call``, torch.autograd's function ``called``, whose argument ``inputs`` is at
    ``position``."""

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[position] if len(args) > position else None)
        for given in tree_leaves(inputs):
            for watch in _audits:
                name = watch.name_of(given, called) if isinstance(given, Tensor) else None
                if name is not None:
                    raise RuntimeError(
                        f"torch.autograd.{called}() with inputs={name}: autograd computes "
                        "gradients of gathered parameters, and nothing averages these over the "
                        "ranks; call loss.backward() without inputs and read .grad (freeze the "
                        "others with requires_grad_(False))"
                    )
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            groups = list(chain.from_iterable(watch.changed for watch in _audits))
            # It may be another tensor of the script.
            if not groups:
                raise
            raise RuntimeError(
                f"parameters of {groups[0]} were changed between a forward and its backward, which "
                "needs the values of before: call loss.backward() before optimizer.step() and "
                "other changes"
            ) from error

    return checked

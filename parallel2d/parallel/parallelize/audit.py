"""Errors for scripts that write to, swap or misuse parameters of a parallelized model, which would
lose what they wrote or train wrongly without one: `audit` installs them.

[Note: audited forwards] What costs a few integers for each parameter is compared in every forward.
Values of gathered parameters and attributes of modules are looked through in the forwards 1, 2, 4,
8 and so on, apart with gradients and without, and every ``sync.compare_every`` steps. A write may
show on some ranks alone, those whose part was written to: where a backward pass follows, its
agreement tells the others.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.computations import SHARDED_AS
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.fsdp_internals.group_watch import (
    GATHERED_AS,
    GroupWatch,
    quick_reads,
    refuse_numbers_of_parts,
    storage_of,
)
from parallel2d.parallel.fsdp_internals.sharded_model import in_backward, was_interrupted
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.model_structure import (
    fqn_of,
    held_parameters,
    join_names,
    plain_attributes,
    tensors_in,
    updated_as,
)
from parallel2d.parallel.sync.engine.accumulation import discard_accumulated
from parallel2d.parallel.sync.engine.replica_reducer import ReplicaReducer, engine_of
from parallel2d.parallel.weights.named_tensors import stepped_by

_INSTEAD = (
    "change parameters in place under torch.no_grad() after optimizer.step(), or with "
    "parallel2d.apply_full(model, function)"
)
_MISPLACED = (
    "is not the parameter that parallelize has sharded: torch.func.functional_call(model, values), "
    "load_state_dict(assign=True) after a forward and parameters that are set anew have no effect "
    f"here; {_INSTEAD}"
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
        self.averages = mesh_shape(mesh).data_ranks > 1
        self._replicates = mesh_shape(mesh).replicate > 1
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
        self._learn_modules()
        self._states = self._engine.gradients
        self._watches: list[GroupWatch] = []
        # The versions of sharded parameters of which a forward with gradients has computed
        self._recorded: dict[GroupWatch, list[int]] = {}
        for group in [state.group for state in self._states]:
            self._watches.append(group.watch(self._storages, self._enter, self._leave))
            # torch ends the forward of a group of several modules with that of the last one.
            for inner in group.modules[1:] and group.modules:
                inner.register_forward_hook(lambda _module, _inputs, output: self._own(output))

    # Forwards of the model

    def begin(self, *_: Any) -> None:
        if in_backward():
            return
        # Before the first forward, in which torch takes over what is there.
        for module, managed in () if self._begun else self._managed.items():
            for attribute in managed:
                found = module._parameters.get(attribute)
                if not (isinstance(found, nn.Parameter) and isinstance(found, DTensor)):
                    raise RuntimeError(f"{self._fqn(module, attribute)} {_MISPLACED}")
        if was_interrupted(self._model):
            discard_accumulated(self._model)
        self._begun[torch.is_grad_enabled()] += 1
        number = self._begun[torch.is_grad_enabled()]
        self._auditing = number & (number - 1) == 0
        if isinstance(self._engine, ReplicaReducer):
            if self._compare_every:
                self._auditing |= self._engine.keys.step % self._compare_every == 0
            # No backward pass has come that could tell the others.
            if self._engine.fault and not self._engine.pending:
                raise RuntimeError(self._engine.fault)

    def end(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        self._check_modules()
        self._auditing = False
        if torch.is_grad_enabled() or in_backward():
            return None
        output = self._own(output)
        # Where no backward will follow, whoever asks for parameters gets the sharded ones.
        for state in self._states:
            if not state.forwards:
                state.group.release()
        return output

    def _learn_modules(self) -> None:
        """Takes down which modules there are and what they hold, in the form that is compared
        fastest."""
        self._modules = list(self._model.modules())
        self._children = [module._modules for module in self._modules]
        self._known_children = [dict(children) for children in self._children]
        self._held = [module._parameters for module in self._modules]
        self._known_names = list(chain.from_iterable(self._held))
        # (module, attribute) of parameters that `fully_shard` does not have
        self._unmanaged: list[tuple[nn.Module, str]] = []
        for module in self._modules:
            managed = self._managed.get(module, ())
            self._unmanaged += [(module, key) for key in module._parameters if key not in managed]

    def _check_modules(self) -> None:
        """Raises RuntimeError for a trained parameter that nothing averages over the ranks, and for
        what keeps the memory of a gathered one, which is freed."""
        names = list(chain.from_iterable(self._held))
        if self._children != self._known_children or names != self._known_names:
            self._learn_modules()
        trains = torch.is_grad_enabled() and self.averages
        for module, attribute in self._unmanaged:
            each = module._parameters[attribute]
            if each is None:
                continue
            self._refuse_kept(module, attribute, each)
            if trains and each.requires_grad:
                raise RuntimeError(
                    f"{self._fqn(module, attribute)} was added or unfrozen after parallelize, and "
                    "nothing averages its gradient over the ranks: add it before parallelize, "
                    "trainable"
                )
        if not self._auditing:
            return
        for module in self._modules:
            for attribute, value in plain_attributes(module):
                for held in tensors_in(value):
                    self._refuse_kept(module, attribute, held)

    def _refuse_kept(self, module: nn.Module, attribute: str, held: Tensor) -> None:
        name = self._storages.get(storage_of(held) or 0)
        if name is not None:
            raise RuntimeError(
                f"{self._fqn(module, attribute)} keeps {name} as it was gathered for a forward, "
                "whose memory is freed: keep a clone(), or return it from forward"
            )

    def _fqn(self, module: nn.Module, attribute: str) -> str:
        named = self._model.named_modules()
        return fqn_of(next(join_names(name, attribute) for name, each in named if each is module))

    # Forwards of groups

    def _enter(self, watch: GroupWatch, gathered: bool) -> None:
        name = watch.misplaced(gathered)
        if name:
            raise RuntimeError(f"{name} {_MISPLACED}")
        if self._auditing:
            watch.keep_values()

    def _leave(self, group: FSDPGroup, watch: GroupWatch, output: Any) -> Any:
        name = watch.written(by_value=self._auditing)
        if name:
            message = (
                f"{name} was written to while it was gathered, in the forward of {group.called} or "
                "before its backward: what is written there is lost, or stays on this rank alone; "
                f"{_INSTEAD}"
            )
            if not (torch.is_grad_enabled() and isinstance(self._engine, ReplicaReducer)):
                raise RuntimeError(message)
            self._engine.fault = self._engine.fault or message
        if torch.is_grad_enabled():
            self._recorded[watch] = watch.versions
        return self._own(output)

    def _own(self, output: Any) -> Any:
        """Has what a group returns share no memory with gathered parameters, which is freed."""
        if isinstance(output, Tensor):
            return output.clone() if self._is_shared(output) else output
        leaves = tree_leaves(output)
        for leaf in leaves:
            # A leaf for torch, which all the same puts its hooks on the tensors inside.
            if is_dataclass(type(leaf)):
                for each in fields(leaf):
                    # It may be frozen, or have slots.
                    object.__setattr__(leaf, each.name, self._own(getattr(leaf, each.name)))
        if not any(map(self._is_shared, leaves)):
            return output
        return tree_map(lambda leaf: leaf.clone() if self._is_shared(leaf) else leaf, output)

    def _is_shared(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and storage_of(leaf) in self._storages

    def before_update(self, stepping: Optimizer) -> None:
        """Refuses gradients that `no_sync` has left as they are."""
        if not isinstance(self._engine, ReplicaReducer):
            return
        if self._engine.pending and self._is_unreduced():
            parameters = chain.from_iterable(state.group.parameters for state in self._states)
            stepped = set(map(id, stepped_by(stepping)))
            if any(id(updated_as(each.sharded)) in stepped for each in parameters):
                raise RuntimeError(
                    f"{type(stepping).__name__}.step() with gradients of no_sync() alone, which "
                    "are not reduced over all ranks: run the last backward pass of a global batch "
                    "outside of it, or use parallel2d.accumulate(model, micro_batches)"
                )
        self._engine.updates.before_update(stepping)
        self._engine.count_update(stepping)

    def _is_unreduced(self) -> bool:
        return self._replicates or any(state.group.has_whole_gradients for state in self._states)

    def changed(self) -> Iterator[FSDPGroup]:
        """The groups that were changed after a forward whose backward is to come, with the sharded
        parameters in the places of the gathered ones of before."""
        for state, watch in zip(self._states, self._watches, strict=True):
            if state.forwards and watch.take_updates():
                state.group.release()
            if state.forwards and self._recorded.get(watch) is not watch.versions:
                yield state.group


# All that are alive
_audits: weakref.WeakSet[_Audit] = weakref.WeakSet()


@functools.cache
def _watch_process() -> None:
    torch.autograd.backward = _checked(torch.autograd.backward, "backward", 5, SHARDED_AS)
    # Gradients that backward leaves in gathered parameters are averaged, those that it returns not.
    torch.autograd.grad = _checked(torch.autograd.grad, "grad", 1, SHARDED_AS, GATHERED_AS)
    refuse_numbers_of_parts()
    # torch's `clip_grad_norm_` calls it, wherever a script has imported that from.
    clip = _not_of_parts(clip_grad._clip_grads_with_norm_)
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = clip
    DTensor.data = property(Tensor.data.__get__, _set_data)  # type: ignore[attr-defined, assignment]


def _set_data(tensor: DTensor, value: Tensor) -> None:
    """The setter of ``tensor.data``, which reaches neither this rank's part nor torch's engine."""
    name = getattr(tensor, SHARDED_AS, "")
    if name:
        raise RuntimeError(
            f"{name}.data was set to another tensor, which has no effect on a sharded parameter: "
            f"use {name}.data.copy_(value) with a value that is sharded alike, or {_INSTEAD}"
        )
    Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]


def _not_of_parts(clip: Callable[..., None]) -> Callable[..., None]:
    """``clip`` of torch's ``clip_grad_norm_``, which would pass over parameters that are split."""

    @functools.wraps(clip)
    def refusing(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(updated_as(each) is not each for each in parameters):
            raise ConfigError(
                "clip_grad_norm_() of model.parameters(): with strategy=hybrid_full the gradients "
                "are those of parallel2d.updated_parameters(model); give it these"
            )
        clip(parameters, *args, **kwargs)

    return refusing


def _changed_groups() -> list[FSDPGroup]:
    return list(chain.from_iterable(watch.changed() for watch in _audits))


def before_update(stepping: Optimizer) -> None:
    """Lets models follow the update that is to come. Refuses gathered parameters, trained ones of
    no model beside sharded ones, and what the models refuse."""
    for watch in _audits:
        watch.before_update(stepping)
    others: list[Tensor] = []
    any_sharded = False
    for parameter in stepped_by(stepping):
        if isinstance(parameter, DTensor):
            any_sharded |= hasattr(parameter, SHARDED_AS)
        elif parameter.requires_grad and not hasattr(parameter, SHARDED_AS):
            others.append(parameter)
        name = getattr(parameter, GATHERED_AS, None)
        if name is not None:
            raise RuntimeError(
                f"{type(stepping).__name__} was built while {name} was gathered, between a "
                "forward and its backward, and would train nothing: build it after parallelize(), "
                "before the first forward"
            )
    if any_sharded and others and any(watch.averages for watch in _audits):
        raise RuntimeError(
            f"{type(stepping).__name__} has a parameter of shape {tuple(others[0].shape)} that is "
            "of no parallelized model, and nothing averages its gradient over the ranks: put its "
            "module and the model into one nn.Module and call parallelize() on that"
        )


def count_update(stepping: Optimizer) -> None:
    """Counts an update as a change in place: updates of many `DTensor`s at once count nowhere."""
    with quick_reads():
        updated = [each for each in stepped_by(stepping) if each.grad is not None]
    torch.autograd.graph.increment_version(each for each in updated if isinstance(each, DTensor))
    _changed_groups()


def _checked(
    call: Callable[..., Any], called: str, position: int, *marks: str
) -> Callable[..., Any]:
    """``call``, torch.autograd's function ``called``, whose argument ``inputs`` is at ``position``
    and may hold no tensors with the attributes ``marks``."""

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[position] if len(args) > position else None)
        for given in tree_leaves(inputs):
            name = next(filter(None, [getattr(given, mark, "") for mark in marks]), "")
            if name:
                raise RuntimeError(
                    f"torch.autograd.{called}() with inputs={name}: nothing averages what autograd "
                    "computes for it over the ranks; call loss.backward() without inputs and read "
                    ".grad (requires_grad_(False) freezes the others)"
                )
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            changed = _changed_groups()
            # It may be another tensor of the script.
            if "modified by an inplace operation" not in str(error) or not changed:
                raise
            raise RuntimeError(
                f"parameters of {changed[0].called} were changed between a forward and its backward"
                ", which needs those of before: call loss.backward() before optimizer.step()"
            ) from error

    return checked

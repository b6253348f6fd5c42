"""Checks around forwards: writes to gathered parameters, parameters in other places, arguments that
a block changes, and attributes that keep memory which is freed: `audit_forwards`.

Values of gathered parameters and attributes of modules are compared in the forwards 1, 2, 4, 8 and
so on, separately with gradients and without, the rest in each forward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup, FSDPParameter
from parallel2d.parallel.fsdp_internals.sharded_model import (
    RunningForward,
    collect_grad_tensors,
    in_backward,
)
from parallel2d.parallel.fsdp_internals.tensors import (
    is_differentiated_forward,
    part_of,
    storage_of,
    version_of,
)
from parallel2d.parallel.model_structure import (
    Places,
    class_name,
    fqn_of,
    held_parameters,
    join_names,
    places_in,
    plain_attributes,
    tensors_in,
)
from parallel2d.parallel.parallelize.gathered import INSTEAD, GatheredParameters
from parallel2d.parallel.weights.whole_tensors import sharded_modules

_MISPLACED = (
    "is not the parameter that parallelize has sharded: torch.func.functional_call(model, values), "
    "load_state_dict(assign=True) after a forward and parameters that are set anew have no effect "
    f"here; {INSTEAD}"
)


def audit_forwards(
    model: nn.Module, gathered: GatheredParameters, averages: bool
) -> list[RemovableHandle]:
    """Installs the checks, and returns the handles of their hooks. ``averages``: whether there are
    several data ranks."""
    audit = _Audit(model, gathered, averages)
    handles = [
        model.register_forward_pre_hook(audit.begin, prepend=True),
        model.register_forward_hook(audit.end),
    ]
    places = places_in(model.modules())
    for each in gathered.groups:
        group = _GroupAudit(each.group, places, audit)
        for module in each.group.modules:
            handles.append(module.register_forward_pre_hook(group.enter, prepend=True))
            handles.append(module.register_forward_pre_hook(group.remember))
            # Before the hook by which `fully_shard` frees the memory.
            handles.append(module.register_forward_hook(group.leave, prepend=True))
    for name, module in sharded_modules(model):
        handles += _ArgumentAudit(module, name).install()
    return handles


class _Audit:
    """The checks of one model."""

    def __init__(self, model: nn.Module, gathered: GatheredParameters, averages: bool) -> None:
        self._model = model
        self._averages = averages
        self._storages = gathered.storages
        self.engine = gathered.engine
        self._begun: Counter[bool] = Counter()
        # True in a forward in which values are compared
        self.compares_values = False
        # The attributes that are managed parameters; those of `ignored` are no `DTensor`s.
        self._managed: dict[nn.Module, list[str]] = {}
        for module in model.modules():
            held = held_parameters(module)
            self._managed[module] = [key for key, each in held if isinstance(each, DTensor)]

    def begin(self, *_: Any) -> None:
        """Before a forward of the model."""
        if in_backward():
            return
        # Before the first forward, in which torch takes over what is there.
        for module, managed in () if self._begun else self._managed.items():
            for attribute in managed:
                found = module._parameters.get(attribute)
                if not (isinstance(found, nn.Parameter) and isinstance(found, DTensor)):
                    raise RuntimeError(f"{self._fqn(module, attribute)} {_MISPLACED}")
        self._begun[torch.is_grad_enabled()] += 1
        number = self._begun[torch.is_grad_enabled()]
        self.compares_values = number & (number - 1) == 0
        # No backward pass has come that could tell the others.
        if self.engine.fault and not self.engine.pending:
            raise RuntimeError(self.engine.fault)

    def end(self, *_: Any) -> None:
        """After a forward: raises RuntimeError for a trained parameter that nothing averages over
        the ranks, and for what keeps the memory of a gathered one, which is freed."""
        trains = torch.is_grad_enabled() and self._averages
        for module in self._model.modules():
            managed = self._managed.get(module, ())
            for attribute, each in held_parameters(module):
                if attribute in managed:
                    continue
                self._refuse_kept(module, attribute, each)
                if trains and each.requires_grad:
                    raise RuntimeError(
                        f"{self._fqn(module, attribute)} was added or unfrozen after parallelize, "
                        "and nothing averages its gradient over the ranks: add it before "
                        "parallelize, trainable"
                    )
            for attribute, value in plain_attributes(module) if self.compares_values else ():
                for held in tensors_in(value):
                    self._refuse_kept(module, attribute, held)
        self.compares_values = False

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


class _GroupAudit:
    """The checks of one group of parameters."""

    def __init__(self, group: FSDPGroup, places: Places, audit: _Audit) -> None:
        self._group = group
        self._audit = audit
        # The (module, attribute) of each occurrence of each parameter
        self._places = [places.get(each.sharded, []) for each in group.parameters]
        self._before: list[tuple[int, int | None, Tensor | None]] = []

    def enter(self, *_: Any) -> None:
        """Before the parameters are gathered."""
        for parameter, places in zip(self._group.parameters, self._places, strict=True):
            expected = (parameter.sharded, parameter.gathered)
            for module, attribute in places if parameter.has_run else ():
                found = module._parameters.get(attribute)
                if not any(found is each for each in expected):
                    raise RuntimeError(f"{parameter.name} {_MISPLACED}")

    def remember(self, *_: Any) -> None:
        """Once they are gathered: takes down what `leave` compares."""
        self._before = [self._state(each) for each in self._group.parameters]

    def _state(self, parameter: FSDPParameter) -> tuple[int, int | None, Tensor | None]:
        whole = parameter.gathered
        assert whole is not None
        values: Tensor | None = None
        local = part_of(whole).detach()
        # Classes of tensors that are gathered in their own way have other values.
        if self._audit.compares_values and type(local) is Tensor:
            # What other ranks hold they compare.
            flat = local.reshape(-1)[parameter.start :][: parameter.local_size.numel()]
            values = flat.clone().view(torch.uint8)
        return version_of(whole), storage_of(whole), values

    def leave(self, *_: Any) -> None:
        """Before they are freed."""
        before, self._before = self._before, []
        for parameter, old in zip(self._group.parameters, before, strict=False):
            if _is_equal(old, self._state(parameter)):
                continue
            message = (
                f"{parameter.name} was written to while it was gathered, in the forward of "
                f"{self._group.called} or before its backward: what is written there is lost, or "
                f"stays on this rank alone; {INSTEAD}"
            )
            engine = self._audit.engine
            if not torch.is_grad_enabled():
                raise RuntimeError(message)
            engine.fault = engine.fault or message


def _is_equal(old: Sequence[Any], new: Sequence[Any]) -> bool:
    both = old[2] is not None and new[2] is not None
    return tuple(old[:2]) == tuple(new[:2]) and (not both or torch.equal(old[2], new[2]))


class _ArgumentAudit:
    """Raises RuntimeError when ``module`` has changed a container that it was given: `fully_shard`
    gives it a copy, so the caller would never see the change; when it leaves its result in an
    object, where no hook finds it; and for a forward-mode derivative that it cannot compute."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._called = name or class_name(module)
        self._running = RunningForward(module)
        # The ids of containers in the arguments of the calls that run
        self._given: list[set[int]] = []
        # The defaultdicts in the arguments of the last one
        self._defaults: list[Any] = []
        # Containers that the last one got, their entries, and whether the caller sees them
        self._received: list[tuple[Any, Any, bool]] = []

    def install(self) -> list[RemovableHandle]:
        module = self._module
        return [
            module.register_forward_pre_hook(self._keep, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(self._receive, with_kwargs=True),
            module.register_forward_hook(self._compare, with_kwargs=True, always_call=True),
        ]

    def _keep(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_differentiated_forward((args, kwargs), self._running.frees):
            raise RuntimeError(
                f"{self._called} was called with a derivative of "
                "torch.autograd.forward_ad, which sharded modules support under torch.no_grad() "
                "alone: use torch.func.jvp(model, (x,), (e,))"
            )
        containers = list(_containers_in([*args, *kwargs.values()]))
        self._given.append(set(map(id, containers)))
        self._defaults = [each for each in containers if isinstance(each, defaultdict)]
        # Torch would fail to copy it.
        if torch.is_grad_enabled() and collect_grad_tensors(self._defaults):
            raise self._defaultdict()

    def _receive(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        own = self._given[-1]
        containers = list(_containers_in([*args, *kwargs.values()]))[1:]
        self._received = [(each, _entries(each), id(each) in own) for each in containers]
        # Torch makes plain dicts of them where it casts.
        if len(self._defaults) > sum(isinstance(each, defaultdict) for each in containers):
            raise self._defaultdict()

    def _defaultdict(self) -> RuntimeError:
        return RuntimeError(
            f"{self._called} was given a defaultdict, of which sharded modules get no copy of its "
            "kind: give a dict, and return the values"
        )

    def _compare(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._given:  # an earlier hook has raised
            return
        self._given.pop()
        received, self._received = self._received, []
        no_result = torch.is_grad_enabled() and not collect_grad_tensors(output)
        changed = list(filter(_holds_result, tree_leaves((args, kwargs)))) if no_result else []
        for container, before, is_seen in received:
            if _entries(container) != before and (no_result or not is_seen):
                changed.append(container)
        if changed:
            raise RuntimeError(
                f"{self._called} changed a {type(changed[0]).__name__} that it was "
                "given, which sharded modules cannot, because they get copies of their arguments "
                "and compute gradients of what they return: return the values instead"
            )


def _values(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return list(container.values())
    if is_dataclass(container):
        return [getattr(container, each.name, None) for each in fields(container)]
    return list(container)


def _entries(container: Any) -> list[Any]:
    """What is in ``container``, by identity. The values are kept, so that no other has their id."""
    keys = list(container) if isinstance(container, dict) else []
    return [keys, [_Same(each) for each in _values(container)]]


class _Same:
    """Equal to what holds the same object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _containers_in(value: Any) -> Iterator[Any]:
    """The containers in ``value`` and in each other, those outside of them first."""
    # Those of which `fully_shard` makes copies where it casts, or where they hold gradients
    is_copied = isinstance(value, list | dict | set)
    is_copied |= is_dataclass(value) and not isinstance(value, type)
    if is_copied:
        yield value
    if is_copied or isinstance(value, tuple):
        yield from chain.from_iterable(map(_containers_in, _values(value)))


def _holds_result(argument: object) -> bool:
    """True if ``argument`` is an object with a tensor that a backward pass may reach."""
    values = vars(argument).values() if hasattr(argument, "__dict__") else ()
    held = [value for value in values if isinstance(value, Tensor)]
    return not isinstance(argument, Tensor) and any(value.requires_grad for value in held)

"""Checks around forwards: `audit_forwards`.

The checks find writes to unsharded parameters, replaced parameters, arguments that a block changes,
and attributes of modules that refer to freed storage. The values of unsharded parameters and the
attributes of modules are checked only in forwards 1, 2, 4, 8 and so on; forwards with and without
gradients are counted separately. The other checks run in each forward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup, FSDPParameter
from parallel2d.parallel.fsdp_internals.sharded_model import (
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
    direct_parameters,
    fqn_of,
    is_dataclass_object,
    join_names,
    places_in,
    plain_attributes,
    tensors_in,
    trained_tensors_in,
    values_in,
)
from parallel2d.parallel.parallelize.unsharded_parameters import INSTEAD, UnshardedParameters
from parallel2d.parallel.weights.unsharded_tensors import sharded_modules

_MISPLACED = (
    "is not the parameter that parallelize has sharded: torch.func.functional_call(model, values), "
    "load_state_dict(assign=True) after a forward and assigned parameters have no effect "
    f"here; {INSTEAD}"
)


def audit_forwards(
    model: nn.Module, gathered: UnshardedParameters, averages: bool, frees: bool
) -> list[RemovableHandle]:
    """Install the checks, and return the handles of their hooks.

    Args:
        model: the model.
        gathered: the unsharded parameters of the model.
        averages: True if there are several data ranks. Then the check raises an error for a trained
            parameter whose gradient is not averaged.
        frees: True if unsharded parameters are freed after forward (``reshard_after_forward``).
    """
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
            # With `prepend` this hook runs before FSDP's post-forward hook, which frees the
            # unsharded parameters: after it their values could not be read.
            handles.append(module.register_forward_hook(group.leave, prepend=True))
    for name, module in sharded_modules(model):
        handles += _ArgumentAudit(module, name, frees).install()
    return handles


class _Audit:
    """The checks of one model."""

    def __init__(self, model: nn.Module, gathered: UnshardedParameters, averages: bool) -> None:
        self._model = model
        self._averages = averages
        self._storages = gathered.storages
        self.engine = gathered.engine
        self._begun: Counter[bool] = Counter()
        # True in a forward that compares values
        self.compares_values = False
        # Names of the parameters that FSDP or `scalars` manages: these are `DTensor`s, and ignored
        # parameters are not.
        self._managed: dict[nn.Module, list[str]] = {}
        for module in model.modules():
            held = direct_parameters(module)
            self._managed[module] = [key for key, each in held if isinstance(each, DTensor)]

    def begin(self, *_: Any) -> None:
        """Run before a forward of the model."""
        if in_backward():
            return
        # FSDP reads the parameters of the modules in its first forward, so check them before it.
        for module, managed in () if self._begun else self._managed.items():
            for attribute in managed:
                found = module._parameters.get(attribute)
                if not (isinstance(found, nn.Parameter) and isinstance(found, DTensor)):
                    raise RuntimeError(f"{self._fqn(module, attribute)} {_MISPLACED}")
        self._begun[torch.is_grad_enabled()] += 1
        number = self._begun[torch.is_grad_enabled()]
        self.compares_values = number & (number - 1) == 0
        # No backward pass has followed the forward with the fault, so no other rank was notified.
        if self.engine.fault and not self.engine.pending:
            raise RuntimeError(self.engine.fault)

    def end(self, *_: Any) -> None:
        """Run after a forward of the model.

        Raises RuntimeError for a trained parameter with a gradient that is not averaged over the
        ranks, and for an attribute that refers to the freed storage of an unsharded parameter.
        """
        trains = torch.is_grad_enabled() and self._averages
        for module in self._model.modules():
            managed = self._managed.get(module, ())
            for attribute, each in direct_parameters(module):
                if attribute in managed:
                    continue
                self._refuse_stale_reference(module, attribute, each)
                if trains and each.requires_grad:
                    raise RuntimeError(
                        f"{self._fqn(module, attribute)} was added or unfrozen after parallelize, "
                        "and its gradient is not averaged over the ranks: add it before "
                        "parallelize, with requires_grad=True"
                    )
            for attribute, value in plain_attributes(module) if self.compares_values else ():
                for held in tensors_in(value):
                    self._refuse_stale_reference(module, attribute, held)
        self.compares_values = False

    def _refuse_stale_reference(self, module: nn.Module, attribute: str, held: Tensor) -> None:
        name = self._storages.get(storage_of(held) or 0)
        if name is not None:
            raise RuntimeError(
                f"{self._fqn(module, attribute)} keeps the unsharded {name} of a forward, "
                "and its memory is freed: keep a clone(), or return it from forward"
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
        """Check that no parameter was replaced. Runs before FSDP's pre-forward hook."""
        for parameter, places in zip(self._group.parameters, self._places, strict=True):
            expected = (parameter.sharded, parameter.gathered)
            for module, attribute in places if parameter.has_run else ():
                found = module._parameters.get(attribute)
                if not any(found is each for each in expected):
                    raise RuntimeError(f"{parameter.name} {_MISPLACED}")

    def remember(self, *_: Any) -> None:
        """Record the state that `leave` compares. Runs after FSDP's pre-forward hook."""
        self._before = list(map(self._state, self._group.parameters))

    def _state(self, parameter: FSDPParameter) -> tuple[int, int | None, Tensor | None]:
        whole = parameter.gathered
        assert whole is not None
        values: Tensor | None = None
        local = part_of(whole).detach()
        # Skip tensor subclasses, because a custom all-gather may change their values.
        if self._audit.compares_values and type(local) is Tensor:
            # Each rank compares only its local shard of the unsharded values.
            flat = local.reshape(-1)[parameter.start :][: parameter.local_size.numel()]
            values = flat.clone().view(torch.uint8)
        return version_of(whole), storage_of(whole), values

    def leave(self, *_: Any) -> None:
        """Find writes since `remember`. Runs before FSDP's post-forward hook."""
        before, self._before = self._before, []
        for parameter, old in zip(self._group.parameters, before, strict=False):
            if _is_equal(old, self._state(parameter)):
                continue
            message = (
                f"{parameter.name} was written to while it was unsharded, in the forward of "
                f"{self._group.called} or before its backward: the write is lost, or stays on this "
                f"rank only; {INSTEAD}"
            )
            engine = self._audit.engine
            if not torch.is_grad_enabled():
                raise RuntimeError(message)
            engine.fault = engine.fault or message


def _is_equal(old: Sequence[Any], new: Sequence[Any]) -> bool:
    both = old[2] is not None and new[2] is not None
    return tuple(old[:2]) == tuple(new[:2]) and (not both or torch.equal(old[2], new[2]))


class _ArgumentAudit:
    """Checks of the arguments of one module.

    Raises RuntimeError in three cases:

    * The module changes a container among its arguments. `fully_shard` passes a copy of the
      container, so the caller would not see the change.
    * The module stores its result in an argument instead of returning it. FSDP sets its backward
      hooks only on returned tensors.
    * An argument has a forward-mode derivative that sharded modules do not support.
    """

    def __init__(self, module: nn.Module, name: str, frees: bool) -> None:
        self._module = module
        self._called = name or class_name(module)
        self._frees = frees
        # Ids of containers in the arguments of the running calls
        self._given: list[set[int]] = []
        # The defaultdicts in the arguments of the last call
        self._defaults: list[Any] = []
        # For each container that the last call received: the container, its entries, and True if it
        # is the object of the caller and not a copy
        self._received: list[tuple[Any, Any, bool]] = []

    def install(self) -> list[RemovableHandle]:
        module = self._module
        return [
            module.register_forward_pre_hook(self._keep, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(self._receive, with_kwargs=True),
            module.register_forward_hook(self._compare, with_kwargs=True, always_call=True),
        ]

    def _keep(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_differentiated_forward((args, kwargs), self._frees):
            raise RuntimeError(
                f"{self._called} was called with a derivative of "
                "torch.autograd.forward_ad, which sharded modules support only under "
                "torch.no_grad(): use torch.func.jvp(model, (x,), (e,))"
            )
        containers = list(_containers_in([*args, *kwargs.values()]))
        self._given.append(set(map(id, containers)))
        self._defaults = [each for each in containers if isinstance(each, defaultdict)]
        # torch raises an unclear error when it copies a defaultdict.
        if torch.is_grad_enabled() and trained_tensors_in(self._defaults):
            raise self._defaultdict()

    def _receive(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        own = self._given[-1]
        containers = list(_containers_in([*args, *kwargs.values()]))[1:]
        self._received = [(each, _entries(each), id(each) in own) for each in containers]
        # torch replaces a defaultdict by a plain dict when it casts tensors.
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
        no_result = torch.is_grad_enabled() and not trained_tensors_in(output)
        changed = list(filter(_holds_result, tree_leaves((args, kwargs)))) if no_result else []
        for container, before, is_seen in received:
            if _entries(container) != before and (no_result or not is_seen):
                changed.append(container)
        if changed:
            raise RuntimeError(
                f"{self._called} changed a {type(changed[0]).__name__} of its "
                "arguments, which sharded modules cannot do, because they get copies of their "
                "arguments and compute gradients of their outputs: return the values instead"
            )


def _entries(container: Any) -> list[Any]:
    """Return the entries of ``container``, which compare by identity.

    The result keeps the entries alive.
    """
    keys = list(container) if isinstance(container, dict) else []
    return [keys, list(map(_Same, values_in(container)))]


class _Same:
    """A wrapper that is equal to wrappers of the same object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _containers_in(value: Any) -> Iterator[Any]:
    """Yield the containers in ``value``, recursively, outer containers first."""
    # `fully_shard` copies these containers when it casts tensors in them or replaces tensors that
    # require grad.
    is_copied = isinstance(value, list | dict | set) or is_dataclass_object(value)
    if is_copied:
        yield value
    if is_copied or isinstance(value, tuple):
        yield from chain.from_iterable(map(_containers_in, values_in(value)))


def _holds_result(argument: object) -> bool:
    """Return True if ``argument`` is an object with a tensor attribute that requires grad."""
    if isinstance(argument, Tensor) or not hasattr(argument, "__dict__"):
        return False
    return any(isinstance(each, Tensor) and each.requires_grad for each in vars(argument).values())

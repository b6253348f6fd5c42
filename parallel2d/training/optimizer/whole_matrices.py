"""`whole_matrices` runs a custom optimizer on unsharded tensors.

[Note: an optimizer that sees whole tensors] Each parameter group (with ``split=True`` each
parameter) is assigned to one rank, its owner. In a step the owner receives the unsharded parameters
and gradients, and an optimizer of the user's class updates the parameters on the owner. Every rank
then receives its shard of the new values; see [Note: one owner per matrix] in `matrix_owners.py`.
Between steps, only the owners have the state of the class. During a save, and after a load, all
ranks have the state in ``WholeMatrices.state`` instead. In ``WholeMatrices.state``, state with the
shape of its parameter is sharded like the parameter, and all other state is equal on all ranks. The
next step moves the state back to the owners.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.sync.engine.replica_reducer import update_mesh_of
from parallel2d.parallel.sync.methods.method import needs_closure
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.parallel.weights.named_tensors import SCALARS
from parallel2d.parallel.weights.states import TensorEntry
from parallel2d.training.optimizer.matrix_owners import MatrixOwners, MatrixRound

_EMPTY = "an empty list"  # stands for an empty list in saved state
Tensors = Mapping[int, Tensor]  # by number of a parameter or of a sent tensor


def whole_matrices(
    optimizer_class: type[torch.optim.Optimizer],
    parameters: Iterable[Any],
    *,
    split: bool = False,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """Return an optimizer that updates sharded parameters as ``optimizer_class(parameters,
    **arguments)`` would in one process. ``step``, ``state_dict`` and every function that saves its
    state are collective.

    Args:
        optimizer_class: class of the optimizer. It receives unsharded tensors, which have values
            and gradients only during ``step``.
        parameters: the parameters of a parallelized model, or groups of them.
        split: False: each group has one owner, so that the class may combine the parameters of a
            group. True: the parameters of a group may have different owners, for classes that
            update each parameter independently.
        arguments: passed to ``optimizer_class``.

    Raises `ConfigError` for parameters on different meshes, for a class with a ``step`` that needs
    a closure, and during a save for state other than tensors, numbers and lists of these.
    """
    kind = type(optimizer_class.__name__, (WholeMatrices,), {})  # checkpoints store the class name
    return kind(optimizer_class, _mapped(parameters, updated_as), split, arguments)


# Number of the parameter and key -> state
_State = dict[tuple[int, str], Any]


class WholeMatrices(torch.optim.Optimizer):
    """Runs the steps of a user's optimizer class on unsharded tensors; see
    [Note: an optimizer that sees whole tensors]."""

    def __init__(self, optimizer_class: Any, given: Any, split: bool, arguments: Any) -> None:
        if needs_closure(optimizer_class):
            raise ConfigError(
                "whole_matrices(...) does not take a class whose step needs a closure"
            )
        real: dict[nn.Parameter, Tensor] = {}

        def place_of(parameter: Tensor) -> nn.Parameter:
            # A placeholder for the parameter: it has the parameter's shape, but the memory of one
            # element. Its value is NaN, so that an accidental computation with it is noticed.
            value = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
            whole = nn.Parameter(value.expand(parameter.shape), parameter.requires_grad)
            whole.grad_dtype = None  # gradients may have any dtype
            real[whole] = parameter
            return whole

        self._inner = optimizer_class(_mapped(given, place_of), **arguments)
        self._inner_groups = list(self._inner.param_groups)
        # For each group, the settings that the class has changed in a step
        self._changed: list[set[str]] = [set() for _ in self._inner_groups]
        # Number of a parameter, in the order of the groups -> the parameter that the class sees
        self._wholes: dict[int, nn.Parameter] = {}
        # For each parameter; parameters with equal entries have the same owner
        sets: list[int] = []
        groups = []
        for group in self._inner_groups:
            groups.append({**group, "params": [real[whole] for whole in group["params"]]})
            self._wholes |= enumerate(group["params"], start=len(self._wholes))
            sets += [len(groups) - 1] * len(group["params"])
        super().__init__(groups, self._inner.defaults)
        self._parameters = {number: real[whole] for number, whole in self._wholes.items()}
        self._mesh = update_mesh_of(self._parameters.values())
        self._owners = MatrixOwners(self._mesh)
        sets = list(range(len(sets))) if split else sets
        costs = [0.0] * (max(sets) + 1)
        for each, parameter in zip(sets, self._parameters.values(), strict=True):
            costs[each] += parameter.nbytes
        assigned = self._owners.assign(costs)
        self._owner_of = [assigned[each] for each in sets]
        self._rounds = self._plan(self._parameters, self._owner_of)
        # Numbers of the parameters with gradients -> their rounds
        self._gradient_rounds: dict[tuple[int, ...], list[MatrixRound]] = {}
        self._keep_own()

    def _keep_own(self) -> None:
        """Remove the parameters of other owners from the class, so that it has and updates only the
        parameters that this rank owns."""
        for number in list(self._wholes):
            if not self._owners.is_own(self._owner_of[number]):
                self._inner.state.pop(self._wholes.pop(number), None)
        own = set(self._wholes.values())
        for group in self._inner_groups:
            group["params"] = [whole for whole in group["params"] if whole in own]
        self._inner.param_groups = [group for group in self._inner_groups if group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once. Collective; every rank must have gradients of the same parameters."""
        loss = None
        if closure is not None:
            loss = torch.enable_grad()(closure)()
        self._collect_state()
        self._step()
        return loss

    def _step(self) -> None:
        gradients = {}
        for number, parameter in self._parameters.items():
            if parameter.grad is not None:
                gradients[number] = parameter.grad
        numbers = tuple(gradients)
        if numbers not in self._gradient_rounds:
            self._gradient_rounds = {numbers: self._plan(gradients, self._owner_of)}
        for number, value in _gather(self._rounds, self._parameters).items():
            self._wholes[number].data = value
        for number, value in _gather(self._gradient_rounds[numbers], gradients).items():
            self._wholes[number].grad = value
        self._step_own()
        _scatter(self._rounds, self._wholes, self._parameters)
        for whole in self._wholes.values():
            whole.grad = None
            whole.data = whole.new_empty(()).expand(whole.shape)

    def _step_own(self) -> None:
        """Run a step of the user's class for the parameters that this rank owns."""
        if len(self.param_groups) != len(self._inner_groups):
            raise ConfigError(
                "whole_matrices takes all parameter groups at once; later groups cannot be added"
            )
        for inner, group in zip(self._inner_groups, self.param_groups, strict=True):
            inner.update(_settings(group))
        if self._wholes:
            self._inner.step()
        # Only owners know the settings that the class has changed; `spread_state` sends them.
        groups = zip(self._inner_groups, self.param_groups, self._changed, strict=True)
        for inner, group, changed in groups:
            for key, value in _settings(inner).items():
                if isinstance(value, SCALARS) and value != group.get(key):
                    changed.add(key)
            group.update(_settings(inner))

    def _plan(self, tensors: Tensors, owners: Sequence[int]) -> list[MatrixRound]:
        """Return the rounds that send ``tensors``. Each dtype has separate rounds."""
        rounds = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            sent = {}
            for number, each in tensors.items():
                if each.dtype == dtype:
                    sent[number] = each
            rounds += self._owners.plan(sent, owners, dtype)
        return rounds

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any optimizer does, with sharded tensors. Collective."""
        self.spread_state()
        return super().state_dict()

    @torch.no_grad()
    def spread_state(self) -> None:
        """Move the owners' state to ``self.state``, and send the settings that the class has
        changed to all ranks. Collective."""
        # Reading the state of a parameter may have created an empty entry, so `any` tests the
        # values.
        if any(self.state.values()):
            return
        own, found, unknown = self._take_own_state()
        settings: dict[int, dict[str, Any]] = {}
        for number, inner in enumerate(self._inner_groups):
            if inner["params"]:
                # The current values are sent, because a scheduler may have changed them after the
                # step.
                present = self.param_groups[number]
                settings[number] = {key: present[key] for key in self._changed[number]}
        # State that cannot be saved must raise an error on every rank. If a rank raised the error
        # here, the other ranks would wait in the all-gather below. Therefore the rank sends the
        # names of this state, and all ranks raise the error afterwards.
        found = {} if unknown else found
        for group in self._mesh.get_all_groups() if self._mesh else ():
            for of_rank in all_gather((found, settings, unknown), group):
                found |= of_rank[0]
                settings |= of_rank[1]
                unknown |= of_rank[2]
        if unknown:
            raise ConfigError(
                f"whole_matrices: {', '.join(sorted(unknown))} in the optimizer's state cannot be "
                "saved: for each parameter there may be tensors, numbers and lists of these"
            )
        for number, plain in settings.items():
            self.param_groups[number].update(plain)
        self._put_state(own, found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as any optimizer does. No communication."""
        self.forget_state(self._parameters.values())
        super().load_state_dict(state_dict)

    def forget_state(self, parameters: Iterable[Tensor]) -> None:
        """Delete the state that the class has for ``parameters``."""
        dropped = set(map(id, parameters))
        for number, whole in self._wholes.items():
            if id(self._parameters[number]) in dropped:
                self._inner.state.pop(whole, None)

    def _take_own_state(self) -> tuple[_State, _State, set[str]]:
        """Remove the state of the class, and return three values: this state, the same state with
        shapes in place of tensors, and the keys of state that cannot be saved."""
        own: _State = {}
        for number, whole in self._wholes.items():
            for key, value in _without_lists(self._inner.state.pop(whole, {})):
                own[number, key] = value
        unknown = set(map(str, self._inner.state))
        found: _State = {}
        for place, value in own.items():
            found[place] = value
            if isinstance(value, Tensor) and value.ndim:
                found[place] = TensorEntry(value.shape, value.dtype)
            elif not isinstance(value, Tensor | int | float | None) and value != _EMPTY:
                unknown.add(place[1])
        return own, found, unknown

    def _put_state(self, own: _State, found: _State) -> None:
        """Fill ``self.state`` with the entries ``found`` of all owners. ``own``: the values that
        this rank has."""
        sources: dict[int, Tensor] = {}
        targets: dict[int, Tensor] = {}
        owners: list[int] = []
        for number, key in sorted(found):
            parameter, entry = self._parameters[number], found[number, key]
            value: Any = own.get((number, key), entry)
            if isinstance(entry, TensorEntry):
                sources[len(owners)] = value
                value = torch.empty(entry.shape, dtype=entry.dtype, device=parameter.device)
                if entry.shape == parameter.shape:
                    value = torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
                targets[len(owners)] = value
                owners.append(self._owner_of[number])
            self.state[parameter][key] = value
        _scatter(self._plan(targets, owners), sources, targets)

    def _collect_state(self) -> None:
        """Move ``self.state`` to the class on the owners. Collective."""
        places: list[tuple[int, str]] = []
        sharded: dict[int, Tensor] = {}
        for number, parameter in self._parameters.items():
            for key, value in self.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    sharded[len(places)] = value
                places.append((number, key))
        owners = []
        for number, _ in places:
            owners.append(self._owner_of[number])
        wholes = _gather(self._plan(sharded, owners), sharded)
        for number, whole in self._wholes.items():
            if self.state.get(self._parameters[number]):
                self._inner.state[whole] = {}
        for index, (number, key) in enumerate(places):
            if number in self._wholes:
                value = self.state[self._parameters[number]][key]
                entries = self._inner.state[self._wholes[number]]
                _put(entries, key, wholes.get(index, value))
        self.state.clear()


def _mapped(given: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to each tensor of an optimizer's first argument: tensors, pairs of name
    and tensor, or groups of these."""
    if isinstance(given, Tensor):
        return function(given)
    if isinstance(given, Mapping):
        return {**given, "params": _mapped(given["params"], function)}
    if isinstance(given, tuple) and isinstance(given[0], str):
        return given[0], function(given[1])
    found = []
    for each in given:
        found.append(_mapped(each, function))
    return found


def _gather(rounds: Sequence[MatrixRound], tensors: Tensors) -> dict[int, Tensor]:
    """Return the unsharded ``tensors`` that this rank owns. Collective."""
    wholes: dict[int, Tensor] = {}
    for each in rounds:
        sent = [matrix.number for matrix in each.matrices if each.is_sent(matrix)]
        wholes |= each.gather({number: local_part(tensors[number].detach()) for number in sent})
    return wholes


def _scatter(rounds: Sequence[MatrixRound], wholes: Tensors, targets: Tensors) -> None:
    """Fill this rank's shards of ``targets`` from ``wholes``, the unsharded tensors of the owners.
    Collective."""
    for each in rounds:
        for batch in each.batches:
            for number, part in each.scatter(batch, wholes).items():
                local_part(targets[number].detach()).copy_(part)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _without_lists(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a parameter's state. The elements of a list, such as ``Q`` of SOAP, are
    separate entries ``Q[0]``, ``Q[1]``; an empty list is represented by a string."""
    for key, value in entries.items():
        places = {key: value}
        if isinstance(value, list | tuple) and value:
            places = {}
            for index, each in enumerate(value):
                places[f"{key}[{index}]"] = each
        for place, each in places.items():
            yield place, _EMPTY if isinstance(each, list) and not each else each


def _put(entries: dict[str, Any], key: str, value: Any) -> None:
    """Add an entry from `_without_lists` to a parameter's state."""
    # A string stands for an empty list. The string is recognized by its type, because
    # `load_state_dict` copies the string.
    value = [] if isinstance(value, str) else value
    listed = re.fullmatch(r"(.+)\[(\d+)\]", key)
    if listed is None:
        entries[key] = value
        return
    places = entries.setdefault(listed[1], [])
    # The entries may come in any order.
    places.extend([None] * (int(listed[2]) + 1 - len(places)))
    places[int(listed[2])] = value

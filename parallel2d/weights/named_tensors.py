"""Tensors of a model and of its optimizer by FQN, the same on every rank and layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel2d.model_structure import fqn_of, join_names, updated_as
from parallel2d.weights.kept import kept_values
from parallel2d.weights.optimizer_settings import plain_settings

_Value = TypeVar("_Value")

SCALARS = (bool, int, float, str)


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters (after a forward without backward), so that every parameter is the
    sharded one again."""
    for module in model.modules():
        # `reshard` is not recursive: each module frees the parameters of its own group.
        if isinstance(module, FSDPModule):
            module.reshard()


def by_fqn(named: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
    """What ``named_parameters()`` and its like list, without what wrappers add to the names."""
    return {fqn_of(name): value for name, value in named}


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """FQN -> parameter; a shared one once, under its first name."""
    return by_fqn(model.named_parameters())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> what is saved and loaded: a parameter, or what is kept in its place
    (`parallel2d.weights.kept`), or a persistent buffer. A shared one is listed once, under its
    first name."""
    found: dict[str, Tensor] = {**parameters_by_name(model), **kept_values(model)}
    transient = _transient_buffers(model)
    for name, buffer in model.named_buffers():
        if name in transient:
            continue
        found[fqn_of(name)] = buffer
    return found


def _transient_buffers(model: nn.Module) -> set[str]:
    """Names of buffers that were registered with ``persistent=False``, which no state dict has."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        # torch has no public name for this set.
        for name in module._non_persistent_buffers_set:
            names.add(join_names(prefix, name))
    return names


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further FQNs of shared parameters -> the name they are stored under."""
    first: dict[int, str] = {}
    for name, parameter in parameters_by_name(model).items():
        first[id(parameter)] = name
    further: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        called = fqn_of(name)
        stored_as = first[id(parameter)]
        # Its first name is the one it is stored under.
        if called == stored_as:
            continue
        further[called] = stored_as
    return further


def updated_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """FQN -> what an optimizer updates: the parameter, or the part of it that this
    replica owns."""
    return {name: updated_as(value) for name, value in parameters_by_name(model).items()}


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """FQN -> parameter, or the part of it that the optimizer has, for those that it
    steps; in the model's order."""
    stepped: set[int] = set()
    for group in optimizer.param_groups:
        stepped.update(map(id, group["params"]))
    found: dict[str, Tensor] = {}
    # The order of the groups may differ between runs; that of the model does not.
    for name, updated in updated_by_name(model).items():
        if id(updated) in stepped:
            found[name] = updated
    return found


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``<key>/<parameter>`` -> optimizer state that is a tensor. Empty before the first step."""
    found: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(model, optimizer).items():
        # `get`, because looking up in the state of an optimizer creates an entry.
        entries = optimizer.state.get(parameter, {})
        # Sorted, so that every rank lists them in one order, restored or not.
        for key, value in sorted(entries.items()):
            # Anything else, such as a count of steps, is in `describe_optimizer`.
            if not isinstance(value, Tensor):
                continue
            found[f"{key}/{name}"] = value
    return found


def describe_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The manifest's part: class, parameter groups by name with their settings, and state that is
    not tensors."""
    trained = trained_parameters(model, optimizer)
    names: dict[int, str] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in trained.items():
        names[id(parameter)] = name
        entries = optimizer.state.get(parameter, {})
        numbers = _scalars(entries)
        if numbers:
            scalars[name] = numbers
    groups = []
    for group in optimizer.param_groups:
        groups.append(_described_group(group, names))
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "scalars": scalars,
    }


def _described_group(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """A parameter group with its parameters by name; ``names``: of the model's, by id."""
    settings: dict[str, Any] = {}
    for key, value in plain_settings(group).items():
        # What a manifest cannot hold, such as a tensor of several values, is omitted.
        if _is_plain(value):
            settings[key] = value
    parameters = []
    for parameter in group["params"]:
        # An optimizer may hold parameters that are not in this model.
        if id(parameter) not in names:
            continue
        parameters.append(names[id(parameter)])
    return {"settings": settings, "parameters": parameters}


def _scalars(entries: dict[str, Any]) -> dict[str, Any]:
    """Those of a parameter's optimizer state that are no tensors, such as a count of steps."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        # Tensors are in `optimizer_tensors`; nothing else is saved.
        if not isinstance(value, SCALARS):
            continue
        found[key] = value
    return found


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is made of None, scalars, and lists and tuples of them."""
    if value is None:
        return True
    # Such as the betas of Adam.
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, SCALARS)

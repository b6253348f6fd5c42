"""Settings of an optimizer's parameter groups (lr, betas, weight decay): `match_settings` finds
those of a stored state for the groups of an optimizer, `put_settings` sets them.

How a step is computed (``fused``, ``foreach``) and by which class is not taken from a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

# How a step is computed, which may differ between a state and the optimizer that loads it.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
# torch's schedulers add them to groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
_NOT_OF_A_CLASS = _IMPLEMENTATION | _OF_SCHEDULERS | {"params", "param_names"}

Settings = dict[str, Any]
# For each group of a state: its settings and the names of its parameters.
Stored = Sequence[tuple[Settings, Sequence[str]]]


def plain_settings(group: Mapping[str, Any]) -> Settings:
    """The settings of a parameter group, an lr that is a tensor as a number."""
    plain = dict(group)
    plain.pop("params", None)
    # An lr is a tensor where a step is compiled or captured in a CUDA graph.
    for key, value in plain.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            plain[key] = value.item()
    return plain


def match_settings(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], stored: Stored
) -> tuple[list[Settings], list[str]]:
    """For each group of ``optimizer`` the settings that a state gives its parameters ({} where it
    has none of them), and what is wrong.

    ``names``: of the parameters in each group of ``optimizer``.
    """
    matched: list[Settings] = []
    problems: list[str] = []
    for group, given in _pairs(optimizer, names, stored):
        # Parameters that the state does not have keep their settings.
        if not given:
            matched.append({})
            continue
        # A setting that this class of optimizer does not have would stay in the group unused.
        wanted = _of_class(group) | _OF_SCHEDULERS
        settings = {key: value for key, value in given[0].items() if key in wanted}
        # Parameters of several stored groups can share a group only if their settings are equal.
        for other in given[1:]:
            problems += _contradictions(settings, other)
        problems += _wrong_kinds(settings, group)
        matched.append(settings)
    # Several groups may have the same problem, which is listed once.
    return matched, list(dict.fromkeys(problems))


def _contradictions(settings: Settings, other: Settings) -> Iterator[str]:
    for key, value in settings.items():
        # A setting that the other group does not have contradicts nothing.
        other_value = other.get(key, value)
        if other_value != value:
            yield (
                f"its groups have {key}={value!r:.30} and {key}={other_value!r:.30} for parameters "
                "that are one group here (settings=False keeps those here)"
            )


def _wrong_kinds(settings: Settings, group: Mapping[str, Any]) -> Iterator[str]:
    """One line for each of ``settings`` that is no number, or no list, where ``group`` has one."""
    for key, value in settings.items():
        current = group.get(key)
        if isinstance(current, tuple):
            # Such as betas; a state that has been JSON has lists.
            kind = f"list of {len(current)}"
            fits = isinstance(value, tuple | list) and len(value) == len(current)
        elif isinstance(current, Number | Tensor):
            kind = "number"
            fits = isinstance(value, Number)
        else:
            # None, a word, or no such setting here: nothing to compare the kind with.
            continue
        if not fits:
            yield f"its {key} is {value!r:.60}, no {kind}"


def other_class(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], stored: Stored
) -> list[str]:
    """One line if the state's groups have settings of another class of optimizer. A setting that
    one version of torch has and another has not is none."""
    for group, given in _pairs(optimizer, names, stored):
        own = _of_class(group)
        own_class = type(optimizer).__name__
        for settings in given:
            foreign = settings.keys() - own - _NOT_OF_A_CLASS
            missing = own - settings.keys()
            # Versions of one class differ in one direction: the newer has a setting more.
            if foreign and missing:
                it_has = ", ".join(sorted(foreign))
                here_has = ", ".join(sorted(missing))
                return [
                    f"its optimizer is of another class: it has {it_has}, and {own_class} here has "
                    f"{here_has}"
                ]
    return []


def _pairs(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], stored: Stored
) -> Iterator[tuple[dict[str, Any], list[Settings]]]:
    """Each group here, with the settings of the state's groups that hold its parameters."""
    # Name of a parameter -> index of its group in the state.
    index_of: dict[str, int] = {}
    for index, (_, listed) in enumerate(stored):
        index_of |= dict.fromkeys(listed, index)
    for group, listed in zip(optimizer.param_groups, names, strict=True):
        indices = [index_of[name] for name in listed if name in index_of]
        # Each once, in the order of the parameters here: the first group decides.
        distinct = list(dict.fromkeys(indices))
        given = [stored[index][0] for index in distinct]
        yield group, given


def _of_class(group: Mapping[str, Any]) -> set[str]:
    """The settings by which one class of optimizer differs from another."""
    return set(group) - _NOT_OF_A_CLASS


def put_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Gives each group of ``optimizer`` its settings; a tensor stays the same tensor, with the new
    value."""
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        for key, value in given.items():
            current = group.get(key)
            # A compiled step or a CUDA graph reads the lr from this very tensor.
            if isinstance(current, Tensor):
                current.fill_(value)
            elif isinstance(current, tuple):
                # The manifest of a checkpoint is JSON, which has lists only.
                group[key] = tuple(value)
            else:
                group[key] = value

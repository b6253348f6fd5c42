"""Settings of an optimizer's parameter groups (lr, betas, weight decay).

`match_settings` finds the settings in a saved state for each group of an optimizer, and
`put_settings` applies the found settings. The class of the optimizer and the implementation of its
step (``fused``, ``foreach``) are never taken from a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

# Settings that choose the implementation of a step. These settings may differ between a state and
# an optimizer.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
# Keys that torch's schedulers add to groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
_NOT_OF_A_CLASS = _IMPLEMENTATION | _OF_SCHEDULERS | {"params", "param_names"}

Settings = dict[str, Any]
# For each group of a state: its settings and the names of its parameters.
Stored = Sequence[tuple[Settings, Sequence[str]]]


def plain_settings(group: Mapping[str, Any]) -> Settings:
    """Return the settings of a parameter group. A tensor with one value becomes a number."""
    plain = dict(group)
    plain.pop("params", None)
    # The lr is a tensor if a step is compiled or captured in a CUDA graph.
    for key, value in plain.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            plain[key] = value.item()
    return plain


def match_settings(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    stored: Stored,
    *,
    wanted: bool = True,
    check_class: bool = False,
    same_class: bool = True,
) -> tuple[list[Settings], list[str]]:
    """Return the stored settings for each group of ``optimizer``, and a list of problems.

    The settings are {} for a group whose parameters are not in the state.

    Args:
        optimizer: the optimizer that loads the state.
        names: names of the parameters in each group of ``optimizer``.
        stored: the groups of the state.
        wanted: False to return only the step counters of a group.
        check_class: True to report settings of another optimizer class as a problem.
        same_class: True if the state is of the class of ``optimizer``; then its step counters are
            returned too.
    """
    index_of: dict[str, int] = {}
    for index, (_, listed) in enumerate(stored):
        index_of |= dict.fromkeys(listed, index)
    matched: list[Settings] = []
    problems: list[str] = []
    for number, (group, listed) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        indices = []
        for name in listed:
            if name in index_of:
                indices.append(index_of[name])
        # A group without parameters matches the stored group at its index.
        if not listed and len(stored) == len(names) and not stored[number][1]:
            indices = [number]
        # Parameters of one group may be in several stored groups. The settings of the first are
        # used, and `_problems` reports differences.
        given = []
        for index in dict.fromkeys(indices):
            given.append(stored[index][0])
        own = set(group) - _NOT_OF_A_CLASS
        for settings in given if check_class else ():
            problems += _other_class(optimizer, own, settings)
            problems += _other_dtype(group, settings)
        first = given[0] if given else {}
        # Ignore settings that only another optimizer class has.
        keys = own | _OF_SCHEDULERS if wanted else set[str]()
        if same_class:
            keys |= _counters(first, group)
        matched.append({key: value for key, value in first.items() if key in keys})
        problems += _problems(matched[-1], given[1:], group)
    # Several groups may have the same problem, which is listed once.
    return matched, list(dict.fromkeys(problems))


def _counters(settings: Settings, group: Mapping[str, Any]) -> set[str]:
    """Return the keys of step counters in ``settings``.

    Some optimizers add such keys to their groups in the first step, so a new ``group`` lacks them.
    """
    return {"step"} | (settings.keys() - set(group) - _NOT_OF_A_CLASS)


def _other_class(
    optimizer: torch.optim.Optimizer, own: set[str], settings: Settings
) -> Iterator[str]:
    foreign = settings.keys() - own - _NOT_OF_A_CLASS
    missing = own - settings.keys()
    # If only one side has additional settings, it may be a newer version of the same class.
    if foreign and missing:
        yield (
            f"its optimizer is of another class: it has {', '.join(sorted(foreign))}, and "
            f"{type(optimizer).__name__} here has {', '.join(sorted(missing))}"
        )


def _other_dtype(group: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    there, here = settings.get("state_dtype"), group.get("state_dtype")
    if there is not None and here is not None and there != here:
        yield f"its optimizer has state_dtype={there}, this one {here}"


def _problems(
    settings: Settings, others: Sequence[Settings], group: Mapping[str, Any]
) -> Iterator[str]:
    """Yield reasons why ``settings`` cannot be the settings of ``group``.

    ``others`` are the settings of further stored groups that contain parameters of ``group``.
    """
    for key, value in settings.items():
        for other in others:
            # A setting that the other group lacks is not a contradiction.
            if other.get(key, value) != value:
                yield (
                    f"its groups have {key}={value!r:.30} and {key}={other[key]!r:.30} for "
                    "parameters that are one group here (settings=False keeps the current ones)"
                )
        current = group.get(key)
        if isinstance(current, tuple):
            # For example betas; a state from JSON has lists instead of tuples.
            if not isinstance(value, tuple | list) or len(value) != len(current):
                yield f"its {key} is {value!r:.60}, not a list of {len(current)}"
        elif isinstance(current, Number | Tensor) and not isinstance(value, Number):
            yield f"its {key} is {value!r:.60}, not a number"


def put_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set the settings of each group of ``optimizer``.

    A tensor stays the same object and is filled with the new value.
    """
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        for key, value in given.items():
            current = group.get(key)
            # A compiled step or a CUDA graph reads the lr from this tensor object.
            if isinstance(current, Tensor):
                current.fill_(value)
            elif isinstance(current, tuple):
                # A checkpoint's manifest is JSON, which has only lists.
                group[key] = tuple(value)
            else:
                group[key] = value

"""The settings of an optimizer's parameter groups (lr, betas, weight decay): those of a state given
to the groups that are here.

The groups of a state, with parameters by canonical name, and an optimizer flow in; the settings for
each of its groups flow out, and from there into the optimizer. How a step is computed (``fused``,
``foreach``) and by which class stays as it is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

_HOW = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
# torch's schedulers add them to groups
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
_NOT_OF_A_CLASS = _HOW | _OF_SCHEDULERS | {"params", "param_names"}

Settings = dict[str, Any]
# of each group of a state: its settings and the names of its parameters
Stored = Sequence[tuple[Settings, Sequence[str]]]


def plain_settings(group: Mapping[str, Any]) -> Settings:
    """The settings of a parameter group, an lr that is a tensor as a number."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    return {key: plain(value) for key, value in group.items() if key != "params"}


def match_settings(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], stored: Stored
) -> tuple[list[Settings], list[str]]:
    """For each group of ``optimizer`` the settings that a state gives its parameters ({} where it
    knows none of them), and what is wrong.

    ``names``: of the parameters in each group of ``optimizer``.
    """
    found: list[Settings] = []
    problems: list[str] = []
    for group, given in _pairs(optimizer, names, stored):
        wanted = _own(group) | _OF_SCHEDULERS
        chosen = {key: value for key, value in (given[0] if given else {}).items() if key in wanted}
        problems += [
            f"its groups have {key}={value!r:.30} and {key}={other[key]!r:.30} for parameters "
            "that are one group here "
            "(settings=False keeps those here)"
            for other in given[1:]
            for key, value in chosen.items()
            if key in other and other[key] != value
        ]
        problems += [
            f"its {key} is {value!r:.60}, no "
            f"{'list' if isinstance(group.get(key), tuple) else 'number'}"
            for key, value in chosen.items()
            if (isinstance(group.get(key), Number | Tensor) and not isinstance(value, Number))
            or (isinstance(group.get(key), tuple) and not isinstance(value, tuple | list))
        ]
        found.append(chosen)
    return found, list(dict.fromkeys(problems))


def other_class(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], stored: Stored
) -> list[str]:
    """One line if the state's groups have settings of another class of optimizer. A setting that
    one version of torch has and another has not is none."""
    for group, given in _pairs(optimizer, names, stored):
        for settings in given:
            own = _own(group)
            foreign, missing = settings.keys() - own - _NOT_OF_A_CLASS, own - settings.keys()
            if foreign and missing:
                here = f"{type(optimizer).__name__} here has {', '.join(sorted(missing))}"
                return [
                    f"its optimizer is of another class: it has {', '.join(sorted(foreign))}, and "
                    f"{here}"
                ]
    return []


def _pairs(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], stored: Stored
) -> Iterator[tuple[dict[str, Any], list[Settings]]]:
    """Each group here, with the settings of the state's groups that hold its parameters."""
    of = {name: number for number, (_, listed) in enumerate(stored) for name in listed}
    for group, listed in zip(optimizer.param_groups, names, strict=True):
        yield (
            group,
            [
                stored[number][0]
                for number in dict.fromkeys(of[name] for name in listed if name in of)
            ],
        )


def _own(group: Mapping[str, Any]) -> set[str]:
    return set(group) - _NOT_OF_A_CLASS


def put_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Gives each group of ``optimizer`` its settings; a tensor stays the same tensor, with the new
    value."""
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        for key, value in given.items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value

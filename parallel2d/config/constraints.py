"""Checks each field of a configuration against its own constraint, the one given to `option`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from parallel2d.errors import did_you_mean

_BOUNDS = {"minimum": "at least {}", "above": "above {}", "maximum": "at most {}"}


def field_problems(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields one line per field of a tree of dataclasses that breaks its own constraint."""
    for item in fields(config):
        value = getattr(config, item.name)
        key = prefix + item.name
        # "???" is OmegaConf's mark of a value that must be given.
        if is_dataclass(value):
            yield from field_problems(value, key + ".")
        elif value is None and item.metadata.get("null"):
            continue
        elif value == "???":
            yield f"{key} is required and was not given"
        elif _has_infinite(value) and not item.metadata.get("infinite"):
            yield f"{key}={value} must be finite"
        elif "choices" in item.metadata:
            yield from choice_problems(key, value, item.metadata["choices"])
        elif item.metadata.keys() & _BOUNDS.keys():
            yield from _bound_problems(key, value, item.metadata)


def choice_problems(key: str, value: object, choices: tuple[str, ...]) -> Iterator[str]:
    """Yields a line when ``value`` is none of ``choices``."""
    if value not in choices:
        near = did_you_mean(value, choices, alike=0.5)
        yield f"{key}={value} is not one of {', '.join(choices)}{near}"


def _has_infinite(value: Any) -> bool:
    """Whether a number, or one in a list, is infinite or not a number."""
    # Such as betas; lists may hold anything, further lists included.
    if isinstance(value, list | tuple):
        return any(map(_has_infinite, value))
    # Whole numbers of Python are never infinite, and may be too large for a float.
    if not isinstance(value, float):
        return False
    return not math.isfinite(value)


def bounds(constraint: Mapping[str, Any]) -> str:
    """What a number with this constraint may be: ``at least 0 and at most 1``; empty for any."""
    named = [text.format(constraint[name]) for name, text in _BOUNDS.items() if name in constraint]
    return " and ".join(named)


def _bound_problems(key: str, value: Any, constraint: Mapping[str, Any]) -> Iterator[str]:
    auto = constraint.get("auto", False)
    if auto and value == "auto":
        return
    allowed = bounds(constraint)
    kinds: Any = (int, float)
    if auto:
        # A key that also takes `auto` counts something, unless it says otherwise.
        if not constraint.get("fractions"):
            kinds = int
            allowed = f"a whole number of {allowed}"
        allowed += ", or auto"
    # To Python a boolean is an integer.
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not _is_within(value, constraint):
        yield f"{key}={value} must be {allowed}"


def _is_within(value: float, constraint: Mapping[str, Any]) -> bool:
    # Written so that NaN, for which every comparison is false, is within no bounds.
    at_least = value >= constraint.get("minimum", -math.inf)
    above = "above" not in constraint or value > constraint["above"]
    at_most = value <= constraint.get("maximum", math.inf)
    return at_least and above and at_most

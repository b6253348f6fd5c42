"""A field of a configuration with its help text and its constraint: `option`. `field_problems`
checks every field of a tree of dataclasses against its own constraint."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any

from parallel2d.base.config.reference import is_reference
from parallel2d.base.errors import ConfigError, did_you_mean, nearest

REQUIRED = "???"  # OmegaConf's mark of a value that must be given
_BOUNDS = {"minimum": "at least {}", "above": "above {}", "maximum": "at most {}"}
# Keys that are gone -> what to use instead. A value that is gone stands at its field.
_UNPLANNED = "the planner has no use for it; write the file again with preflight --write"
GONE_KEYS = {
    "cluster.device.group_overhead_us": _UNPLANNED,
    "cluster.device.wait_overhead_us": _UNPLANNED,
    **{f"cluster.device.coding_gb_per_s.{wire}": _UNPLANNED for wire in ("bf16", "int8", "int4")},
    "cluster.device.peak_tflops.fp8": "the planner prices no products in 8-bit floats",
    "cluster.node_mtbf_hours": "the planner predicts a step, and a run measures its goodput",
    "plan.efficiency": "cluster.device.efficiency says it",
    "plan.save_s": "the planner predicts a step, and a run measures its goodput",
    "plan.restart_s": "the planner predicts a step, and a run measures its goodput",
    "plan.pictures": "python -m parallel2d.plan prints a table, and plan.json=FILE has its numbers",
    "plan.sync_loss": "name a method: sync=every_step, or sync=diloco for a slow network",
}


def option(default: Any, text: str = "", **constraint: Any) -> Any:
    """A dataclass field. ``text`` explains it: the first sentence in ``--help``, all of it in the
    documentation. Its annotation says whether it may be ``None`` or the word ``auto``.

    Constraints: ``choices`` (tuple), ``minimum``, ``above``, ``maximum`` (numbers), ``between``
    (minimum and maximum), ``infinite=True`` (infinity is allowed), ``reference=True`` (a callable,
    or ``package.module:name``). ``read_by``: the values of the section's ``name``, or of its field
    ``of``, with which the field has an effect. ``needs``: the field of the section that must be
    given for it. ``gone``: {a former value: what to use instead}.
    """
    if "between" in constraint:
        constraint["minimum"], constraint["maximum"] = constraint.pop("between")
    metadata = {"text": text, **constraint}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(item: Field[Any]) -> Any:
    """The value that the field has when nobody sets it."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def field_problems(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields one line per field of a tree of dataclasses that breaks its own constraint, or that is
    set and not read."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from field_problems(value, f"{prefix}{item.name}.")
            continue
        own = list(_value_problems(f"{prefix}{item.name}", value, item))
        yield from own or _unread_problems(config, item, prefix)


def _value_problems(key: str, value: Any, item: Field[Any]) -> Iterator[str]:
    kinds = str(item.type).split(" | ")
    constraint = item.metadata
    if value == REQUIRED:
        yield f"{key} is required and was not given"
    elif value is None and not {"None", "Any"}.isdisjoint(kinds):
        return
    elif _has_infinite(value) and not constraint.get("infinite"):
        yield f"{key}={value} must be finite"
    elif value in list(constraint.get("gone", ())):
        yield gone(key, value, constraint)
    else:
        yield from _constraint_problems(key, value, constraint, kinds)


def _constraint_problems(
    key: str, value: Any, constraint: Mapping[str, Any], kinds: Collection[str]
) -> Iterator[str]:
    is_named = callable(value) or is_reference(value)
    if constraint.get("reference") and not is_named:
        yield f"{key}={value} must have the form package.module:name"
    elif "choices" in constraint:
        yield from choice_problems(key, value, constraint["choices"], "None" in kinds)
    elif constraint.keys() & _BOUNDS.keys():
        yield from _bound_problems(key, value, constraint, kinds)


def _unread_problems(config: Any, item: Field[Any], prefix: str) -> Iterator[str]:
    """Yields a line for a field that is set although what it belongs to does not read it."""
    value = getattr(config, item.name)
    if value == default_of(item):
        return
    section = prefix.rstrip(".")
    shown = str(value).lower() if isinstance(value, bool) else value
    has_no_effect = f"{prefix}{item.name}={shown} has no effect"
    needed = item.metadata.get("needs")
    if needed is not None and getattr(config, needed) == getattr(type(config)(), needed):
        yield f"{has_no_effect} without {prefix}{needed}"
    if not is_read(config, item):
        of = item.metadata.get("of", "name")
        # A section of the top is chosen by its own word: sync=diloco.
        is_group = of == "name" and "." not in section
        chosen = section if is_group else f"{prefix}{of}"
        readers = ", ".join(item.metadata["read_by"])
        yield f"{has_no_effect} with {chosen}={getattr(config, of)}, only with {readers}"


def is_read(config: Any, item: Field[Any]) -> bool:
    """Whether the field has an effect with what the other fields of ``config`` choose. True where
    that is an unknown word, which has a line of its own."""
    if "read_by" not in item.metadata:
        return True
    of = item.metadata.get("of", "name")
    chosen = getattr(config, of)
    (choosing,) = [other for other in fields(config) if other.name == of]
    is_known = chosen in choosing.metadata.get("choices", ())
    return not is_known or chosen in item.metadata["read_by"]


def gone(key: str, value: str, constraint: Mapping[str, Any]) -> str:
    """What is said of a former ``value`` of ``key``."""
    return f"{key}={value} is gone: {constraint['gone'][value]}"


def choice_problems(
    key: str, value: object, choices: Collection[Any], null: bool = False
) -> Iterator[str]:
    """Yields a line when ``value`` is none of ``choices``. ``null``: it may also be None, which is
    said."""
    if value not in choices:
        allowed = ", ".join(map(str, choices)) + (", or null" if null else "")
        near = did_you_mean(value, choices, alike=0.5)
        yield f"{key}={value} is not one of {allowed}{near}"


def refuse_unknown(given: Collection[str], where: str, known: Collection[str]) -> None:
    """Raises `ConfigError` with one line per name that is ``given`` and that ``where``, which takes
    the ``known`` ones, does not have."""
    problems = []
    for name in given:
        near = nearest(name, known)
        hint = f"; it has {', '.join(known)}" if near is None else f"; did you mean {near}?"
        problems.append(f"{where} has no option {name}{hint}")
    if problems:
        raise ConfigError("\n".join(problems))


def _has_infinite(value: Any) -> bool:
    """Whether a number, or one in a list, is infinite or not a number."""
    # Such as betas; lists may hold anything, further lists included.
    if isinstance(value, list | tuple):
        return any(map(_has_infinite, value))
    # Whole numbers of Python are never infinite, and may be too large for a float.
    return isinstance(value, float) and not math.isfinite(value)


def bounds(constraint: Mapping[str, Any]) -> str:
    """What a number with this constraint may be: ``at least 0 and at most 1``; empty for any."""
    named = [text.format(constraint[name]) for name, text in _BOUNDS.items() if name in constraint]
    return " and ".join(named)


def _bound_problems(
    key: str, value: Any, constraint: Mapping[str, Any], kinds: Collection[str]
) -> Iterator[str]:
    allowed = bounds(constraint)
    numbers: Any = (int, float)
    if "str" in kinds:
        if value == "auto":
            return
        if "float" not in kinds:
            numbers = int
            allowed = f"a whole number of {allowed}"
        allowed += ", or auto"
    if "None" in kinds:
        allowed += ", or null"
    # To Python a boolean is an integer.
    is_number = isinstance(value, numbers) and not isinstance(value, bool)
    if not is_number or not _is_within(value, constraint):
        yield f"{key}={value} must be {allowed}"


def _is_within(value: float, constraint: Mapping[str, Any]) -> bool:
    # Written so that NaN, for which every comparison is false, is within no bounds.
    at_least = value >= constraint.get("minimum", -math.inf)
    above = "above" not in constraint or value > constraint["above"]
    at_most = value <= constraint.get("maximum", math.inf)
    return at_least and above and at_most

"""Dataclass fields with a help text and a constraint: `option`. `field_problems` checks every field
of nested dataclasses."""

from __future__ import annotations

import math
import operator
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any

from omegaconf import ListConfig

from parallel2d.base.errors import ConfigError, did_you_mean

REQUIRED = "???"  # OmegaConf's mark of a required value
# Each comparison is false for NaN, so NaN violates every bound.
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "min": ("at least {}", operator.ge),
    "above": ("above {}", operator.gt),
    "max": ("at most {}", operator.le),
}
# Annotation of a field -> name of its values, and their types
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "str": ("text", (str, os.PathLike)),
    "None": ("null", (type(None),)),
    "Any": ("anything", (object,)),
    "list": ("a list [a,b]", (list, tuple, ListConfig)),
    "dict": ("a mapping {a: b}", (Mapping,)),
}


def option(default: Any, text: str = "", **constraint: Any) -> Any:
    """Return a dataclass field with help text and constraint. The annotation of the field decides
    whether ``None`` or a word such as ``auto`` is valid.

    Args:
        default: value of the field if it is not set.
        text: description. ``--help`` shows its first sentence, the documentation the full text.
        choices: tuple of the valid values.
        min, above, max, between: bounds of a number; ``between`` is (min, max).
        infinite: True if infinity is valid.
        reference: True if the value is a callable or ``package.module:name``.
        read_by: values of the section's ``name`` with which the field has an effect.
        of: the field that ``read_by`` refers to instead of ``name``.
        words: valid words in place of a number; default ``auto``.
        required_by: values of ``name`` that require the field.
        needs: another field of the section that must be set too.
    """
    if "between" in constraint:
        constraint["min"], constraint["max"] = constraint.pop("between")
    metadata = {"text": text, **constraint}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(item: Field[Any]) -> Any:
    """Return the default value of the field."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def field_problems(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield one line per field that violates its constraint, is set without effect, or is required
    and not set."""
    for item in fields(config):
        value = getattr(config, item.name)
        key = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from field_problems(value, f"{key}.")
            continue
        own = value_problem(key, value, item)
        required_by = item.metadata.get("required_by", ())
        if own:
            yield own
        elif required_by and not value and config.name in required_by:
            chosen = _chosen(config, "name", prefix)
            yield f"{key} is required with {chosen}: {item.metadata['text']}"
        elif value != default_of(item):
            yield from _unread_problems(config, item, prefix)


def value_problem(key: str, value: Any, item: Field[Any]) -> str | None:
    """Return the message for a ``value`` that violates the constraint of its field, or None.
    Other fields are not considered."""
    constraint = item.metadata
    if value == REQUIRED:
        return f"{key} is required and was not given"
    if value is None and "None" in _kinds(item):
        return None
    # Integers of Python are never infinite, and may be too large for a float.
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    if is_infinite and not constraint.get("infinite"):
        return f"{key}={value} must be finite"
    if "choices" in constraint:
        return choice_problem(key, value, constraint["choices"], "None" in _kinds(item))
    return None if _fits(value, item) else f"{key}={as_override(value)} must be {allowed(item)}"


def _kinds(item: Field[Any]) -> list[str]:
    """Return the names of the field's types: ``list`` and ``None`` for ``list[int] | None``."""
    kinds: list[str] = []
    for kind in str(item.type).split(" | "):
        kinds.append(kind.partition("[")[0])
    return kinds


def _words(item: Field[Any]) -> tuple[str, ...]:
    """Return the words that a field with bounds accepts in addition to numbers."""
    words: tuple[str, ...] = item.metadata.get("words", ("auto",))
    return words


def _types(kind: str) -> tuple[str, tuple[type, ...]]:
    """Return the name of values of the ``kind``, and their types. A dataclass is its own name."""
    return _KINDS.get(kind, (kind, ()))


def _fits(value: Any, item: Field[Any]) -> bool:
    kinds, limits = _kinds(item), _limits(item.metadata)
    if value is not None and item.metadata.get("reference"):
        return callable(value) or is_reference(value)
    if limits and isinstance(value, str):
        return value in _words(item) and "str" in kinds
    # A bool is an int in Python.
    if isinstance(value, bool) and {"bool", "Any"}.isdisjoint(kinds):
        return False
    is_of_kind = any(isinstance(value, _types(kind)[1]) for kind in kinds)
    return is_of_kind and all(holds(value, limit) for _, holds, limit in limits)


def allowed(item: Field[Any]) -> str:
    """Return the constraint as text. For ``int | str`` with ``min=1`` and the word ``auto``:
    ``a whole number, at least 1, or auto``."""
    kinds, limits = _kinds(item), _limits(item.metadata)
    choices = list(map(str, item.metadata.get("choices", ())))
    if choices:
        return _either([*choices, "null"] if "None" in kinds else choices)
    parts = []
    if limits:
        parts.append(" and ".join(text.format(limit) for text, _, limit in limits))
    if item.metadata.get("infinite"):
        parts.append("or inf")
    if limits and "str" in kinds:
        kinds.remove("str")
        for word in _words(item):
            parts.append(f"or {word}")
    # "a whole number" is omitted, because "a number" includes it.
    if "float" in kinds and "int" in kinds:
        kinds.remove("int")
    names = {}
    for kind in kinds:
        names[kind] = _types(kind)[0]
    if item.metadata.get("reference"):
        names[kinds[0]] = "package.module:name"
    return ", ".join([_either(list(names.values())), *parts])


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _limits(constraint: Mapping[str, Any]) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
    limits: list[tuple[str, Callable[[Any, Any], bool], Any]] = []
    for name in _BOUNDS:
        if name in constraint:
            limits.append((*_BOUNDS[name], constraint[name]))
    return limits


def _unread_problems(config: Any, item: Field[Any], prefix: str) -> Iterator[str]:
    """Yield a line for a field that is set although the chosen value of ``name`` ignores it."""
    value = getattr(config, item.name)
    has_no_effect = f"{prefix}{item.name}={as_override(value)} has no effect"
    needed = item.metadata.get("needs")
    if needed is not None and getattr(config, needed) == getattr(type(config)(), needed):
        yield f"{has_no_effect} without {prefix}{needed}"
    if not is_read(config, item):
        chosen = _chosen(config, item.metadata.get("of", "name"), prefix)
        yield f"{has_no_effect} with {chosen}, only with {', '.join(item.metadata['read_by'])}"


def _chosen(config: Any, field_name: str, prefix: str) -> str:
    """Return the override that sets the field: ``sync=diloco`` or ``sync.wire=int4``."""
    key = f"{prefix}{field_name}"
    # The ``name`` of a top-level section is set by the name of the section, as in sync=diloco.
    if field_name == "name" and prefix.count(".") == 1:
        key = prefix.rstrip(".")
    return f"{key}={getattr(config, field_name)}"


def is_read(config: Any, item: Field[Any]) -> bool:
    """True if the field has an effect with the other fields of ``config``. Also True if the
    deciding field has an unknown value, because another check reports this value."""
    if "read_by" not in item.metadata:
        return True
    of = item.metadata.get("of", "name")
    chosen = getattr(config, of)
    is_known = chosen in config.__dataclass_fields__[of].metadata.get("choices", ())
    return not is_known or chosen in item.metadata["read_by"]


def choice_problem(
    key: str, value: object, choices: Collection[Any], null: bool = False
) -> str | None:
    """Return the message for a ``value`` that is not one of ``choices``, or None. ``null``: None is
    valid too."""
    if value in choices:
        return None
    allowed = ", ".join(map(str, choices)) + (", or null" if null else "")
    near = did_you_mean(value, choices, alike=0.5)
    return f"{key}={value} is not one of {allowed}{near}"


def as_override(value: Any) -> str:
    """Format a value as on a command line: ``null``, ``true``, ``[a,b]``, ``{a: b}``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, dict):
        inside = []
        for key, each in value.items():
            inside.append(f"{key}: {as_override(each)}")
        return f"{{{', '.join(inside)}}}"
    return str(value)


def is_reference(value: Any) -> bool:
    """True if ``value`` has the form ``package.module:name``."""
    if not isinstance(value, str):
        return False
    module, colon, name = value.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return bool(colon) and all(map(str.isidentifier, parts))


def load_reference(key: str, reference: str) -> Any:
    """Import the callable ``package.module:name``. Modules of the current folder are found after
    all installed modules.

    Args:
        key: the configuration key, for the error message.
        reference: the name of the callable.

    Raises:
        ConfigError: with the reason, if the callable cannot be imported.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        found: Any = pkgutil.resolve_name(reference)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={reference} cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigError(f"{key}={reference} is not callable")
    return found


def call_reference(key: str, reference: str, *given: Any, **arguments: Any) -> Any:
    """Import and call the function ``reference``. Raises `ConfigError` if it cannot be imported or
    raises an exception."""
    function = load_reference(key, reference)
    try:
        return function(*given, **arguments)
    except Exception as error:
        what = f"{key}={reference} with arguments {arguments}"
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error

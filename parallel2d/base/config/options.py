"""A field of a configuration with its help text and its constraint: `option`. `field_problems`
checks every field of a tree of dataclasses against its own constraint."""

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

REQUIRED = "???"  # OmegaConf's mark of a value that must be given
# Each comparison is false for NaN, which is so within no bounds.
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "min": ("at least {}", operator.ge),
    "above": ("above {}", operator.gt),
    "max": ("at most {}", operator.le),
}
# By the annotation of a field: what its values are called, and their types.
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
    """A dataclass field. ``text`` explains it: the first sentence in ``--help``, all of it in the
    documentation. Its annotation says whether it may be ``None`` or the word ``auto``.

    Constraints: ``choices`` (tuple), ``min``, ``above``, ``max`` (numbers), ``between``
    (min and max), ``infinite=True`` (infinity is allowed), ``reference=True`` (a callable,
    or ``package.module:name``). ``read_by``: the values of the section's ``name``, or of its field
    ``of``, with which the field has an effect. ``words``: those that a number may be instead;
    default ``auto``. ``required_by``: those of ``name`` with which it
    must be given. ``needs``: the field of the section that must be given for it.
    """
    if "between" in constraint:
        constraint["min"], constraint["max"] = constraint.pop("between")
    metadata = {"text": text, **constraint}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(item: Field[Any]) -> Any:
    """The value that the field has when nobody sets it."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def field_problems(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields one line per field that breaks its own constraint, is set and not read, or is not set
    and required."""
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
    """What is wrong with a ``value`` of the field, whatever the others hold; None for nothing."""
    constraint = item.metadata
    if value == REQUIRED:
        return f"{key} is required and was not given"
    if value is None and "None" in _kinds(item):
        return None
    # Whole numbers of Python are never infinite, and may be too large for a float.
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    if is_infinite and not constraint.get("infinite"):
        return f"{key}={value} must be finite"
    if "choices" in constraint:
        return choice_problem(key, value, constraint["choices"], "None" in _kinds(item))
    return None if _fits(value, item) else f"{key}={as_override(value)} must be {allowed(item)}"


def _kinds(item: Field[Any]) -> list[str]:
    """Of ``list[int] | None`` ``list`` and ``None``."""
    return [kind.partition("[")[0] for kind in str(item.type).split(" | ")]


def _words(item: Field[Any]) -> tuple[str, ...]:
    """What a field with limits may be next to a number."""
    words: tuple[str, ...] = item.metadata.get("words", ("auto",))
    return words


def _types(kind: str) -> tuple[str, tuple[type, ...]]:
    """What values of the kind are called, and their types; a dataclass stands for itself."""
    return _KINDS.get(kind, (kind, ()))


def _fits(value: Any, item: Field[Any]) -> bool:
    kinds, limits = _kinds(item), _limits(item.metadata)
    if value is not None and item.metadata.get("reference"):
        return callable(value) or is_reference(value)
    if limits and isinstance(value, str):
        return value in _words(item) and "str" in kinds
    # To Python a boolean is an integer.
    if isinstance(value, bool) and {"bool", "Any"}.isdisjoint(kinds):
        return False
    is_of_kind = any(isinstance(value, _types(kind)[1]) for kind in kinds)
    return is_of_kind and all(holds(value, limit) for _, holds, limit in limits)


def allowed(item: Field[Any]) -> str:
    """What the field may be: of ``int | str`` with ``min=1`` ``a whole number, at least 1, or
    auto``."""
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
        parts += [f"or {word}" for word in _words(item)]
    # A number may be written as a whole one.
    if "float" in kinds and "int" in kinds:
        kinds.remove("int")
    names = {kind: _types(kind)[0] for kind in kinds}
    if item.metadata.get("reference"):
        names[kinds[0]] = "package.module:name"
    return ", ".join([_either(list(names.values())), *parts])


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _limits(constraint: Mapping[str, Any]) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
    return [(*_BOUNDS[name], constraint[name]) for name in _BOUNDS if name in constraint]


def _unread_problems(config: Any, item: Field[Any], prefix: str) -> Iterator[str]:
    """Yields a line for a field that is set although what it belongs to does not read it."""
    value = getattr(config, item.name)
    has_no_effect = f"{prefix}{item.name}={as_override(value)} has no effect"
    needed = item.metadata.get("needs")
    if needed is not None and getattr(config, needed) == getattr(type(config)(), needed):
        yield f"{has_no_effect} without {prefix}{needed}"
    if not is_read(config, item):
        chosen = _chosen(config, item.metadata.get("of", "name"), prefix)
        yield f"{has_no_effect} with {chosen}, only with {', '.join(item.metadata['read_by'])}"


def _chosen(config: Any, field_name: str, prefix: str) -> str:
    """The word that sets the field: ``sync=diloco`` or ``sync.wire=int4``."""
    key = f"{prefix}{field_name}"
    # A section of the top is chosen by its own word.
    if field_name == "name" and prefix.count(".") == 1:
        key = prefix.rstrip(".")
    return f"{key}={getattr(config, field_name)}"


def is_read(config: Any, item: Field[Any]) -> bool:
    """Whether the field has an effect with what the other fields of ``config`` choose. True where
    that is an unknown word, which has a line of its own."""
    if "read_by" not in item.metadata:
        return True
    of = item.metadata.get("of", "name")
    chosen = getattr(config, of)
    is_known = chosen in config.__dataclass_fields__[of].metadata.get("choices", ())
    return not is_known or chosen in item.metadata["read_by"]


def choice_problem(
    key: str, value: object, choices: Collection[Any], null: bool = False
) -> str | None:
    """Says that a ``value`` is none of ``choices``; None for one. ``null``: None is allowed too."""
    if value in choices:
        return None
    allowed = ", ".join(map(str, choices)) + (", or null" if null else "")
    near = did_you_mean(value, choices, alike=0.5)
    return f"{key}={value} is not one of {allowed}{near}"


def as_override(value: Any) -> str:
    """A value as it is written on a command line: ``null``, ``true``, ``[a,b]``, ``{a: b}``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, dict):
        inside = [f"{key}: {as_override(each)}" for key, each in value.items()]
        return f"{{{', '.join(inside)}}}"
    return str(value)


def is_reference(value: Any) -> bool:
    """Whether it has the form ``package.module:name``."""
    if not isinstance(value, str):
        return False
    module, colon, name = value.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


def load_reference(key: str, reference: str) -> Any:
    """The callable that ``package.module:name`` names; ``key``, of the configuration, is for the
    message. Raises `ConfigError` with the reason when it cannot be imported.

    Modules of the current folder are found, after all that is installed."""
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
    """Calls what ``reference`` names. Raises `ConfigError` as `load_reference`, or if it raises."""
    function = load_reference(key, reference)
    try:
        return function(*given, **arguments)
    except Exception as error:
        what = f"{key}={reference} with arguments {arguments}"
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error

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

from parallel2d.base.errors import ConfigError, did_you_mean

REQUIRED = "???"  # OmegaConf's mark of a value that must be given
# Each comparison is false for NaN, which is so within no bounds.
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "min": ("at least {}", operator.ge),
    "above": ("above {}", operator.gt),
    "max": ("at most {}", operator.le),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "None": "null",
    "Any": "anything",
    "list": "a list [a,b]",
    "dict": "a mapping {a: b}",
}
# Keys that are gone -> what to use instead. A value that is gone stands at its field.
_UNPLANNED = "the planner has no use for it; write the file again with preflight --write"
_MEASURED = "the planner predicts a step, and a run measures its goodput"
_IMAGES = "use data=custom data.target=images:build, with examples/ on PYTHONPATH"
_ADAFACTOR = "optimizer.arguments has the settings of optimizer=custom"
GONE_KEYS = {
    "model.loss": "train.loss says it, for any model",
    "data.image_size": _IMAGES,
    "data.channels": _IMAGES,
    "optimizer.beta2_decay": _ADAFACTOR,
    "optimizer.clip_threshold": _ADAFACTOR,
    "cluster.device.group_overhead_us": _UNPLANNED,
    "cluster.device.wait_overhead_us": _UNPLANNED,
    **{f"cluster.device.coding_gb_per_s.{wire}": _UNPLANNED for wire in ("bf16", "int8", "int4")},
    "cluster.device.peak_tflops.fp8": "the planner prices no products in 8-bit floats",
    "cluster.node_mtbf_hours": _MEASURED,
    "plan.efficiency": "cluster.device.efficiency says it",
    "plan.save_s": _MEASURED,
    "plan.restart_s": _MEASURED,
    "plan.pictures": "python -m parallel2d.plan prints a table, and plan.json=FILE has its numbers",
    "plan.sync_loss": "name a method: sync=every_step, or sync=diloco for a slow network",
}


def option(default: Any, text: str = "", **constraint: Any) -> Any:
    """A dataclass field. ``text`` explains it: the first sentence in ``--help``, all of it in the
    documentation. Its annotation says whether it may be ``None`` or the word ``auto``.

    Constraints: ``choices`` (tuple), ``min``, ``above``, ``max`` (numbers), ``between``
    (min and max), ``infinite=True`` (infinity is allowed), ``reference=True`` (a callable,
    or ``package.module:name``). ``read_by``: the values of the section's ``name``, or of its field
    ``of``, with which the field has an effect. ``needs``: the field of the section that must be
    given for it. ``gone``: {a former value: what to use instead}.
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
    """Yields one line per field that breaks its own constraint, or is set and not read."""
    for item in fields(config):
        value = getattr(config, item.name)
        key = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from field_problems(value, f"{key}.")
            continue
        own = value_problem(key, value, item)
        if own:
            yield own
        elif value != default_of(item):
            yield from _unread_problems(config, item, prefix)


def value_problem(key: str, value: Any, item: Field[Any]) -> str | None:
    """What is wrong with a ``value`` of the field, whatever the others hold; None for nothing."""
    constraint = item.metadata
    kinds = str(item.type).split(" | ")
    if value == REQUIRED:
        return f"{key} is required and was not given"
    if value is None and not {"None", "Any"}.isdisjoint(kinds):
        return None
    if _has_infinite(value) and not constraint.get("infinite"):
        return f"{key}={value} must be finite"
    # A list, because values such as mappings cannot be looked up in a dictionary.
    if value in list(constraint.get("gone", ())):
        return gone(key, value, constraint)
    if constraint.get("reference") and not (callable(value) or is_reference(value)):
        return f"{key}={value} must have the form package.module:name"
    if "choices" in constraint:
        return choice_problem(key, value, constraint["choices"], "None" in kinds)
    if constraint.keys() & _BOUNDS.keys():
        return _bound_problem(key, value, constraint, kinds)
    return None


def _has_infinite(value: Any) -> bool:
    """Whether a number, or one in a list, is infinite or not a number."""
    # Such as betas; lists may hold anything, further lists included.
    if isinstance(value, list | tuple):
        return any(map(_has_infinite, value))
    # Whole numbers of Python are never infinite, and may be too large for a float.
    return isinstance(value, float) and not math.isfinite(value)


def _bound_problem(
    key: str, value: Any, constraint: Mapping[str, Any], kinds: Collection[str]
) -> str | None:
    wanted = _bounds(constraint)
    numbers: Any = (int, float)
    if "str" in kinds:
        if value == "auto":
            return None
        if "float" not in kinds:
            numbers = int
            wanted = f"a whole number of {wanted}"
        wanted += ", or auto"
    if "None" in kinds:
        wanted += ", or null"
    # To Python a boolean is an integer.
    is_number = isinstance(value, numbers) and not isinstance(value, bool)
    limits = _limits(constraint)
    if is_number and all(holds(value, limit) for _, holds, limit in limits):
        return None
    return f"{key}={value} must be {wanted}"


def allowed(item: Field[Any]) -> str:
    """What the field may be: of ``int | str`` with ``min=1`` ``a whole number, at least 1, or
    auto``."""
    kinds = [kind.partition("[")[0] for kind in str(item.type).split(" | ")]
    choices = list(map(str, item.metadata.get("choices", ())))
    if choices:
        return _either([*choices, "null"] if "None" in kinds else choices)
    parts = list(filter(None, [_bounds(item.metadata)]))
    if item.metadata.get("infinite"):
        parts.append("or inf")
    if parts and "str" in kinds:
        kinds.remove("str")
        parts.append("or auto")
    # A number may be written as a whole one.
    if "float" in kinds and "int" in kinds:
        kinds.remove("int")
    return ", ".join([_either(list(map(_KINDS.__getitem__, kinds))), *parts])


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _bounds(constraint: Mapping[str, Any]) -> str:
    """Such as ``at least 0 and at most 1``; empty for any number."""
    return " and ".join(text.format(limit) for text, _, limit in _limits(constraint))


def _limits(constraint: Mapping[str, Any]) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
    return [(*_BOUNDS[name], constraint[name]) for name in _BOUNDS if name in constraint]


def _unread_problems(config: Any, item: Field[Any], prefix: str) -> Iterator[str]:
    """Yields a line for a field that is set although what it belongs to does not read it."""
    value = getattr(config, item.name)
    has_no_effect = f"{prefix}{item.name}={as_word(value)} has no effect"
    needed = item.metadata.get("needs")
    if needed is not None and getattr(config, needed) == getattr(type(config)(), needed):
        yield f"{has_no_effect} without {prefix}{needed}"
    if not is_read(config, item):
        of = item.metadata.get("of", "name")
        chosen = f"{prefix}{of}"
        # A section of the top is chosen by its own word: sync=diloco.
        if of == "name" and prefix.count(".") == 1:
            chosen = prefix.rstrip(".")
        readers = ", ".join(item.metadata["read_by"])
        yield f"{has_no_effect} with {chosen}={getattr(config, of)}, only with {readers}"


def is_read(config: Any, item: Field[Any]) -> bool:
    """Whether the field has an effect with what the other fields of ``config`` choose. True where
    that is an unknown word, which has a line of its own."""
    if "read_by" not in item.metadata:
        return True
    of = item.metadata.get("of", "name")
    chosen = getattr(config, of)
    is_known = chosen in config.__dataclass_fields__[of].metadata.get("choices", ())
    return not is_known or chosen in item.metadata["read_by"]


def gone(key: str, value: str, constraint: Mapping[str, Any]) -> str:
    """What is said of a former ``value`` of ``key``."""
    return f"{key}={value} is gone: {constraint['gone'][value]}"


def choice_problem(
    key: str, value: object, choices: Collection[Any], null: bool = False
) -> str | None:
    """Says that a ``value`` is none of ``choices``; None for one. ``null``: None is allowed too."""
    if value in choices:
        return None
    allowed = ", ".join(map(str, choices)) + (", or null" if null else "")
    near = did_you_mean(value, choices, alike=0.5)
    return f"{key}={value} is not one of {allowed}{near}"


def as_word(value: Any) -> str:
    """A value as it is written on a command line: ``null``, ``true``, ``[a,b]``, ``{a: b}``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, dict):
        inside = [f"{key}: {as_word(each)}" for key, each in value.items()]
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
    except ImportError as error:
        raise ConfigError(f"{key}={reference} cannot be imported: {error}") from None
    except AttributeError:
        module_name, _, name = reference.partition(":")
        raise ConfigError(f"{key}={reference}: module {module_name} has no {name}") from None
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

"""Which words of a command line are wrong, and why: `explain`.

Hydra stops at the first wrong word, and with a message about its own parts. Here each word is tried
on its own, and each wrong one gets a line with the key, the value, what is allowed and the nearest
valid choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel2d.config import other_frameworks
from parallel2d.config.search_path import choices_by_group, initialized
from parallel2d.config.serialization import dotted_keys, first_line, other_models
from parallel2d.errors import did_you_mean, nearest

# What a value must be, by the class of OmegaConf's node for it.
_EXPECTED = {
    "IntegerNode": "a whole number",
    "FloatNode": "a number",
    "BooleanNode": "true or false",
    "StringNode": "text",
    "UnionNode": "a whole number or auto",
    "ListConfig": "a list [a,b]",
    "DictConfig": "a mapping {a: b}",
}


@dataclass
class _Words:
    """What the words of a command line are, after each was read on its own."""

    wrong: list[str] = field(default_factory=list)  # lines for people
    choices: list[str] = field(default_factory=list)  # of config groups, each of which exists
    values: list[tuple[str, Any]] = field(default_factory=list)  # of keys, not tried yet


def explain(words: Sequence[str], error: Exception) -> str:
    """One line per wrong word; the first lines of ``error`` where no single word is wrong."""
    arguments = get_args_parser().parse_args(list(words))
    if arguments.config_path:
        return first_line(error)  # all files are in another place
    name = arguments.config_name or "train"
    with initialized(arguments.config_dir) as hydra_instance:
        loader = hydra_instance.config_loader
        groups = choices_by_group(loader)
        read = _read(arguments.overrides, loader, groups)
        try:
            base = compose(name, overrides=read.choices)
        # Such as +strategy=ddp, which no single word shows, or a wrong value in one's own file.
        except (HydraException, OmegaConfBaseException, ValueError):
            return "\n".join(read.wrong) or first_line(error)
        keys = dotted_keys(base)
        tried = [_try_value(base, keys, groups, word, override) for word, override in read.values]
    return "\n".join([*read.wrong, *filter(None, tried)]) or first_line(error)


def _read(words: Sequence[str], loader: Any, groups: Mapping[str, Sequence[str]]) -> _Words:
    found = _Words()
    for word in words:
        # Each word on its own: Hydra's parser stops at the first that it cannot read.
        try:
            override = OverridesParser.create(loader).parse_override(word)
        except HydraException as wrong:
            found.wrong.append(_unreadable(word, wrong))
            continue
        key = str(override.key_or_group)
        if key in groups:
            _check_choices(key, override, groups[key], found)
            continue
        # Hydra's own keys are checked by Hydra. Several values are one for each job of a sweep,
        # and each job is checked when it is composed.
        if key.startswith("hydra") or override.is_sweep_override():
            continue
        found.values.append((word, override))
    return found


def _unreadable(word: str, error: HydraException) -> str:
    # The first line names the character; the others draw it.
    reason = str(error).splitlines()[0]
    advice = "write key=value, and quote special characters"
    # Quoting does not help in a plan, whose patterns Hydra reads as lists and mappings.
    if word.lstrip("+").startswith("model.tensor_plan="):
        advice = (
            "patterns may hold * ? and [abc] here; others go in a YAML file or come from "
            "package.module:function"
        )
    return f"{word} cannot be read ({reason}); {advice}"


def _check_choices(group: str, override: Any, allowed: Sequence[str], found: _Words) -> None:
    """Sorts the choices of a config group in those that exist and those that do not."""
    if override.is_delete():
        choices = [str(override.value())]
    elif override.is_sweep_override():
        choices = [part.strip() for part in str(override.get_value_string()).split(",")]
    else:
        choices = [str(override.get_value_string())]
    for choice in choices:
        if choice not in allowed:
            found.wrong.append(_unknown_choice(group, choice, allowed))
            continue
        # The keys of a choice are needed to check the values; of a sweep, any choice has them.
        if not override.is_sweep_override():
            found.choices.append(f"{group}={choice}")


def _unknown_choice(group: str, choice: str, allowed: Sequence[str]) -> str:
    line = f"{group}={choice} is not one of {', '.join(allowed)}"
    if group == "strategy":
        answer = other_frameworks.strategy_answer(choice)
        if answer is not None:
            return f"{line}; {answer}"
    return line + _near(choice, allowed)


def _try_value(
    base: DictConfig, keys: list[str], groups: Iterable[str], word: str, override: Any
) -> str | None:
    """What is wrong with ``word``, which sets a key; None for nothing."""
    key = override.key_or_group
    # ~key: Hydra removes keys, and the schema has no place for a missing one.
    if override.is_delete():
        return f"{word}: keys cannot be removed, only set"
    if key not in keys:
        return _unknown_key(key, word, keys, groups)
    # model=llama sets a group, optimizer=3 would replace all keys below it.
    node = OmegaConf.select(base, key, throw_on_missing=False)
    if OmegaConf.is_dict(node) and not isinstance(override.value(), dict):
        inside = ", ".join(k for k in keys if k.startswith(key + "."))
        return f"{word}: {key} is a group of keys, not a value; set one of {inside}"
    try:
        trial = base.copy()
        OmegaConf.update(trial, key, override.value(), merge=True)
        OmegaConf.resolve(trial)
    except OmegaConfBaseException:
        expected = _EXPECTED.get(type(_node(base, key)).__name__, "of another type")
        return f"{key}={override.value()} must be {expected}"
    return None


def _unknown_key(key: str, word: str, keys: list[str], groups: Iterable[str]) -> str:
    line = f"unknown key {key} (given as {word})"
    instead = other_frameworks.answer(key) or other_models(key, keys)
    if instead is not None:
        return f"{line}: {instead}"
    parent = key.rpartition(".")[0]
    siblings: list[str] = []
    if parent in keys:
        siblings = [other for other in keys if other.rpartition(".")[0] == parent]
    # A whole key that is spelled alike is a better guess than one whose last part is.
    near = _near(key, [*keys, *groups], 0.8)
    if not near:
        near = _near_last_part(key, siblings or keys)
    if siblings:
        return f"{line}{near}; {parent} has {', '.join(map(_last_part, siblings))}"
    return line + near


def _near(word: str, choices: Sequence[str], alike: float = 0.6) -> str:
    # Adamw and adamw differ by more than a letter to a comparison that minds case.
    lower = word.lower()
    if lower in choices:
        return f"; did you mean {lower}?"
    return did_you_mean(word, choices, alike)


def _near_last_part(key: str, keys: Sequence[str]) -> str:
    """As `_near`, by the last part of the keys alone: ``steps`` is train.steps or profile.steps."""
    close = nearest(_last_part(key), map(_last_part, keys))
    if close is None:
        return ""
    meant = [other for other in keys if _last_part(other) == close]
    return f"; did you mean {' or '.join(meant)}?"


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _node(base: DictConfig, key: str) -> Any:
    parent, _, last = key.rpartition(".")
    container = OmegaConf.select(base, parent) if parent else base
    return container._get_node(last)

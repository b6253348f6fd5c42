"""Which words of a command line are wrong, and why: `explain`.

Hydra stops at the first wrong word, and with a message about its own parts. Here each word is tried
on its own, and each wrong one gets a line with the key, the value, what is allowed and the nearest
valid choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel2d.base.config.options import gone
from parallel2d.base.config.schema import PRESETS, choices_by_group, initialized
from parallel2d.base.config.serialization import dotted_keys, first_line, unknown_key
from parallel2d.base.errors import did_you_mean

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


def explain(words: Sequence[str], error: Exception) -> str:
    """One line per wrong word; the first lines of ``error`` where no single word is wrong."""
    arguments = get_args_parser().parse_args(list(words))
    if arguments.config_path:
        return first_line(error)  # all files are in another place
    with initialized(arguments.config_dir) as hydra_instance:
        loader = hydra_instance.config_loader
        groups = choices_by_group(loader)
        wrong, chosen, values = _read(arguments.overrides, loader, groups)
        try:
            base = compose(arguments.config_name or "train", overrides=chosen)
        # Such as +strategy=ddp, which no single word shows, or a wrong value in one's own file.
        except (HydraException, OmegaConfBaseException, ValueError):
            return "\n".join(wrong) or first_line(error)
        keys = dotted_keys(base)
        tried = [_try_value(base, keys, groups, word, override) for word, override in values]
    return "\n".join([*wrong, *filter(None, tried)]) or first_line(error)


def _read(
    words: Sequence[str], loader: Any, groups: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str], list[tuple[str, Any]]]:
    """Lines for wrong words; choices of groups, whose keys are needed to try values; and values of
    keys, which are not tried yet."""
    wrong: list[str] = []
    chosen: list[str] = []
    values: list[tuple[str, Any]] = []
    for word in words:
        # Each word on its own: Hydra's parser stops at the first that it cannot read.
        try:
            override = OverridesParser.create(loader).parse_override(word)
        except HydraException as unreadable:
            wrong.append(_unreadable(word, unreadable))
            continue
        key = str(override.key_or_group)
        if key in groups:
            choices = _choices(override)
            unknown = [choice for choice in choices if choice not in groups[key]]
            wrong += [_unknown_choice(key, choice, groups[key]) for choice in unknown]
            # Of several choices for a sweep any has the keys.
            if not unknown and not override.is_sweep_override():
                chosen.append(f"{key}={choices[0]}")
        # Hydra checks its own keys, and each job of a sweep is checked when it is composed.
        elif not key.startswith("hydra") and not override.is_sweep_override():
            values.append((word, override))
    return wrong, chosen, values


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


def _choices(override: Any) -> list[str]:
    """The choices of a config group that a word names: several in a sweep."""
    if override.is_delete():
        return [str(override.value())]
    text = str(override.get_value_string())
    if override.is_sweep_override():
        return [part.strip() for part in text.split(",")]
    return [text]


def _unknown_choice(group: str, choice: str, allowed: Sequence[str]) -> str:
    for preset in PRESETS.get(group, {}).values():
        for item in dataclasses.fields(preset):
            if item.name == "name" and choice in item.metadata.get("gone", ()):
                return gone(group, choice, item.metadata)
    near = did_you_mean(choice, allowed)
    return f"{group}={choice} is not one of {', '.join(allowed)}{near}"


def _try_value(
    base: DictConfig, keys: list[str], groups: Collection[str], word: str, override: Any
) -> str | None:
    """What is wrong with ``word``, which sets a key; None for nothing."""
    key = override.key_or_group
    # ~key: Hydra removes keys, and the schema has no place for a missing one.
    if override.is_delete():
        return f"{word}: keys cannot be removed, only set"
    if key not in keys:
        return unknown_key(key, word, keys, groups)
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


def _node(base: DictConfig, key: str) -> Any:
    parent, _, last = key.rpartition(".")
    container = OmegaConf.select(base, parent) if parent else base
    return container._get_node(last)

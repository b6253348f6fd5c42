"""Error messages for wrong overrides on the command line: `explain`.

Hydra stops at the first wrong override, with a message about its internals. This module tries each
override separately, and reports each wrong override in one line, with the key, the value, the
constraint and the nearest valid choice.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel2d.base.config.model_and_data import FAMILIES
from parallel2d.base.config.options import allowed, choice_problem
from parallel2d.base.config.schema import choices_by_group, initialized
from parallel2d.base.errors import did_you_mean, nearest_matches

_GLOBAL_PACKAGE = re.compile(r"^\s*#\s*@package\s+_global_\s*$", re.MULTILINE)
_LINES = 5  # shown lines of a message of Hydra
_PLUGIN = re.compile(r"Could not find 'hydra/(sweeper|launcher)/([a-z]+)(_[a-z]+)?'")


def explain(parsed: argparse.Namespace, error: Exception) -> str:
    """Return one line per wrong override. If all overrides are right, return one line per wrong
    setting in custom files; if these are right too, the first lines of ``error``."""
    with initialized(parsed.config_dir) as hydra_instance:
        loader = hydra_instance.config_loader
        groups = choices_by_group(loader)
        wrong, chosen, values = _read(parsed.overrides, loader, groups)
        try:
            base = compose(parsed.config_name, overrides=chosen)
        # Such as +strategy=ddp, which is valid as a single override, or a wrong value in a file of
        # --config-dir
        except (HydraException, OmegaConfBaseException, ValueError):
            wrong = wrong or list(_wrong_in_files(parsed, chosen, groups))
            return "\n".join(wrong) or first_line(error)
        tried = []
        for override in values:
            tried.append(_try_value(base, groups, override))
    return "\n".join([*wrong, *filter(None, tried)]) or first_line(error)


def _wrong_in_files(
    parsed: argparse.Namespace, chosen: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield lines about two files of ``--config-dir``, if they are chosen: the experiment, and the
    main file that replaces the main file of the package."""
    names = [parsed.config_name] if parsed.config_name != "train" else []
    others = []
    for word in chosen:
        if word.startswith("experiment="):
            names.append(word.replace("=", "/", 1))
        else:
            others.append(word)
    for name in names:
        path = os.path.join(parsed.config_dir or "", f"{name}.yaml")
        if os.path.isfile(path):
            for problem in _wrong_in_file(path, others, groups):
                yield f"{path}: {problem}"


def _wrong_in_file(
    path: str, chosen: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    is_experiment = os.path.basename(os.path.dirname(path)) == "experiment"
    if is_experiment and not _GLOBAL_PACKAGE.search(text):
        yield "it must begin with the line # @package _global_, or its keys are put elsewhere"
        return
    content = OmegaConf.create(text)
    if not isinstance(content, DictConfig):
        yield "it has no keys"
        return
    choices: list[str] = []
    for entry in content.pop("defaults", []):
        for name, choice in entry.items() if isinstance(entry, DictConfig) else ():
            key = str(name)
            group = key.split()[-1].lstrip("/")
            if group not in groups:
                yield f"{key}: there is no group {group}{did_you_mean(group, groups)}"
            elif str(choice) not in groups[group]:
                yield _unknown_choice(group, str(choice), groups[group])
            else:
                choices.append(f"{group}={choice}")
    try:
        base = compose("train", overrides=[*choices, *chosen])
    except (HydraException, OmegaConfBaseException, ValueError):
        return
    keys = dotted_keys(base)
    for key, value in _settings(content):
        if not key.startswith("hydra"):
            problem = _value_problem(base, keys, groups, key, key, value)
            if problem is not None:
                yield problem


def _settings(content: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a file, by full key."""
    for name in map(str, content):
        node = content._get_node(name)
        if isinstance(node, DictConfig) and len(node):
            yield from _settings(node, f"{prefix}{name}.")
        else:
            value: Any = OmegaConf.to_container(content, resolve=False)
            yield f"{prefix}{name}", value[name]


def _read(
    words: Sequence[str], loader: Any, groups: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str], list[Override]]:
    """Return three lists: lines for wrong overrides, the overrides that choose from a group, and
    the overrides that set a value. Values can be tried only with the keys of the chosen groups."""
    wrong: list[str] = []
    chosen: list[str] = []
    values: list[Override] = []
    for word in words:
        # One call per override: Hydra's parser stops at the first override that it cannot read.
        try:
            override = OverridesParser.create(loader).parse_override(word)
        except HydraException as unreadable:
            # The first line names the wrong character. The other lines only point at its position.
            reason = str(unreadable).splitlines()[0]
            advice = "write key=value, and quote special characters"
            wrong.append(f"{word} cannot be read ({reason}); {advice}")
            continue
        key = override.key_or_group
        is_sweep = override.is_sweep_override()
        if key in groups:
            text = override.get_value_string()
            choices = [part.strip() for part in text.split(",")] if is_sweep else [text]
            unknown = []
            for choice in choices:
                if choice not in groups[key]:
                    unknown.append(choice)
            for choice in unknown:
                wrong.append(_unknown_choice(key, choice, groups[key]))
            # Every choice of a sweep has the same keys.
            if not unknown and not is_sweep:
                chosen.append(f"{key}={text}")
        # Hydra checks the keys of the section hydra.
        elif not key.startswith("hydra"):
            values.append(override)
    return wrong, chosen, values


def _unknown_choice(group: str, choice: str, choices: Sequence[str]) -> str:
    if group == "experiment":
        others = ", ".join(name for name in choices if name != "none")
        there = f"; there are {others}" if others else ""
        return (
            f"no experiment '{choice}'{there}; pass --config-dir DIR with experiment/{choice}.yaml"
        )
    return str(choice_problem(group, choice, choices))


def _try_value(
    base: DictConfig, groups: Mapping[str, Sequence[str]], override: Override
) -> str | None:
    """Return the message for an override that sets a key, or None if it is right."""
    key, word = override.key_or_group, override.input_line
    keys = dotted_keys(base)
    # ~key: Hydra removes keys, but every key of the schema must exist.
    if override.is_delete():
        return f"{word}: keys cannot be removed, only set"
    # Each job of a sweep is checked when it is composed.
    if key in keys and override.is_sweep_override():
        return None
    return _value_problem(base, keys, groups, key, str(word), override.value())


def _value_problem(
    base: DictConfig,
    keys: Mapping[str, bool],
    groups: Mapping[str, Sequence[str]],
    key: str,
    word: str,
    value: Any,
) -> str | None:
    """Return the message for a wrong ``value`` of ``key``, given as ``word``, or None."""
    if key not in keys:
        return None if _may_hold_anything(base, key) else unknown_key(key, word, keys, groups)
    # A group is set by a choice, as in model=llama. A value, as in optimizer=3, would replace all
    # its keys.
    node = OmegaConf.select(base, key, throw_on_missing=False)
    if OmegaConf.is_dict(node) and not isinstance(value, dict):
        inside = ", ".join(k for k in keys if k.startswith(key + "."))
        return f"{word}: {key} is a group of keys, not a value; set one of {inside}"
    try:
        trial = base.copy()
        OmegaConf.update(trial, key, value, merge=True)
        OmegaConf.resolve(trial)
    except OmegaConfBaseException:
        parent, _, last = key.rpartition(".")
        container = OmegaConf.select(base, parent) if parent else base
        # A mapping without a schema has no fields.
        fields = getattr(OmegaConf.get_type(container), "__dataclass_fields__", {})
        expected = allowed(fields[last]) if last in fields else "of another type"
        return f"{key}={value} must be {expected}"
    return None


def _may_hold_anything(base: DictConfig, key: str) -> bool:
    """True for a key inside a mapping without a schema, such as model.arguments."""
    parent = key.rpartition(".")[0]
    while parent:
        node = OmegaConf.select(base, parent, throw_on_missing=False)
        if OmegaConf.is_dict(node):
            return not hasattr(OmegaConf.get_type(node), "__dataclass_fields__")
        parent = parent.rpartition(".")[0]
    return False


def unknown_key(
    key: str, word: str, keys: Collection[str], groups: Mapping[str, Sequence[str]]
) -> str:
    """Return the message for an override ``word`` of an unknown ``key``: the section of the key,
    the nearest of ``keys``, or the command that lists all keys."""
    line = f"unknown key {key}" + (f" (given as {word})" if word != key else "")
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if section == "model" and f"model.{name}" not in keys:
        owners = []
        for family, kind in FAMILIES.items():
            if name in vars(kind()):
                owners.append(family)
        if owners:
            return f"{line}: models of family {' or '.join(owners)} have it"
    # Prefer a key with a similar full name to a key with a similar last part.
    near = did_you_mean(key, [*keys, *groups], 0.8) or near_last_part(key, keys)
    if near:
        return line + near
    parent = key.rpartition(".")[0]
    lists = f"--help {parent}" if parent in keys else "--help all"
    return f"{line}; {lists} lists keys, docs/coming-from.md those of other frameworks"


def near_last_part(key: str, keys: Collection[str]) -> str:
    """Return a suggestion by the last part, as `did_you_mean`: ``steps`` is train.steps or
    profile.steps. For a key of a group only keys of this group are suggested."""
    parent, _, last = key.rpartition(".")
    others = {}
    for other in keys:
        others[other] = other.rpartition(".")[2]
    if parent in keys:
        others = {other: name for other, name in others.items() if other == f"{parent}.{name}"}
    close = nearest_matches(last, others.values(), count=1)
    meant = []
    for other, name in others.items():
        if name in close:
            meant.append(other)
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def dotted_keys(config: DictConfig, prefix: str = "") -> dict[str, bool]:
    """Return all keys, each group before its members, mapped to True if the schema has the key."""
    keys: dict[str, bool] = {}
    # None: a mapping without a schema, such as model.arguments, accepts any key.
    known = getattr(OmegaConf.get_type(config), "__dataclass_fields__", None)
    for name in map(str, config):
        key = f"{prefix}{name}"
        keys[key] = known is None or name in known
        node = config._get_node(name)
        if isinstance(node, DictConfig) and not node._is_missing() and not node._is_none():
            keys |= dotted_keys(node, f"{key}.")
    return keys


def first_line(error: BaseException) -> str:
    """Return the first lines of an error of Hydra or OmegaConf, or of its cause. Hydra's errors
    have advice in further lines."""
    text = str(error).partition("Config search path")[0].replace("\\'", "'")
    shown = list(filter(None, map(str.strip, text.splitlines())))[:_LINES]
    # Hydra often wraps OmegaConf's error in an error of one line, which does not name the reason.
    if len(shown) < 2 and error.__cause__ is not None:
        shown += str(error.__cause__).strip().splitlines()[:1]
    missing = _PLUGIN.search(str(error))
    if missing is not None:
        shown.append(f"a plugin needs pip install hydra-{missing[2]}-{missing[1]}")
    return "; ".join(shown)

"""Which words of a command line are wrong, and why: `explain`.

Hydra stops at the first wrong word, and with a message about its own parts. Here each word is tried
on its own, and each wrong one gets a line with the key, the value, what is allowed and the nearest
valid choice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel2d.base.config.model_and_data import FAMILIES, DataConfig
from parallel2d.base.config.options import GONE_KEYS, allowed, gone
from parallel2d.base.config.schema import PRESETS, choices_by_group, initialized
from parallel2d.base.errors import did_you_mean, nearest

# The choices of the group `model`, by family.
_MODELS = {
    "llama": "model=llama_8b and its other sizes",
    "custom": "model=custom",
    "hf": "model=hf",
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
        tried = [_try_value(base, groups, word, override) for word, override in values]
    return "\n".join([*wrong, *filter(None, tried)]) or first_line(error)


def _read(
    words: Sequence[str], loader: Any, groups: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str], list[tuple[str, Any]]]:
    """Lines for wrong words; choices of groups, whose keys are needed to try values; values."""
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
    return [part.strip() for part in text.split(",")] if override.is_sweep_override() else [text]


def _unknown_choice(group: str, choice: str, allowed: Sequence[str]) -> str:
    # The choices of data are files, with one class for all.
    presets = {**PRESETS, "data": {"": DataConfig()}}
    for preset in presets.get(group, {}).values():
        named = preset.__dataclass_fields__.get("name")
        if named is not None and choice in named.metadata.get("gone", ()):
            return gone(group, choice, named.metadata)
    if group == "experiment":
        others = ", ".join(name for name in allowed if name != "none")
        there = f"; there are {others}" if others else ""
        return (
            f"no experiment '{choice}'{there}; pass --config-dir DIR with experiment/{choice}.yaml"
        )
    near = did_you_mean(choice, allowed)
    return f"{group}={choice} is not one of {', '.join(allowed)}{near}"


def _try_value(base: DictConfig, groups: Collection[str], word: str, override: Any) -> str | None:
    """What is wrong with ``word``, which sets a key; None for nothing."""
    key = override.key_or_group
    keys = dotted_keys(base)
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
        parent, _, last = key.rpartition(".")
        container = OmegaConf.select(base, parent) if parent else base
        # A mapping that may hold anything has no fields.
        fields = getattr(OmegaConf.get_type(container), "__dataclass_fields__", {})
        expected = allowed(fields[last]) if last in fields else "of another type"
        return f"{key}={override.value()} must be {expected}"
    return None


def unknown_key(key: str, word: str, keys: Collection[str], groups: Collection[str] = ()) -> str:
    """What is said of a ``word`` that sets a ``key`` that is none of ``keys``: what is there
    instead, where it belongs, or the nearest."""
    if key in GONE_KEYS:
        return f"{key} is gone: {GONE_KEYS[key]}"
    line = f"unknown key {key}" + (f" (given as {word})" if word != key else "")
    owners = _models_with(key, keys)
    if owners:
        return f"{line}: it belongs to {' or '.join(owners)}"
    parent = key.rpartition(".")[0]
    siblings: list[str] = []
    if parent in keys:
        siblings = [other for other in keys if other.rpartition(".")[0] == parent]
    # A whole key that is spelled alike is a better guess than one whose last part is.
    near = did_you_mean(key, [*keys, *groups], 0.8) or _near_last_part(key, siblings or keys)
    if siblings:
        return f"{line}{near}; {parent} has {', '.join(map(_last_part, siblings))}"
    return line + (near or "; --help all lists them, docs/coming-from.md those of other frameworks")


def _near_last_part(key: str, keys: Collection[str]) -> str:
    """By the last part of the keys alone: ``steps`` is train.steps or profile.steps."""
    close = nearest(_last_part(key), map(_last_part, keys))
    meant = [other for other in keys if _last_part(other) == close]
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _models_with(key: str, known: Collection[str]) -> list[str]:
    """The choices of ``model`` that have the unknown ``key``; none where the one that was chosen,
    with the keys ``known``, has its first part."""
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if section != "model" or f"model.{name}" in known:
        return []
    return [_MODELS[family] for family, kind in FAMILIES.items() if name in vars(kind())]


def dotted_keys(config: DictConfig, prefix: str = "") -> dict[str, bool]:
    """All keys, groups before what they hold, each with whether the schema has it."""
    keys: dict[str, bool] = {}
    # None: in a mapping without a schema, such as model.arguments, any key may stand.
    known = getattr(OmegaConf.get_type(config), "__dataclass_fields__", None)
    for name in map(str, config):
        key = f"{prefix}{name}"
        keys[key] = known is None or name in known
        node = config._get_node(name)
        if isinstance(node, DictConfig) and not node._is_missing() and not node._is_none():
            keys |= dotted_keys(node, f"{key}.")
    return keys


def first_line(error: BaseException) -> str:
    """The first lines of an error of Hydra's or OmegaConf's, or of its cause."""
    shown = list(filter(None, map(str.strip, str(error).splitlines())))[:2]
    # Hydra often wraps OmegaConf's error in one line that does not name the reason.
    if len(shown) < 2 and error.__cause__ is not None:
        shown += str(error.__cause__).strip().splitlines()[:1]
    return "; ".join(shown)

"""A `TrainConfig` from what Hydra composed, to YAML, and back from YAML. `unknown_key` is what is
said of a key that it does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel2d.base.config.checks import validated
from parallel2d.base.config.job import TrainConfig
from parallel2d.base.config.model_and_data import CustomModel, HuggingFaceModel, LlamaModel
from parallel2d.base.config.options import GONE_KEYS
from parallel2d.base.errors import ConfigError, did_you_mean, nearest

# What `model` holds, by `model.family`.
FAMILIES = {"llama": LlamaModel, "custom": CustomModel, "hf": HuggingFaceModel}
# The choices of the group `model`, by family.
_CHOICES = {
    "llama": "model=llama_8b and its other sizes",
    "custom": "model=custom",
    "hf": "model=hf",
}


def to_config(composed: DictConfig) -> TrainConfig:
    """The checked dataclasses of a composed config. Raises `ConfigError` with every problem."""
    return validated(_to_dataclasses(composed))


def to_yaml(config: TrainConfig) -> str:
    """The configuration as text, for workers and for people; `from_yaml` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def from_yaml(text: str) -> TrainConfig:
    """The configuration that `to_yaml` wrote, which was checked before.

    Data only: nothing in it is instantiated but the schema's own dataclasses. Raises `ConfigError`
    for text that does not fit the schema.
    """
    loaded = OmegaConf.create(text)
    family = loaded.model.family
    if family not in FAMILIES:
        raise ConfigError(f"model.family={family} is not one of {', '.join(FAMILIES)}")
    schema = OmegaConf.structured(TrainConfig)
    schema.model = OmegaConf.structured(FAMILIES[family])
    return _to_dataclasses(OmegaConf.merge(schema, loaded))  # type: ignore[arg-type]


def _to_dataclasses(composed: DictConfig) -> TrainConfig:
    missing = sorted(OmegaConf.missing_keys(composed))
    # OmegaConf would stop at the first of them.
    if missing:
        raise ConfigError("\n".join(f"{key} is required and was not given" for key in missing))
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from None
    assert isinstance(config, TrainConfig)
    # The conversion drops keys that the dataclasses do not have, so they are looked for here.
    unknown = _unknown_keys(composed)
    if unknown:
        known = [key for key in dotted_keys(composed) if not key.startswith(tuple(unknown))]
        raise ConfigError("\n".join(unknown_key(key, key, known) for key in unknown))
    return config


def unknown_key(key: str, word: str, keys: Sequence[str], groups: Collection[str] = ()) -> str:
    """What is said of a ``word`` that sets a ``key`` that is none of ``keys``: what is there
    instead, where it belongs, or the nearest."""
    if key in GONE_KEYS:
        return f"{key} is gone: {GONE_KEYS[key]}"
    line = f"unknown key {key}"
    if word != key:
        line = f"unknown key {key} (given as {word})"
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
    return line + (near or "; --help lists all, docs/coming-from.md those of other frameworks")


def _near_last_part(key: str, keys: Sequence[str]) -> str:
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
    return [
        _CHOICES[family]
        for family, schema in FAMILIES.items()
        if name in {item.name for item in dataclasses.fields(schema)}
    ]


def _unknown_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Keys that ``+key=value`` added and that the schema does not have: nothing would read them."""
    kind: Any = OmegaConf.get_type(config)
    known = None  # any key may stand in a mapping that has no schema, such as model.arguments
    if dataclasses.is_dataclass(kind):
        known = {item.name for item in dataclasses.fields(kind)}
    unknown: list[str] = []
    for key in map(str, config):
        if known is not None and key not in known:
            unknown.append(f"{prefix}{key}")
        elif is_group(config, key):
            unknown += _unknown_keys(config[key], f"{prefix}{key}.")
    return unknown


def dotted_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """All keys of a config, groups before what they hold: ``train``, ``train.steps``."""
    keys: list[str] = []
    for key in map(str, config):
        keys.append(f"{prefix}{key}")
        if is_group(config, key):
            keys += dotted_keys(config[key], f"{prefix}{key}.")
    return keys


def is_group(config: DictConfig, key: str) -> bool:
    """Whether ``key`` holds further keys."""
    node = config._get_node(key)
    return isinstance(node, DictConfig) and not node._is_missing() and not node._is_none()


def first_line(error: BaseException) -> str:
    """The first lines of an error of Hydra's or OmegaConf's, or of its cause."""
    lines = [line.strip() for line in str(error).splitlines()]
    shown = list(filter(None, lines))[:2]
    # Hydra often wraps OmegaConf's error in one line that does not name the reason.
    if len(shown) < 2 and error.__cause__ is not None:
        shown += str(error.__cause__).strip().splitlines()[:1]
    return "; ".join(shown)

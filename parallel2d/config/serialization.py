"""A `TrainConfig` from what Hydra composed, to YAML, and back from YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel2d.config import other_frameworks
from parallel2d.config.checks import validated
from parallel2d.config.job import TrainConfig
from parallel2d.config.model_and_data import CustomModel, HuggingFaceModel, LlamaModel
from parallel2d.errors import ConfigError, did_you_mean

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
        raise ConfigError("\n".join(_unknown_key(key, known) for key in unknown))
    return config


def _unknown_key(key: str, known: list[str]) -> str:
    instead = other_frameworks.answer(key) or other_models(key, known)
    if instead is not None:
        return f"unknown key {key}: {instead}"
    return f"unknown key {key}{did_you_mean(key, known)}"


def other_models(key: str, known: Collection[str]) -> str | None:
    """Which choices of ``model`` have the unknown ``key``; None where the one that was chosen, with
    the keys ``known``, or no other has it."""
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if section != "model" or f"model.{name}" in known:
        return None
    having = [
        _CHOICES[family]
        for family, schema in FAMILIES.items()
        if name in {item.name for item in dataclasses.fields(schema)}
    ]
    return f"it belongs to {' or '.join(having)}" if having else None


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

"""Parsing of command-line arguments into overrides for Hydra: `parse_arguments`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from parallel2d.base.config.options import as_override
from parallel2d.base.errors import ConfigError

# Prefixes of overrides with keys outside of the schema
_OPEN = (
    *("model.arguments.", "model.arguments=", "model.tensor_plan="),
    *("model.conditional.", "model.conditional="),
    *("data.validation.", "data.validation=", "data.arguments.", "data.arguments="),
    *("optimizer.arguments.", "optimizer.arguments="),
)
_BRACKET = re.compile(r"(?<!\\)([\[\]])")
_LARGEST_YAML = 2**20
_SCIENTIFIC = re.compile(r"[0-9.]+e\+?[0-9]{1,2}", re.IGNORECASE)
_EXPERIMENT = re.compile(r"^\+{1,2}(?=experiment=)")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options of a command line. The attribute ``overrides`` has all other
    arguments, which may be given before, between or after the options.

    Some overrides are rewritten for Hydra:

    * A key outside of the schema, such as an argument of a model's factory, gets ``++``.
    * Brackets of a pattern, as in ``model.tensor_plan={layers.*.w[qkv]: colwise}``, get
      backslashes.
    * ``+experiment=big`` becomes ``experiment=big``, because the defaults list an experiment.
    * ``cluster=FILE.yaml`` becomes ``cluster=local`` and the keys of that file.
    * ``1e3`` becomes ``1000``.

    Raises:
        ConfigError: for an unknown option, an option without its value, and a file that cannot be
            read or is not a cluster file.
    """
    parser = get_args_parser()
    parser.set_defaults(config_name="train")
    parser.error = _refuse  # type: ignore[method-assign]
    parsed, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        raise ConfigError(
            f"{unknown[0]} is not an option of this command: a setting is given as KEY=VALUE, such "
            f"as {name}=VALUE if that is one; --help all lists them"
        )
    if parsed.experimental_rerun:
        _refuse("--experimental-rerun is refused: it executes the contents of the file")
    if parsed.config_path:
        _refuse("--config-path is refused: --config-dir adds a folder of files")
    from_files: list[str] = []
    words: list[str] = []
    for word in parsed.overrides:
        word = _EXPERIMENT.sub("", word)
        key, _, path = word.partition("=")
        if key == "cluster" and path.endswith((".yaml", ".yml")):
            from_files += _of_cluster_file(path)
            word = "cluster=local"
        elif word.lstrip("+").startswith("model.tensor_plan={"):
            word = _BRACKET.sub(r"\\\1", word)
        elif _SCIENTIFIC.fullmatch(path) and float(path).is_integer():
            # Hydra reads 1e3 as a float, which is refused for an integer.
            word = f"{key}={float(path):.0f}"
        words.append(f"++{word}" if word.startswith(_OPEN) else word)
    # The overrides of the command line come last, so they take precedence over the file.
    parsed.overrides = [*from_files, *words]
    return parsed


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def may_sweep(words: Sequence[str]) -> bool:
    """True if an override has several values, which Hydra may treat as a sweep."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(words))
    except HydraException:
        return False
    return any(override.is_sweep_override() for override in overrides)


def quoted(value: object) -> str:
    """Quote ``value`` for Hydra. Raises `ConfigError` unless ``value`` is a single value."""
    if isinstance(value, str):
        if "${" in value:
            raise ConfigError(f"{value!r} is an interpolation, and a file of data has plain values")
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if not isinstance(value, bool | int | float | None):
        raise ConfigError(f"{value!r} is not a value of a cluster")
    return as_override(value)


class _WithoutAliases(yaml.SafeLoader):
    """YAML loader that refuses aliases. With aliases, a small file can expand to a value of any
    size."""

    def compose_node(self, parent: Any, index: int) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*name), which a file of data cannot have")
        return super().compose_node(parent, index)


def read_yaml(path: str) -> Any:
    """Read an untrusted YAML file. Raises OSError, UnicodeDecodeError, and all errors of
    `parse_yaml`; `ConfigError` also for a file that is not regular."""
    if not os.path.isfile(path) and os.path.exists(path):  # opening a pipe would wait
        raise ConfigError("not a regular file")
    with open(path, encoding="utf-8") as stream:
        return parse_yaml(stream.read(_LARGEST_YAML + 1))


def parse_yaml(text: str) -> Any:
    """Return the value of YAML without tags and aliases. Raises yaml.YAMLError, and `ConfigError`
    for a text of more than 1 MiB."""
    if len(text) > _LARGEST_YAML:
        raise ConfigError("larger than 1 MiB, which no file of settings is")
    try:
        return yaml.load(text, _WithoutAliases)
    except RecursionError:
        raise ConfigError("nested too deep") from None


def _of_cluster_file(path: str) -> list[str]:
    try:
        found = read_yaml(path)
        if not isinstance(found, dict):
            raise ConfigError("no cluster file: it has no keys")
        found.pop("defaults", None)  # used only by the files in conf/cluster
        return _words_of("cluster", found)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ConfigError) as error:
        reason = str(error).replace("\n", " ")
        raise ConfigError(f"cluster={path}: {reason}") from None


def _words_of(prefix: str, values: Mapping[Any, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"{name!r} is not a key of a cluster")
        if isinstance(value, dict):
            words += _words_of(f"{prefix}.{name}", value)
        else:
            words.append(f"{prefix}.{name}={quoted(value)}")
    return words

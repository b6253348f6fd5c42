"""``cluster=FILE.yaml``: a cluster file that stands anywhere, as words: `with_cluster_files`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from parallel2d.errors import ConfigError


def with_cluster_files(words: Sequence[str]) -> list[str]:
    """``words``, with each ``cluster=FILE.yaml`` replaced by ``cluster=local`` and the keys of the
    file. Other words about the cluster stay, and go before what the file says. Raises `ConfigError`
    for a file that cannot be read or is no cluster file."""
    from_files: list[str] = []
    kept: list[str] = []
    for word in words:
        key, _, path = word.partition("=")
        if key == "cluster" and path.endswith((".yaml", ".yml")):
            try:
                from_files += _words_of("cluster", _read(path))
            except ConfigError as error:
                raise ConfigError(f"cluster={path}: {error}") from None
            word = "cluster=local"
        kept.append(word)
    return [*from_files, *kept]


def quoted(value: object) -> str:
    """``value`` as Hydra reads it. Raises `ConfigError` for what is no single value."""
    if value is None:
        return "null"
    if isinstance(value, (bool, int, float)):
        return str(value).lower()
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is no value of a cluster")
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _read(path: str) -> dict[str, Any]:
    try:
        if os.path.getsize(path) > 2**20:
            raise ConfigError("larger than 1 MiB, which no cluster file is")
        with open(path, encoding="utf-8") as stream:
            found = yaml.safe_load(stream)
    except OSError as error:
        raise ConfigError(error.strerror) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError("not YAML") from None
    if not isinstance(found, dict):
        raise ConfigError("no cluster file: it has no keys")
    if "inter_node" in found:
        raise ConfigError("of an earlier form: write it again with parallel2d.preflight --write")
    found.pop("defaults", None)  # of no use apart from conf/cluster
    return found


def _words_of(prefix: str, values: Mapping[Any, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"{name!r} is no key of a cluster")
        if isinstance(value, dict):
            words += _words_of(f"{prefix}.{name}", value)
        else:
            words.append(f"{prefix}.{name}={quoted(value)}")
    return words

"""``cluster=FILE.yaml``: a cluster file that stands anywhere, as words: `with_cluster_files`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import yaml

from parallel2d.errors import ConfigError

_MOST_BYTES = 1 << 20


def with_cluster_files(words: Sequence[str]) -> list[str]:
    """``words``, with each ``cluster=FILE.yaml`` replaced by ``cluster=local`` and the keys of the
    file. Other words about the cluster stay, and go before what the file says.

    Raises `ConfigError` for a file that cannot be read or is no cluster file.
    """
    from_files: list[str] = []
    kept: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "cluster" and value.endswith((".yaml", ".yml")):
            kept.append("cluster=local")
            from_files += _words_of("cluster", _read(value), value)
        else:
            kept.append(word)
    return [*from_files, *kept]


def _read(path: str) -> dict[str, Any]:
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            raise ConfigError(f"cluster={path}: larger than 1 MiB, which no cluster file is")
        with open(path, encoding="utf-8") as stream:
            found = yaml.safe_load(stream)
    except OSError as error:
        raise ConfigError(f"cluster={path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"cluster={path}: not YAML") from None
    if not isinstance(found, dict):
        raise ConfigError(f"cluster={path}: no cluster file: it has no keys")
    # Of no use apart from conf/cluster.
    found.pop("defaults", None)
    return _of_check(found, path) if "inter_node" in found else found


def _of_check(found: dict[str, Any], path: str) -> dict[str, Any]:
    """The keys of `ClusterConfig` from what ``python -m parallel2d.preflight --write`` measured.
    It measures neither compute nor the memory's bandwidth."""
    try:
        device = found["device"]
        return {
            "name": found["name"],
            "nodes": found["nodes"],
            "ranks_per_node": found["ranks_per_node"],
            "device": {
                "name": device["name"],
                "type": device["type"],
                "memory_gib": device["memory_bytes"] / 2**30,
            },
            "inside_node": _link(found["intra_node"]),
            "between_nodes": _link(found["inter_node"]),
        }
    except (KeyError, TypeError):
        raise ConfigError(
            f"cluster={path}: it has inter_node, as files of python -m parallel2d.preflight --write"
            " do, and lacks other keys of theirs: write it again"
        ) from None


def _link(measured: dict[str, float] | None) -> dict[str, float]:
    if measured is None:  # one node has no link to others
        return {}
    gbit = measured["bandwidth_bytes_per_s"] * 8 / 1e9
    return {"up_gbit": gbit, "down_gbit": gbit, "latency_us": measured["latency_s"] * 1e6}


def _words_of(prefix: str, values: dict[Any, Any], path: str) -> list[str]:
    words = []
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"cluster={path}: {name!r} is no key of a cluster")
        if isinstance(value, dict):
            words += _words_of(f"{prefix}.{name}", value, path)
        else:
            words.append(f"{prefix}.{name}={_quoted(value, path)}")
    return words


def _quoted(value: object, path: str) -> str:
    """``value`` as Hydra reads it."""
    if value is None:
        return "null"
    if isinstance(value, (bool, int, float)):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    raise ConfigError(f"cluster={path}: {value!r} is no value of a cluster")

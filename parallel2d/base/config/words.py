"""The words of a command line as Hydra must see them (`hydra_words`), and its options."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from parallel2d.base.config.options import as_word
from parallel2d.base.errors import ConfigError

# Words that begin so are about keys that no schema knows.
_OPEN = (
    *("model.arguments.", "model.arguments=", "model.tensor_plan="),
    *("data.validation.", "data.validation=", "data.arguments.", "data.arguments="),
    *("optimizer.arguments.", "optimizer.arguments="),
)
# Options with which Hydra answers, or runs something else than one job.
_NO_SINGLE_JOB = (
    *("help", "hydra_help", "shell_completion", "cfg", "info"),
    *("config_path", "experimental_rerun", "multirun"),
)
_BRACKET = re.compile(r"(?<!\\)([\[\]])")
_EXPERIMENT = re.compile(r"^\+{1,2}(?=experiment=)")


def hydra_words(arguments: Sequence[str]) -> list[str]:
    """The words as Hydra must see them.

    It wants ``++`` before a key that its schema does not have, such as the arguments of a model's
    factory. In ``model.tensor_plan={layers.*.w[qkv]: colwise}`` brackets belong to the pattern,
    which Hydra takes only with backslashes. ``+experiment=big``, which is right where the defaults
    have no experiment, is ``experiment=big`` here: they have one. ``cluster=FILE.yaml`` becomes
    ``cluster=local`` and the keys of that file. Raises `ConfigError` for a file that cannot be
    read or is no cluster file.
    """
    from_files: list[str] = []
    words: list[str] = []
    for word in arguments:
        word = _EXPERIMENT.sub("", word)
        key, _, path = word.partition("=")
        if key == "cluster" and path.endswith((".yaml", ".yml")):
            try:
                from_files += _words_of("cluster", _read(path))
            except ConfigError as error:
                raise ConfigError(f"cluster={path}: {error}") from None
            word = "cluster=local"
        elif word.lstrip("+").startswith("model.tensor_plan={"):
            word = _BRACKET.sub(r"\\\1", word)
        words.append(f"++{word}" if word.startswith(_OPEN) else word)
    # Other words about the cluster stay, and win over what the file says.
    return _overrides_first([*from_files, *words])


def _overrides_first(words: list[str]) -> list[str]:
    """``a=1 --cfg job b=2`` with the option last: Hydra takes overrides in one piece alone."""
    try:
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            parsed, _ = get_args_parser().parse_known_intermixed_args(words)
    except SystemExit:  # an option with a wrong value, which is told where it is used
        return words
    options = [word for word in words if word not in parsed.overrides]
    return [*parsed.overrides, *options]


def command_options(words: Sequence[str]) -> argparse.Namespace | None:
    """The options and overrides among ``words``; None where an option has a value that Hydra
    refuses. Raises `ConfigError` for an option that the command does not have."""
    try:
        with contextlib.redirect_stderr(None):
            parsed, unknown = get_args_parser().parse_known_args(list(words))
    except SystemExit:
        return None
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        raise ConfigError(
            f"{unknown[0]} is no option of this command: a setting is given as KEY=VALUE, such as "
            f"{name}=VALUE if that is one; --help all lists them"
        )
    return parsed


def job_options(words: Sequence[str]) -> argparse.Namespace | None:
    """As `command_options`; None where Hydra answers or runs a sweep too."""
    parsed = command_options(words)
    if parsed is None or any(map(vars(parsed).get, _NO_SINGLE_JOB)):
        return None
    return None if may_sweep(parsed.overrides) else parsed


def may_sweep(words: Sequence[str]) -> bool:
    """Whether a word has several values: a sweep, if Hydra was told so in a file."""
    with contextlib.suppress(HydraException):
        overrides = OverridesParser.create().parse_overrides(list(words))
        return any(override.is_sweep_override() for override in overrides)
    return False


def quoted(value: object) -> str:
    """``value`` as Hydra reads it. Raises `ConfigError` for what is no single value."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if not isinstance(value, bool | int | float | None):
        raise ConfigError(f"{value!r} is no value of a cluster")
    return as_word(value)


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

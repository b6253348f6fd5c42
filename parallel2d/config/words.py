"""The words of a command line as Hydra must see them, and the options among them."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from parallel2d.config import other_frameworks
from parallel2d.config.cluster_file import with_cluster_files
from parallel2d.errors import ConfigError

# Words that begin so are about keys that no schema knows.
_OPEN = (
    "model.arguments.",
    "model.arguments=",
    "model.tensor_plan=",
    "data.validation.",
    "data.validation=",
)
_BRACKET = re.compile(r"(?<!\\)([\[\]])")
_EXPERIMENT = re.compile(r"^\+{1,2}(?=experiment=)")


def hydra_words(arguments: Sequence[str]) -> list[str]:
    """The words as Hydra must see them.

    It wants ``++`` before a key that its schema does not have, such as the arguments of a model's
    factory. In ``model.tensor_plan={layers.*.w[qkv]: colwise}`` brackets belong to the pattern,
    which Hydra takes only with backslashes. ``+experiment=big``, which is right where the defaults
    have no experiment, is ``experiment=big`` here: they have one. ``cluster=FILE.yaml`` is the
    words of that file. Raises `ConfigError` for a file that cannot be read.
    """
    words = []
    for word in arguments:
        word = _EXPERIMENT.sub("", word)
        if word.lstrip("+").startswith("model.tensor_plan={"):
            word = _BRACKET.sub(r"\\\1", word)
        words.append(f"++{word}" if word.startswith(_OPEN) else word)
    return _overrides_first(with_cluster_files(words))


def _overrides_first(words: list[str]) -> list[str]:
    """``strategy=zero3 --cfg job train.steps=2`` with the option last: Hydra takes overrides in one
    piece alone."""
    try:
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            parsed, _ = get_args_parser().parse_known_intermixed_args(words)
    except SystemExit:  # an option with a wrong value, which is told where it is used
        return words
    overrides, options = list(parsed.overrides), []
    for word in words:
        if word in overrides:
            overrides.remove(word)
        else:
            options.append(word)
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
        hint = other_frameworks.answer(name)
        if hint is None:
            hint = f"settings are words key=value, such as {name}=VALUE if that is one"
        raise ConfigError(f"{unknown[0]} is no option of this command: {hint}; --help lists all")
    return parsed


def job_options(words: Sequence[str]) -> argparse.Namespace | None:
    """As `command_options`; None where Hydra answers or runs a sweep too."""
    parsed = command_options(words)
    if parsed is None:
        return None
    rerun = getattr(parsed, "experimental_rerun", None)
    asked = (parsed.help, parsed.hydra_help, parsed.cfg, parsed.info, parsed.config_path, rerun)
    return None if any(asked) or parsed.multirun else parsed


def may_sweep(words: Sequence[str]) -> bool:
    """Whether a word has several values: a sweep, if Hydra was told so in a file."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(words))
    except HydraException:
        return False
    return any(override.is_sweep_override() for override in overrides)


def is_multirun(arguments: Sequence[str]) -> bool:
    """Whether ``-m`` is among the words."""
    return any(word in ("-m", "--multirun") for word in arguments)

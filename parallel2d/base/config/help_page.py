"""Creates the text of ``--help`` and ``--version``: `information`. `sections` yields the
description of every key, for the help page and for the documentation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import os
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from parallel2d.base.config.composition import survey
from parallel2d.base.config.error_messages import near_last_part
from parallel2d.base.config.job import TrainConfig
from parallel2d.base.config.model_and_data import FAMILIES
from parallel2d.base.config.options import REQUIRED, allowed, as_override, default_of
from parallel2d.base.config.overrides import parse_arguments
from parallel2d.base.errors import ConfigError, did_you_mean

WIDTH = 100
_COLUMN = 34  # position of the descriptions in a line
_OPTIONS = {
    "--help all": "every key with its value and meaning",
    "--help KEY or GROUP": "meaning of a key, or all keys of a group: --help optimizer",
    "-m, --multirun": "one job per combination of values: -m strategy=ddp,zero3",
    "--cfg job": "print the composed configuration as YAML and end",
    "--config-dir DIR": "your own files: DIR/experiment/big.yaml is experiment=big",
    "--config-name NAME": "compose DIR/NAME.yaml: defaults: [train, _self_]",
    "-sc install=SHELL": "completion with TAB in bash, zsh or fish",
    "--version": "the version of parallel2d",
    "--hydra-help": "further options, which are Hydra's own",
}
_EXAMPLES = (
    "strategy=zero3 precision=bf16 train.steps=1000",
    "data=text data.path='src/**/*.py' optimizer.lr=3e-4",
    "model=hf model.architecture=qwen3 mesh.tensor=2",
    "--help all model=hf strategy=zero3",
)
_SENTENCE_END = re.compile(r"(?<=[.])\s+")
_READ_ON = (
    "docs/command-line.md (experiments, sweeps), docs/launching.md (several nodes), "
    "docs/models.md, docs/data.md; docs/coming-from.md has the keys of other frameworks."
)


@dataclass(frozen=True)
class Documented:
    """A key such as ``train.steps``, or a section such as ``train`` (empty for keys outside of
    sections)."""

    key: str
    text: str  # the full description
    allowed: str = ""  # of a key, its type and constraint in words: "a whole number, at least 1"
    choices: tuple[str, ...] = ()  # all valid values; empty if there are too many
    default: Any = None  # `REQUIRED` if the key has no default
    family: str = ""  # for the section `model`: the model family that has these keys
    keys: tuple[Documented, ...] = ()  # of a section

    @property
    def summary(self) -> str:
        """First sentence of ``text``, without its full stop."""
        return _SENTENCE_END.split(self.text, maxsplit=1)[0].rstrip(".")


def show(text: str) -> None:
    """Print ``text``. If the reader closes the pipe early, as in ``| head``, no error is raised."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Redirected, because Python writes the remaining text when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def version() -> str:
    """Return ``parallel2d 0.1.0``. Raises `ConfigError` if the package is not installed."""
    try:
        return f"parallel2d {metadata.version('parallel2d')}"
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "the version is not known: the package is used from its sources, without pip install"
        ) from None


def information(words: Sequence[str], program: str, purpose: str) -> str | None:
    """Return the text for ``--help`` or ``--version``, or None if neither is among ``words``.

    The help text is at most `WIDTH` columns wide, and shows the values of the composed
    configuration. Without a topic it fits on one screen.

    Args:
        words: arguments of the command: overrides, and topics for ``--help``, which are keys,
            groups, or ``all`` for every key.
        program: the command as it was called.
        purpose: one sentence about the command.

    Raises:
        ConfigError: for overrides that do not compose and for unknown topics.
    """
    if "--version" in words:
        return version()
    if {"-h", "--help"}.isdisjoint(words):
        return None
    parsed = parse_arguments(words)
    topics = []
    for word in parsed.overrides:
        if "=" not in word:
            topics.append(word)
    parsed.overrides = [word for word in parsed.overrides if "=" in word]
    values, groups = survey(parsed)
    if not topics:
        return _screen(program, purpose, groups, values["hydra"]["runtime"]["choices"])
    lines: list[str] = []
    for topic in topics:
        found = list(_about(topic, values, groups))
        if not found:
            keys = [each.key for section in sections() for each in section.keys]
            known = [*groups, *keys]
            near = did_you_mean(topic, known) or near_last_part(topic, keys)
            raise ConfigError(f"--help {topic}: no such key{near}")
        lines += found
    return "\n".join(lines).rstrip()


def _about(
    topic: str, values: Mapping[str, Any], groups: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the choices of ``topic``, and a table of each section with its matching keys."""
    if topic in groups:
        yield f"{topic}: one of {' '.join(groups[topic])}"
    for section in sections():
        if section.family not in ("", values["model"]["family"]):
            continue
        rows: dict[str, str] = {}
        for each in section.keys:
            if topic == "all" or f"{each.key}.".startswith(f"{topic}."):
                rows |= [_row(each, values, topic)]
        if rows:
            title = f"{section.key}: {section.summary}" if section.key else "Without a section"
            yield from [*textwrap.wrap(title, WIDTH), *_table(rows), ""]


def _screen(
    program: str, purpose: str, groups: Mapping[str, Sequence[str]], chosen: Mapping[str, str]
) -> str:
    choices: dict[str, str] = {}
    for group, names in groups.items():
        if group in chosen and len(names) > 1:
            choices[f"{group}={chosen[group]}"] = " ".join(names)
    return "\n".join(
        [
            f"usage: {program} [OPTION ...] [GROUP=CHOICE ...] [KEY=VALUE ...]",
            *textwrap.wrap(purpose, WIDTH),
            "",
            "Examples:",
            *(f"  {program} {example}" for example in _EXAMPLES),
            "",
            "Options:",
            *_table(_OPTIONS),
            "",
            "Groups, each with its choice and all choices; a choice sets the keys of its group:",
            *_table(choices),
            "",
            *textwrap.wrap(f"Read on: {_READ_ON}", WIDTH),
        ]
    )


def sections(kind: type = TrainConfig, key: str = "", family: str = "") -> Iterator[Documented]:
    """Yield the section of the dataclass ``kind``, then its subsections; ``model`` once per
    family."""
    types = typing.get_type_hints(kind)
    keys: list[Documented] = []
    inside: list[Documented] = []
    for item in dataclasses.fields(kind):
        name = f"{key}.{item.name}" if key else item.name
        if name == "model":
            for each, schema in FAMILIES.items():
                inside += sections(schema, name, each)
        elif dataclasses.is_dataclass(types[item.name]):
            inside += sections(types[item.name], name, family)
        else:
            keys.append(_key(name, item))
    # In one line, and without reStructuredText markup
    text = " ".join((inspect.getdoc(kind) or "").replace("``", "`").split())
    yield Documented(key, text, family=family, keys=tuple(keys))
    yield from inside


def _key(name: str, item: dataclasses.Field[Any]) -> Documented:
    choices = tuple(map(str, item.metadata.get("choices", ())))
    text = item.metadata["text"]
    if not text and choices:
        text = f"Set by the group: {name.removesuffix('.name')}={choices[-1]}"
    readers = item.metadata.get("read_by", ())
    if readers and "of" not in item.metadata:
        text = f"{', '.join(readers)}: {text}"
    return Documented(name, text, allowed(item), choices, default_of(item))


def _row(documented: Documented, values: Mapping[str, Any], topic: str) -> tuple[str, str]:
    """Return a key with its value, its summary and its constraint; with the full description if
    the key is the ``topic``."""
    value: Any = functools.reduce(operator.getitem, documented.key.split("."), values)
    setting = documented.key + (" (required)" if value == REQUIRED else f"={as_override(value)}")
    text = documented.text if topic == documented.key else documented.summary
    return setting, f"{text} ({documented.allowed})"


_wrap = functools.partial(textwrap.wrap, width=WIDTH, break_on_hyphens=False)


def _table(rows: Mapping[str, str]) -> Iterator[str]:
    """Yield lines of two columns; a first column that is too long gets separate lines."""
    indent = " " * _COLUMN
    for left, right in rows.items():
        texts = _wrap(right, initial_indent=indent, subsequent_indent=indent)
        first = f"  {left}"
        if len(first) + 2 <= _COLUMN:
            yield first.ljust(_COLUMN) + texts[0].lstrip()
            yield from texts[1:]
            continue
        # Add spaces to a long list, so that it can be wrapped.
        spaced = left.replace(",", ", ") if len(first) > WIDTH else left
        yield from _wrap(spaced, initial_indent="  ", subsequent_indent="    ")
        yield from texts

"""What ``--help`` of the train command shows: `help_page`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from parallel2d.config.documentation import (
    REQUIRED,
    YES_OR_NO,
    KeyDocumentation,
    SectionDocumentation,
    sections,
)
from parallel2d.config.survey import Survey, survey

WIDTH = 100
_COLUMN = 34  # where texts begin
_OPTIONS = {
    "-h, --help": "this page; its values are those that the other words give",
    "-m, --multirun": "run one job per combination of values: -m strategy=ddp,zero3 train.seed=1,2",
    "--cfg job": "print the composed configuration as YAML and end; --resolve fills in references",
    "--config-dir DIR": "a folder of your own files: DIR/experiment/big.yaml is experiment=big",
    "--config-name NAME": "compose DIR/NAME.yaml, which builds on ours: defaults: [train, _self_]",
    "-sc install=SHELL": "print the code that completes words with TAB in bash, zsh or fish",
    "--version": "the version of parallel2d",
    "--hydra-help": "further options, which are Hydra's own",
}
_EXAMPLES = (
    "strategy=zero3 precision=bf16 train.steps=1000",
    "data=text data.path='src/**/*.py' optimizer.lr=3e-4",
    "model=hf model.architecture=qwen3 mesh.tensor=2",
    "--help model=hf strategy=zero3",
)
_READ_ON = (
    "docs/command-line.md (experiments, sweeps, completion), docs/launching.md (several nodes), "
    "docs/models.md, docs/data.md; docs/coming-from.md has the words of other frameworks."
)


def help_page(words: Sequence[str], program: str, purpose: str) -> str:
    """The page, at most `WIDTH` columns wide. Its values are those that ``words`` compose to.

    ``program``: how the command was called. ``purpose``: what it does, in a sentence. Raises
    `ConfigError` for words that do not compose.
    """
    found = survey(words)
    return "\n".join(
        [
            f"usage: {program} [OPTION ...] [GROUP=CHOICE ...] [KEY=VALUE ...]",
            "",
            *textwrap.wrap(purpose, WIDTH),
            "",
            "Examples:",
            *(f"  {program} {example}" for example in _EXAMPLES),
            "",
            "Options:",
            *_table(_OPTIONS.items()),
            "",
            "Groups, each with its choices; a choice sets the keys of its group:",
            *_table(_groups(found)),
            "",
            "Keys, each with the value that it has:",
            *_keys(found),
            "",
            *textwrap.wrap(f"Read on: {_READ_ON}", WIDTH),
        ]
    )


def _groups(found: Survey) -> Iterator[tuple[str, str]]:
    chosen = found.chosen
    for group, choices in found.groups.items():
        if group in chosen:
            yield f"{group}={chosen[group]}", " ".join(choices)


def _keys(found: Survey) -> Iterator[str]:
    family = found.value("model.family")
    for section in sections():
        if section.family in ("", family) and section.keys:
            yield ""
            yield from _heading(section)
            yield from _table((_setting(each, found), _meaning(each)) for each in section.keys)


def _heading(section: SectionDocumentation) -> list[str]:
    if not section.key:
        return ["Without a section"]
    return textwrap.wrap(f"{section.key}: {section.summary}", WIDTH)


def _setting(documented: KeyDocumentation, found: Survey) -> str:
    value = found.value(documented.key)
    if value == REQUIRED:
        return f"{documented.key} (required)"
    return f"{documented.key}={as_word(value)}"


def _meaning(documented: KeyDocumentation) -> str:
    """One line; with the values that are allowed where the line before does not list them."""
    is_choice_of_group = documented.key.endswith(".name")
    if is_choice_of_group or documented.choices in ((), YES_OR_NO):
        return documented.summary
    return f"{documented.summary} ({documented.allowed})"


def as_word(value: Any) -> str:
    """A value as it is written on a command line: ``null``, ``true``, ``[a,b]``, ``{a: b}``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, dict):
        inside = [f"{key}: {as_word(each)}" for key, each in value.items()]
        return f"{{{', '.join(inside)}}}"
    return str(value)


def _table(rows: Any) -> Iterator[str]:
    """Lines of two columns; a first column that is too long has lines of its own."""
    indent = " " * _COLUMN
    for left, right in rows:
        texts = textwrap.wrap(
            right, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        first = f"  {left}"
        if len(first) + 2 <= _COLUMN:
            yield first.ljust(_COLUMN) + texts[0].lstrip()
            yield from texts[1:]
        else:
            yield from _broken(first)
            yield from texts


def _broken(line: str) -> list[str]:
    """A line of at most `WIDTH` columns, or several, broken after commas."""
    spaced = line.replace(",", ", ") if len(line) > WIDTH else line
    return textwrap.wrap(
        spaced.strip(), WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )

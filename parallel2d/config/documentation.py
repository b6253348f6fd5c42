"""What every key of the configuration means, read from the dataclasses that define it.

The comment lines above a field and the comment behind it explain the field's key, and the docstring
of a class explains its section. The first sentence of each is enough for one line. `sections` is
what ``--help`` and completion show, and all that a generated page of the configuration needs.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import re
import sys
import tokenize
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallel2d.config.constraints import bounds
from parallel2d.config.job import TrainConfig
from parallel2d.config.serialization import FAMILIES

REQUIRED = "???"  # OmegaConf's mark of a value that must be given
YES_OR_NO = ("true", "false")  # the choices of a boolean
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "None": "null",
    "Any": "anything",
}
_SENTENCE_END = re.compile(r"(?<=[.])\s+")


@dataclass(frozen=True)
class KeyDocumentation:
    """One key: ``train.steps``."""

    key: str
    allowed: str  # its type and constraint in words: "a whole number, at least 1"
    choices: tuple[str, ...]  # every value that it may have; empty where they cannot be listed
    default: Any  # `REQUIRED` where a value must be given
    text: str  # what it means, whole; empty where the field has no comment

    @property
    def summary(self) -> str:
        """The first sentence of ``text``, without its full stop."""
        return first_sentence(self.text)


@dataclass(frozen=True)
class SectionDocumentation:
    """The keys of one dataclass: ``train``, or the keys that stand alone (an empty ``key``)."""

    key: str
    family: str  # of the models that have these keys, for `model`; otherwise empty
    text: str  # the docstring of the class, whole
    keys: tuple[KeyDocumentation, ...]

    @property
    def summary(self) -> str:
        """The first sentence of ``text``, without its full stop."""
        return first_sentence(self.text)


def sections() -> list[SectionDocumentation]:
    """Every section of `TrainConfig`, in its order; ``model`` is there once per family.

    Raises OSError where the source of the package is not installed.
    """
    return list(_sections(TrainConfig, "", ""))


def first_sentence(text: str) -> str:
    """The first sentence of ``text``, without its full stop."""
    return _SENTENCE_END.split(text, maxsplit=1)[0].rstrip(".")


def _sections(kind: type, key: str, family: str) -> Iterator[SectionDocumentation]:
    """The section of the dataclass ``kind``, then those inside of it."""
    texts, types = _comments(kind), typing.get_type_hints(kind)
    keys: list[KeyDocumentation] = []
    inside: list[SectionDocumentation] = []
    for item in dataclasses.fields(kind):
        name = f"{key}.{item.name}" if key else item.name
        if name == "model":
            for each, schema in FAMILIES.items():
                inside += _sections(schema, name, each)
        elif dataclasses.is_dataclass(types[item.name]):
            inside += _sections(types[item.name], name, family)
        else:
            keys.append(_key(name, item, texts.get(item.name, "")))
    text = _plain(inspect.getdoc(kind) or "")
    yield SectionDocumentation(key, family, text, tuple(keys))
    yield from inside


def _key(name: str, item: dataclasses.Field[Any], text: str) -> KeyDocumentation:
    default = item.default
    if item.default_factory is not dataclasses.MISSING:
        default = item.default_factory()
    allowed = _allowed(str(item.type), item.metadata)
    return KeyDocumentation(name, allowed, _choices(item), default, text)


def _choices(item: dataclasses.Field[Any]) -> tuple[str, ...]:
    if item.type == "bool":
        return YES_OR_NO
    return tuple(map(str, item.metadata.get("choices", ())))


def _allowed(annotation: str, constraint: Mapping[str, Any]) -> str:
    """``int | str`` with ``minimum=1, auto=True``: ``a whole number, at least 1, or auto``."""
    if "choices" in constraint:
        return _either(list(constraint["choices"]))
    kinds = annotation.split(" | ")
    if constraint.get("auto"):
        kinds.remove("str")
    # A number may be written as a whole one.
    if "float" in kinds and "int" in kinds:
        kinds.remove("int")
    parts = [_either([_kind_in_words(each) for each in kinds])]
    if bounds(constraint):
        parts.append(bounds(constraint))
    if constraint.get("infinite"):
        parts.append("or inf")
    if constraint.get("auto"):
        parts.append("or auto")
    return ", ".join(parts)


def _kind_in_words(annotation: str) -> str:
    if annotation.startswith("list["):
        return "a list [a,b]"
    if annotation.startswith("dict["):
        return "a mapping {a: b}"
    return _KINDS[annotation]


def _either(words: list[str]) -> str:
    """``a, b or c``."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _plain(text: str) -> str:
    """Text in one line and without the marks of reStructuredText."""
    return " ".join(text.replace("``", "`").split())


def _comments(kind: type) -> dict[str, str]:
    """Field -> its comment: the lines above it, then what stands behind it."""
    lines, body = _source(kind.__module__)
    (found,) = [each for each in body if each.name == kind.__name__]
    texts = {}
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = _lines_above(node.lineno, lines)
            behind = [
                text
                for number, (text, alone) in lines.items()
                if node.lineno <= number <= (node.end_lineno or node.lineno) and not alone
            ]
            texts[node.target.id] = _plain(" ".join([*above, *behind]))
    return texts


def _lines_above(number: int, lines: Mapping[int, tuple[str, bool]]) -> list[str]:
    found: list[str] = []
    while True:
        number -= 1
        text, alone = lines.get(number, ("", False))
        if not alone:
            return found[::-1]
        found.append(text)


@functools.cache
def _source(module: str) -> tuple[dict[int, tuple[str, bool]], list[ast.ClassDef]]:
    """The comments of a module, each by its line and with whether it is alone there, and its
    classes."""
    source = inspect.getsource(sys.modules[module])
    lines = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            lines[token.start[0]] = (token.string.lstrip("# "), alone)
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return lines, classes

"""Completes the words of a command line: `candidates` for the overrides of the train command.

`reply` is what the functions of `shell_scripts` ask for.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence

from parallel2d.config.documentation import REQUIRED, KeyDocumentation, sections
from parallel2d.config.help_page import as_word
from parallel2d.config.shell_scripts import SHELLS
from parallel2d.config.survey import Survey, survey
from parallel2d.errors import ConfigError

_OPTIONS = (
    "--help",
    "--multirun",
    "--cfg",
    "--config-dir",
    "--config-name",
    "--resolve",
    "--package",
    "--info",
    "--hydra-help",
    "--shell-completion",
    "--version",
)
# Option -> what may follow; an empty tuple: a file, or a word that nobody knows.
_AFTER_OPTION: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "--config-dir": (),
    "--config-name": (),
    "--package": (),
    "--shell-completion": tuple(f"install={shell}" for shell in SHELLS),
}
_SHORT = {"-c": "--cfg", "-cd": "--config-dir", "-cn": "--config-name", "-p": "--package"}
_SHORT["-sc"] = "--shell-completion"
_PLUS = re.compile(r"^(\+{0,2})")
# Words that choose from a group: they decide which keys there are.
_CHOICE = re.compile(r"\+{0,2}\w+=[\w./-]+")


def words_until(line: str, point: str) -> list[str]:
    """The words of a line that is being written, as far as its cursor: the last one, which may be
    empty, is the one to complete."""
    until = line[: int(point)] if point.isdecimal() else line
    return re.split(r"\s+", until.lstrip())


def reply(shell: str, matches: Sequence[str], word: str, environment: Mapping[str, str]) -> str:
    """``matches`` for the ``word`` to complete, one a line, as ``shell`` wants them."""
    # fish has no file names of its own behind the = of a word.
    if shell == "fish" and not matches and "=" in word:
        name, _, path = word.partition("=")
        matches = [f"{name}={found}" for found in sorted(glob.glob(f"{glob.escape(path)}*"))]
    if shell != "bash":
        return "\n".join(matches)
    # To bash, strategy=z is three words, of which it wants the last alone. COMP_WORD is what it
    # takes for the word; it is all of strategy=z where = was taken out of COMP_WORDBREAKS.
    last = environment.get("COMP_WORD", word)
    if last in ("=", ":"):
        last = ""
    known = word.removesuffix(last)
    return "\n".join(match.removeprefix(known) for match in matches)


def candidates(words: Sequence[str]) -> list[str]:
    """Every word that may stand in the place of the last of ``words``, which begins it."""
    *before, word = words
    option = ["", *before][-1]
    option = _SHORT.get(option, option)
    if option in _AFTER_OPTION:
        found = list(_AFTER_OPTION[option])
    elif word.startswith("-"):
        found = list(_OPTIONS)
    else:
        found = _overrides(_surveyed(before), word)
    return sorted(each for each in found if each.startswith(word))


def _surveyed(before: Sequence[str]) -> Survey:
    """What there is to choose from after the words ``before``, as far as these compose."""
    kept, value_of = [], ""
    for word in before:
        is_place = value_of in ("--config-dir", "--config-name")
        value_of = _SHORT.get(word, word)
        if is_place or word.startswith(("--config-", "-cd", "-cn")) or _CHOICE.fullmatch(word):
            kept.append(word)
    try:
        return survey(kept)
    except ConfigError:  # a word that is wrong is told when the command runs
        return survey(())


def _overrides(found: Survey, word: str) -> list[str]:
    _, plus, rest = _PLUS.split(word, maxsplit=1)
    name, equals, value = rest.partition("=")
    if not equals:
        return [plus + each for each in _names(found, name)]
    # Of the values of a sweep, the last one is completed.
    earlier = value[: value.rfind(",") + 1]
    return [f"{plus}{name}={earlier}{each}" for each in _values(found, name)]


def _names(found: Survey, name: str) -> list[str]:
    """``strategy=`` and ``strategy.``; behind the last dot, one step further: ``train.steps=``."""
    parent, dot, _ = name.rpartition(".")
    groups = [] if parent else [f"{group}=" for group in found.groups]
    names = []
    for each, value in found.section(parent).items():
        names.append(f"{parent}{dot}{each}{'.' if isinstance(value, dict) else '='}")
    return groups + names


def _values(found: Survey, name: str) -> list[str]:
    if name in found.groups:
        return list(found.groups[name])
    documented = _documented(found, name)
    if documented is not None and documented.choices:
        return list(documented.choices)
    parent, _, last = name.rpartition(".")
    value = found.section(parent).get(last, REQUIRED)
    words = [] if value in (REQUIRED, None) else [as_word(value)]
    # `auto` is a value that a number has, wherever it may have it.
    if documented is not None and documented.allowed.endswith("auto"):
        words.append("auto")
    return sorted(set(words))


def _documented(found: Survey, name: str) -> KeyDocumentation | None:
    family = found.section("model").get("family", "")
    for section in sections():
        if section.family in ("", family):
            for each in section.keys:
                if each.key == name:
                    return each
    return None


def module_words(words: Sequence[str]) -> list[str] | None:
    """``python -m parallel2d.train strategy=`` as ``parallel2d train strategy=``; None for a line
    of Python that is not about this package."""
    if not os.path.basename(words[0]).startswith("python"):
        return list(words)
    if "-m" not in words[:-1]:
        return None
    at = words.index("-m") + 1
    package, _, command = words[at].partition(".")
    if package != "parallel2d":
        return None
    rest = words[at + 1 :]
    if not rest:  # the module is the word to complete
        return ["parallel2d", words[at]]
    return ["parallel2d", command, *rest] if command else ["parallel2d", *rest]

"""Errors that are shown without a traceback, and parts of their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """Invalid configuration. The message is complete, and shown without a traceback."""


class PlainError(RuntimeError):
    """Failure in training. The message is complete, and shown without a traceback."""


class HookError(PlainError):
    """Exception in a method of a hook. The message names the hook and the rank."""


class EndsSweep(Exception):  # noqa: N818 (named after what follows)
    """Stop of a job that also ends the sweep that the job belongs to."""


def nearest_matches(
    word: object, choices: Iterable[object], *, count: int = 3, alike: float = 0.6
) -> list[str]:
    """Return up to ``count`` of ``choices``, the most similar to ``word`` first. ``alike``: the
    smallest similarity, from 0 to 1 (`difflib.get_close_matches`)."""
    # Case is ignored.
    words = {}
    for choice in choices:
        words[str(choice).lower()] = str(choice)
    found = difflib.get_close_matches(str(word).lower(), words, n=count, cutoff=alike)
    return [words[each] for each in found]


def did_you_mean(word: object, choices: Iterable[object], alike: float = 0.6) -> str:
    """Return ``; did you mean WORD?`` with the nearest of ``choices``, or an empty string if none
    is similar."""
    near = nearest_matches(word, choices, count=1, alike=alike)
    return f"; did you mean {near[0]}?" if near else ""


def counted(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_five(problems: Sequence[str], separator: str = "; ") -> str:
    """Return the first five of ``problems`` in one line, followed by `` ...`` if more exist."""
    more = " ..." if len(problems) > 5 else ""
    return separator.join(problems[:5]) + more

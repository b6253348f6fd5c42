"""Errors that are shown without a traceback, and parts of their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A configuration that cannot run. Its message is complete, and shown without a traceback."""


class PlainError(RuntimeError):
    """A failure in training. Its message is complete, and shown without a traceback."""


class HookError(PlainError):
    """A method of a hook raised. The message has hook and rank."""


class EndsSweep(Exception):  # noqa: N818 (named after what follows)
    """A job that was stopped: no other job of its sweep begins."""


def nearest_matches(
    word: object, choices: Iterable[object], *, count: int = 3, alike: float = 0.6
) -> list[str]:
    """Up to ``count`` of ``choices``, those spelled most like ``word`` first. ``alike``: how alike
    they must be, from 0 to 1 (`difflib.get_close_matches`)."""
    # Upper and lower case are alike.
    words = {str(choice).lower(): str(choice) for choice in choices}
    found = difflib.get_close_matches(str(word).lower(), words, n=count, cutoff=alike)
    return [words[each] for each in found]


def did_you_mean(word: object, choices: Iterable[object], alike: float = 0.6) -> str:
    """``; did you mean WORD?`` with the nearest of ``choices``; empty when none is near."""
    near = nearest_matches(word, choices, count=1, alike=alike)
    return f"; did you mean {near[0]}?" if near else ""


def counted(number: int, noun: str) -> str:
    """``1 rank``, or ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_five(problems: Sequence[str], separator: str = "; ") -> str:
    """The first five of ``problems`` in one line, with `` ...`` where there are more."""
    more = " ..." if len(problems) > 5 else ""
    return separator.join(problems[:5]) + more

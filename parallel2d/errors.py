"""The error of a configuration that cannot run, and the nearest valid word for a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration that cannot run.

    The message is complete: what was given, and what is allowed. It is shown without a traceback.
    """


def nearest(word: object, choices: Iterable[object], alike: float = 0.6) -> str | None:
    """The one of ``choices`` that is spelled most like ``word``, or None.

    ``alike``: how alike they must be, from 0 to 1 (`difflib.get_close_matches`).
    """
    words = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(word), words, n=1, cutoff=alike)
    return close[0] if close else None


def did_you_mean(word: object, choices: Iterable[object], alike: float = 0.6) -> str:
    """``; did you mean WORD?`` with the nearest of ``choices``; empty when none is near."""
    near = nearest(word, choices, alike)
    return f"; did you mean {near}?" if near else ""

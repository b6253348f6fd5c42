"""Answers that a command gives instead of running: `information`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from parallel2d.base.errors import ConfigError


def information(words: Sequence[str], program: str, purpose: str) -> str | None:
    """The text that ``words`` ask for by ``--help`` or ``--version``; None for words of a job.

    ``program``: how the command was called. ``purpose``: what it does, for ``--help``. Raises
    `ConfigError` for words that do not compose.
    """
    if "--version" in words:
        return version()
    if "--help" in words or "-h" in words:
        # Imported here because a run needs none of it.
        from parallel2d.base.config.help_page import help_page

        return help_page(words, program, purpose)
    return None


def show(text: str) -> None:
    """Prints ``text``. A reader that ends before, such as ``| head``, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python would write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def version() -> str:
    """``parallel2d 0.1.0``. Raises `ConfigError` where the package is not installed."""
    try:
        return f"parallel2d {metadata.version('parallel2d')}"
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "the version is not known: the package is used from its sources, without pip install"
        ) from None

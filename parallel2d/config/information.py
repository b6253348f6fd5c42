"""Answers that a command gives instead of running: `information`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from parallel2d.errors import ConfigError

_COMPLETION = ("-sc", "--shell-completion")


def information(words: Sequence[str], program: str, purpose: str) -> str | None:
    """The text that ``words`` ask for by ``--help``, ``--version`` or ``-sc``; None for words of a
    job.

    ``program``: how the command was called. ``purpose``: what it does, for ``--help``. Raises
    `ConfigError` for words that do not compose, and for a request that ``-sc`` does not know.
    """
    if "--version" in words:
        return version()
    if "--help" in words or "-h" in words:
        # Imported here because a run needs none of it.
        from parallel2d.config.help_page import help_page

        return help_page(words, program, purpose)
    if any(option in words for option in _COMPLETION):
        return _completion(words, program)
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


def _completion(words: Sequence[str], program: str) -> str:
    """A script for a shell, or the words to complete of a line that calls ``program``."""
    from parallel2d.config.completion import candidates, reply, words_until
    from parallel2d.config.shell_scripts import shell_script

    action, _, shell = _request(words).partition("=")
    if action != "query":
        return shell_script(f"{action}={shell}", program)
    line = os.environ.get("COMP_LINE", "")
    # The line begins with the program, such as python -m parallel2d.train, in its user's spelling.
    rest = words_until(line, os.environ.get("COMP_POINT", ""))[len(program.split()) :]
    return reply(shell, candidates(rest), rest[-1], os.environ) if rest else ""


def _request(words: Sequence[str]) -> str:
    """The word that belongs to ``-sc``."""
    known = ("install=", "uninstall=", "query=")
    requests = [word for word in words if word.startswith(known)]
    return requests[0] if requests else "install="

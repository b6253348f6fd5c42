"""The command ``parallel2d``, also ``python -m parallel2d``: ``parallel2d train`` is
``python -m parallel2d.train``, and so are the others. Start at `main`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from parallel2d.base.errors import ConfigError, did_you_mean
from parallel2d.base.files import for_terminal


class Command(NamedTuple):
    """One command of ``parallel2d``."""

    module: str  # in this package; its `main` runs the command
    purpose: str


COMMANDS = {
    "train": Command("train", "train a model; its words are groups and keys"),
    "certify": Command("certify", "compare a layout of train with one process, step by step"),
    "plan": Command("plan", "find the fastest layout of train that fits, and what it costs"),
    "report": Command("report", "write one page about one finished run or several"),
    "dashboard": Command("dashboard", "start TensorBoard on runs"),
    "checkpoint": Command("checkpoint", "inspect, verify or convert a checkpoint"),
    "data": Command("data", "prepare, inspect or verify a folder of token shards"),
    "preflight": Command("preflight", "check whether a cluster is fit to train on"),
    "launch": Command("launch", "run a rendezvous store, or make the secret of a job"),
}


def main(arguments: Sequence[str] | None = None, program: str = "parallel2d") -> int:
    """Runs one command and returns its exit code; 2 for a command that does not exist."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        text = _information(words, program)
        if text is not None:
            # Imported here because Hydra comes with it, which most commands do not need.
            from parallel2d.base.config.help_page import show

            show(text)
            return 0
        command = _find(words, program)
    except ConfigError as error:
        print(f"parallel2d: {for_terminal(error)}", file=sys.stderr)
        return 2
    # As `python -m` does: a model or a hook of the current folder is found either way.
    if sys.path[:1] not in ([""], [os.getcwd()]):
        sys.path.insert(0, os.getcwd())
    module = importlib.import_module(f"parallel2d.{command.module}")
    return int(module.main(words[1:], program=f"{program} {words[0]}"))


def _information(words: list[str], program: str) -> str | None:
    """What options in the place of a command ask for; None for a command."""
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        return _help(program)
    if first == "--version":
        from parallel2d.base.config.help_page import version

        return version()
    if first in ("-sc", "--shell-completion"):
        raise ConfigError(f"{first} of {program} is gone: docs/command-line.md has Hydra's own")
    return None


def _find(words: list[str], program: str) -> Command:
    if not words:
        raise ConfigError(f"a command is missing\n{_help(program)}")
    if words[0] not in COMMANDS:
        names = ", ".join(COMMANDS)
        near = did_you_mean(words[0], COMMANDS)
        raise ConfigError(f"{words[0]} is not one of {names}{near}")
    return COMMANDS[words[0]]


def _help(program: str) -> str:
    lines = [f"  {name:<12}{command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND [WORD ...]",
            "",
            "Hybrid 2-D parallel training: sharded inside a node, replicated across nodes.",
            "",
            *lines,
            "",
            f"{program} COMMAND --help   explains a command",
            f"{program} --version        shows the version",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(program="python -m parallel2d"))

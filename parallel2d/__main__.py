"""The command ``parallel2d``, also ``python -m parallel2d``: `main`.

Each command is also a module: ``parallel2d train`` equals ``python -m parallel2d.train``.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence

from parallel2d.base.errors import ConfigError, did_you_mean

# Command -> its purpose. Each command is also a module of this package.
COMMANDS = {
    "train": "train a model; its arguments are groups and keys",
    "certify": "compare a layout of train with one process, step by step",
    "plan": "find the fastest layout of train that fits, and what it costs",
    "report": "write one page about one finished run or several",
    "checkpoint": "inspect, verify or convert a checkpoint",
    "data": "prepare, inspect or verify a folder of token shards",
    "preflight": "check whether a cluster is fit to train on",
    "launch": "run a rendezvous store, or make the secret of a job",
}


def main(arguments: Sequence[str] | None = None, program: str = "parallel2d") -> int:
    """Run one command and return its exit code; 2 for an unknown command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    first = "".join(words[:1])
    if first not in COMMANDS:
        # Imported here, because the module loads Hydra, which most commands do not need.
        from parallel2d.base.config.help_page import show
        from parallel2d.launching.run_command import exit_code_of

        return exit_code_of(lambda: show(_information(first, program)))
    module = importlib.import_module(f"parallel2d.{first}")
    return int(module.main(words[1:], program=f"{program} {first}"))


def _information(first: str, program: str) -> str:
    """Return the text of an option such as --help. Raise `ConfigError` for unknown commands."""
    if first in ("-h", "--help"):
        return _help(program)
    if first == "--version":
        from parallel2d.base.config.help_page import version

        return version()
    if not first:
        raise ConfigError(f"a command is missing\n{_help(program)}")
    near = did_you_mean(first, COMMANDS)
    raise ConfigError(f"{first} is not one of {', '.join(COMMANDS)}{near}")


def _help(program: str) -> str:
    lines = [
        f"usage: {program} COMMAND [ARGUMENT ...]",
        "",
        "Hybrid 2-D parallel training: sharded inside a node, replicated across nodes.",
        "",
        *itertools.starmap("  {:<12}{}".format, COMMANDS.items()),
        "",
        f"{program} COMMAND --help   explains a command",
        f"{program} --version        shows the version",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(program="python -m parallel2d"))

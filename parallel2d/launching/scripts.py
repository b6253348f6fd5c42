"""Runs a custom training script on every rank of this node: `start_script`."""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from collections.abc import Sequence

from parallel2d.base.config.composition import compose
from parallel2d.base.errors import ConfigError
from parallel2d.base.launcher_environment import find_rank
from parallel2d.launching.failures import failures_reported_once
from parallel2d.launching.launcher import start_node
from parallel2d.launching.processes import workers_per_node

_PREFIX = "launch."


def start_script(words: Sequence[str]) -> None:
    """Run a script on the ranks of this node. ``words``: overrides ``launch.KEY=VALUE``, as for the
    train command, then the script and its arguments. Raises `ConfigError` for a missing script, and
    the errors of `start_node`."""
    settings = list(itertools.takewhile(lambda word: word.startswith(_PREFIX), words))
    script = words[len(settings) :]
    if not script or not os.path.isfile(script[0]):
        found = f"no file {script[0]}" if script else "none given"
        raise ConfigError(f"run [{_PREFIX}KEY=VALUE ...] SCRIPT [ARGUMENT ...]: script: {found}")
    composition = compose([*settings, "checkpoint.enabled=false"])
    if composition is None:
        raise ConfigError("run starts one job: give each key one value")
    config = composition.config
    start_node(config, script, workers_per_node(config.launch), f"{__name__}:script_main")


def script_main(words: Sequence[str]) -> int:
    """Run the script ``words[0]`` in this rank, with ``words`` as ``sys.argv``."""
    identity = find_rank()
    assert identity is not None, "launchers set the variables of a rank"
    sys.argv = list(words)
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    with failures_reported_once(identity, None):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except Exception as error:
            error.step_of_run = _step()  # type: ignore[attr-defined]
            raise
    return 0


def _step() -> int | None:
    from parallel2d.base.replicas import current

    replicas = current()
    committed = replicas.committed_step if replicas is not None else None
    return None if committed is None else committed + 1

"""Several jobs of one command, by Hydra: `run_sweep`, and the table of what became of them.

A sweep's launcher may run jobs in other processes or on other machines. So each job leaves its
`Outcome` in its run directory, and the command reads them from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from parallel2d.base import files
from parallel2d.base.config.composition import (
    Task,
    check_run_dir,
    folder_errors_explained,
    job_here,
    place_options,
    to_config,
    wrong_words_explained,
)
from parallel2d.base.config.job import Job
from parallel2d.base.config.schema import register
from parallel2d.base.config.words import hydra_words
from parallel2d.base.errors import ConfigError, EndsSweep

_IN_TURN = ("BasicSweeper", "BasicLauncher")  # Hydra's own, without a plugin
_OUTCOME = "sweep_job.json"
_DEEPEST = 3  # folders between that of the sweep and that of a job
_LONGEST_ERROR = 4000


@dataclass(frozen=True)
class Outcome:
    """``words``: this job's of the command line; ``value``: of its objective, None if it failed."""

    number: int
    words: tuple[str, ...]
    value: float | None
    error: str | None
    run_dir: str

    def write(self) -> None:
        """Into the run directory. Raises OSError."""
        known = dataclasses.asdict(self)
        del known["run_dir"]
        files.replace(os.path.join(self.run_dir, _OUTCOME), json.dumps(known))


class SweepFolder(Callback):
    """Hydra calls it when a sweep begins: afterwards `folder` is where its jobs are."""

    folder: str | None = None
    descending = False

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. ``config``: with Hydra's own part."""
        SweepFolder.folder = os.path.abspath(config.hydra.sweep.dir)
        directions = str(config.hydra.sweeper.get("direction", ""))
        SweepFolder.descending = "maximize" in directions.lower()


def run_sweep(arguments: Sequence[str], task: Task) -> None:
    """Lets Hydra compose ``arguments`` and calls ``task`` once per job, each with a run directory
    of its own. What it returns is the job's objective. Prints a table of the jobs, best first.
    Raises `ConfigError` for anything wrong with the words, and the error of a job that failed."""
    register()
    words = hydra_words(arguments)
    if any(word.startswith("--experimental-rerun") for word in words):
        raise ConfigError("--experimental-rerun is refused: it executes what the file contains")
    for word in words:
        check_run_dir(word)
    failures: list[Exception] = []
    begun, SweepFolder.folder = time.time() - 1, None  # file systems round times

    def call(composed: DictConfig) -> float | None:
        return _sweep_job(composed, task, failures)

    main = hydra.main(config_path="pkg://parallel2d.conf", config_name="train", version_base="1.3")
    try:
        with wrong_words_explained(words), _command_line(words), folder_errors_explained():
            main(call)()
    except _SweepEnded as ended:
        raise ended.cause from None
    finally:
        told = _tell_sweep(begun)
    if len(told) > 1:
        raise ConfigError("\n".join(told))
    if failures:
        raise failures[0]


def _sweep_job(composed: DictConfig, task: Task, failures: list[Exception]) -> float | None:
    """One job of a sweep, in whatever process Hydra's launcher runs it."""
    settings = HydraConfig.get()
    words = tuple(settings.overrides.task)
    run_dir = os.path.abspath(settings.runtime.output_dir)
    outcome = functools.partial(Outcome, int(settings.job.num or 0), words, run_dir=run_dir)
    is_own_launcher = _is_own(settings.launcher)
    try:
        value = task(_job(composed, settings))
    except Exception as error:
        if isinstance(error, EndsSweep) and is_own_launcher:
            raise _SweepEnded(error) from None
        outcome(value=None, error=str(error)[:_LONGEST_ERROR]).write()
        if not (is_own_launcher and _is_own(settings.sweeper)):
            raise
        # Kept from Hydra, which would print it in its own way; the other jobs still run.
        failures.append(error)
        return None
    outcome(value=value, error=None).write()
    return value


def _job(composed: DictConfig, settings: Any) -> Job:
    """The job of a sweep. Its words mean the same in a command of its own."""
    config_dir = None
    for source in settings.runtime.config_sources:
        # Hydra's name for what --config-dir adds.
        if source.provider == "command-line":
            config_dir = source.path
    name = settings.job.config_name
    options = place_options(config_dir, None if name == "train" else name)
    job = job_here(to_config(composed), options)
    if settings.mode != RunMode.MULTIRUN:
        return job
    # A launcher of a plugin may run several jobs at once.
    label = "" if _is_own(settings.launcher) else f"[#{settings.job.num}]"
    return dataclasses.replace(job, label=label, is_judged=not _is_own(settings.sweeper))


class _SweepEnded(BaseException):
    """Not an Exception, since Hydra goes on to the next job after one."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _is_own(part: DictConfig) -> bool:
    """Whether it is what Hydra has without a plugin."""
    return str(part.get("_target_", "")).endswith(_IN_TURN)


def _tell_sweep(begun: float) -> list[str]:
    """Prints the table of the jobs; returns the errors of those that failed, with their words."""
    if SweepFolder.folder is None:
        return []
    jobs = outcomes(SweepFolder.folder, begun)
    if len(jobs) > 1 and any(job.error is None for job in jobs):
        lines = table(jobs, "objective", descending=SweepFolder.descending)
        print("\n".join(map(files.for_terminal, lines)), file=sys.stderr, flush=True)
    return [f"[{' '.join(job.words)}] {job.error}" for job in jobs if job.error is not None]


@contextlib.contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    """Gives `hydra.main` its words, and has it hand on its exceptions instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ["HYDRA_FULL_ERROR"]
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def outcomes(folder: str, since: float) -> list[Outcome]:
    """Reads the jobs below ``folder`` that ended after ``since`` (of `time.time`), in order."""
    found: list[Outcome] = []
    for run_dir, inside, _ in os.walk(folder):
        # Emptied in place, which keeps `os.walk` from going further down.
        if len(Path(run_dir).relative_to(folder).parts) == _DEEPEST:
            inside.clear()
        path = os.path.join(run_dir, _OUTCOME)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if os.stat(path).st_mtime < since:
                continue
            known = files.read_json(path)
            words = tuple(map(str, known["words"]))
            value = None if known["value"] is None else float(known["value"])
            found.append(Outcome(int(known["number"]), words, value, known["error"], run_dir))
    return sorted(found, key=lambda outcome: outcome.number)


def table(jobs: Sequence[Outcome], objective: str, *, descending: bool = False) -> list[str]:
    """Lines for people, the best job first, without the words that all jobs share."""

    def place(job: Outcome) -> tuple[bool, float]:
        value = math.nan if job.value is None else job.value
        return math.isnan(value), -value if descending else value

    shared = set(jobs[0].words).intersection(*(job.words for job in jobs))
    rows = [("job", objective, "settings", "run directory")]
    for job in sorted(jobs, key=place):
        value = "failed"
        if job.error is None:
            value = "-" if job.value is None else f"{job.value:.6g}"
        own = " ".join(word for word in job.words if word not in shared)
        rows.append((f"#{job.number}", value, own or "-", os.path.relpath(job.run_dir)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # The last column is not filled up: lines have no spaces at their end.
    widths[-1] = 0
    return ["  ".join(map(str.ljust, row, widths)) for row in rows]

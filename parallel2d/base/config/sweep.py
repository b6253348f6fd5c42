"""Commands that Hydra runs: sweeps of several jobs, and options that print an answer, such as
``--cfg``. A sweep ends with a table of results. Start at `run_sweep`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from parallel2d.base import files
from parallel2d.base.config.composition import (
    Task,
    explain_override_errors,
    folder_errors_explained,
    job_here,
    place_options,
    to_config,
)
from parallel2d.base.config.overrides import parse_arguments
from parallel2d.base.config.schema import initialized
from parallel2d.base.errors import ConfigError, EndsSweep

# Columns of the table of a sweep, by their key in metrics.jsonl
_SHOWN = {
    "tokens/s": "throughput/tokens_per_s",
    "device_GiB": "memory/peak_gib",
    "host_GiB": "memory/peak_rss_gib",
}
_IN_TURN = ("BasicSweeper", "BasicLauncher")  # Hydra's defaults, without a plugin


def run_sweep(arguments: Sequence[str], task: Task) -> None:
    """Run ``arguments`` with Hydra: print an answer, or compose the jobs of a sweep and call
    ``task`` once per job, each in a separate run directory. ``task`` returns the objective of its
    job. At the end a table lists the jobs, best first.

    Raises:
        ConfigError: for wrong arguments, and with the errors of failed jobs.
    """
    parsed = parse_arguments(arguments)
    options = place_options(parsed)
    numbers: dict[str, int] = {}

    def call(composed: DictConfig) -> float | Exception | None:
        return _run_job(composed, task, options, numbers)

    with (
        explain_override_errors(parsed),
        folder_errors_explained(),
        initialized(parsed.config_dir) as hydra_instance,
    ):
        if _answer(hydra_instance, parsed):
            return
        if any(re.fullmatch(r"hydra\.sweep\.dir=[\s'\"]*", word) for word in parsed.overrides):
            raise ConfigError("hydra.sweep.dir is empty; name a folder, or omit it for a new one")
        try:
            returned = hydra_instance.multirun(parsed.config_name, call, parsed.overrides)
        except _SweepEnded as ended:
            raise ended.cause from None
    # A sweeper from a plugin returns nothing, and prints its result.
    _conclude(list(itertools.chain(*(returned or []))))


def _conclude(jobs: list[JobReturn]) -> None:
    failed = []
    for job in jobs:
        if isinstance(job.return_value, Exception):
            failed.append(job)
    if len(jobs) > 1 and len(failed) < len(jobs):
        lines = map(files.for_terminal, table(jobs, "objective"))
        print("\n".join(lines), file=sys.stderr, flush=True)
    if len(failed) > 1:
        errors = []
        for job in failed:
            errors.append(f"[{' '.join(job.overrides or ())}] {job.return_value}")
        raise ConfigError("\n".join(errors))
    if failed:
        raise failed[0].return_value


def _answer(hydra_instance: Any, parsed: argparse.Namespace) -> bool:
    """Print Hydra's answer if the arguments request one; True if they do."""
    place = parsed.config_name, parsed.overrides
    if parsed.cfg:
        hydra_instance.show_cfg(*place, parsed.cfg, parsed.package, parsed.resolve)
    elif parsed.shell_completion:
        hydra_instance.shell_completion(*place)
    elif parsed.info:
        hydra_instance.show_info(parsed.info, *place)
    elif parsed.hydra_help:
        hydra_instance.hydra_help(parsed.config_name, get_args_parser(), parsed)
    else:
        return False
    return True


def _run_job(
    composed: DictConfig, task: Task, options: tuple[str, ...], numbers: dict[str, int]
) -> float | Exception | None:
    """Run one job of a sweep, in the process that Hydra's launcher chose. ``numbers``: run
    directory -> number of its job, for the jobs of this process."""
    settings = HydraConfig.get()
    # A launcher from a plugin may run several jobs at the same time, so a label distinguishes their
    # output.
    label = "" if _is_own(settings.launcher) else f"[#{settings.job.num}]"
    is_judged = not _is_own(settings.sweeper)
    try:
        job = job_here(to_config(composed), options)
        first = numbers.setdefault(job.run_dir, settings.job.num)
        if first != settings.job.num:
            # This job would resume the run of the other job, which has finished all steps.
            raise ConfigError(
                f"jobs {first} and {settings.job.num} of the sweep have the same run directory "
                f"{job.run_dir}: give each its own, as hydra.sweep.subdir='${{hydra.job.num}}'"
            )
        return task(dataclasses.replace(job, label=label, is_judged=is_judged))
    except Exception as error:
        if isinstance(error, EndsSweep) and _is_own(settings.launcher):
            raise _SweepEnded(error) from None
        if is_judged:
            raise
        # Returned and not raised, because Hydra's sweeper starts no further jobs after an
        # exception.
        return error


class _SweepEnded(BaseException):
    """End of a sweep. Not a subclass of Exception: after an Exception Hydra continues with the next
    job."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _is_own(part: DictConfig) -> bool:
    """True if ``part`` configures one of Hydra's default launchers or sweepers, not a plugin."""
    return str(part.get("_target_", "")).endswith(_IN_TURN)


def _measured(job: JobReturn) -> dict[str, float]:
    """Return the last speed and memory in the summary of a job, by column; empty without a
    summary."""
    hydra: Any = job.hydra_cfg
    path = os.path.join(hydra.hydra.runtime.output_dir, "summary.json")
    try:
        last = files.read_json(path)["last"]
        numbers = {}
        for name, key in _SHOWN.items():
            numbers[name] = files.number(last.get(key))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    found: dict[str, float] = {}
    for name, value in numbers.items():
        if not math.isnan(value):
            found[name] = value
    return found


def table(jobs: Sequence[JobReturn], objective: str) -> list[str]:
    """Return the lines of the table, best job first, without the overrides that all jobs share."""
    shared = set(jobs[0].overrides or ()).intersection(*(job.overrides or () for job in jobs))
    ranked = sorted(jobs, key=_place)
    measured = list(map(_measured, ranked))
    # Columns without a measurement of any job are omitted.
    columns = []
    for name in _SHOWN:
        if any(name in each for each in measured):
            columns.append(name)
    rows = [("job", objective, *columns, "settings", "run directory")]
    for job, found in zip(ranked, measured, strict=True):
        rows.append(_row(job, found, columns, shared))
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    # The last column is not padded: lines have no trailing spaces.
    widths[-1] = 0
    lines = []
    for row in rows:
        lines.append("  ".join(map(str.ljust, row, widths)))
    return lines


def _place(job: JobReturn) -> float:
    """Return the value that ranks jobs; jobs without a number come last."""
    is_number = isinstance(job.return_value, float) and not math.isnan(job.return_value)
    return job.return_value if is_number else math.inf


def _row(
    job: JobReturn, measured: dict[str, float], columns: Sequence[str], shared: set[str]
) -> tuple[str, ...]:
    """Return the cells of one job, with its overrides that are not ``shared``."""
    value = "-" if job.return_value is None else "failed"
    if isinstance(job.return_value, float):
        value = f"{job.return_value:.6g}"
    numbers = []
    for name in columns:
        numbers.append(f"{measured[name]:.4g}" if name in measured else "-")
    own = " ".join(word for word in job.overrides or () if word not in shared)
    hydra: Any = job.hydra_cfg
    run_dir = os.path.relpath(hydra.hydra.runtime.output_dir)
    return f"#{hydra.hydra.job.num}", value, *numbers, own or "-", run_dir

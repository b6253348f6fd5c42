"""What became of the jobs of a sweep: `Outcome`, and the table of them.

A sweep's launcher may run jobs in other processes or on other machines. So each job leaves its
outcome in its run directory, and the command reads them from there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from parallel2d import files

_OUTCOME = "sweep_job.json"
_DEEPEST = 3  # folders between that of the sweep and that of a job
_LONGEST_ERROR = 4000


@dataclass(frozen=True)
class Outcome:
    """``words``: of the command line, of this job; ``value``: of its objective, None where it
    failed."""

    number: int
    words: tuple[str, ...]
    value: float | None
    error: str | None
    run_dir: str

    def write(self) -> None:
        """Into the run directory. Raises OSError."""
        known = {
            "number": self.number,
            "words": self.words,
            "value": self.value,
            "error": None if self.error is None else self.error[:_LONGEST_ERROR],
        }
        files.replace(os.path.join(self.run_dir, _OUTCOME), json.dumps(known))


class SweepFolder(Callback):
    """Hydra calls it when a sweep begins: afterwards `folder` is where its jobs are."""

    folder: str | None = None
    descending = False

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Of Hydra's callbacks. ``config``: with Hydra's own part."""
        SweepFolder.folder = os.path.abspath(config.hydra.sweep.dir)
        directions = str(config.hydra.sweeper.get("direction", ""))
        SweepFolder.descending = "maximize" in directions.lower()


def outcomes(folder: str, since: float) -> list[Outcome]:
    """Of the jobs below ``folder`` that ended after ``since`` (seconds as of `time.time`), in the
    order of the sweep."""
    found: list[Outcome] = []
    for run_dir in _folders(folder, _DEEPEST):
        path = os.path.join(run_dir, _OUTCOME)
        try:
            if os.stat(path).st_mtime < since:
                continue
            known = files.read_json(path)
            words = tuple(map(str, known["words"]))
            value = None if known["value"] is None else float(known["value"])
            found.append(Outcome(int(known["number"]), words, value, known["error"], run_dir))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda outcome: outcome.number)


def _folders(folder: str, deepest: int) -> Iterator[str]:
    if not os.path.isdir(folder):
        return
    yield folder
    if deepest:
        with os.scandir(folder) as entries:
            inside = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in inside:
            yield from _folders(path, deepest - 1)


def table(jobs: Sequence[Outcome], objective: str, *, descending: bool = False) -> list[str]:
    """Lines for people, the best job first, those without a value last. Words that all jobs share
    are left out."""
    shared = set(jobs[0].words).intersection(*(job.words for job in jobs[1:]))
    sign = -1.0 if descending else 1.0

    def place(job: Outcome) -> tuple[bool, float]:
        if job.value is None or math.isnan(job.value):
            return True, 0.0
        return False, sign * job.value

    rows = [("job", objective, "settings", "run directory")]
    rows += [_row(job, shared) for job in sorted(jobs, key=place)]
    number, value, settings, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    # The last column is not filled up: lines have no spaces at their end.
    return [f"{row[0]:{number}}  {row[1]:{value}}  {row[2]:{settings}}  {row[3]}" for row in rows]


def _row(job: Outcome, shared: set[str]) -> tuple[str, str, str, str]:
    value = "failed" if job.error is not None else "-"
    if job.value is not None:
        value = f"{job.value:.6g}"
    own = " ".join(word for word in job.words if word not in shared) or "-"
    return f"#{job.number}", value, own, os.path.relpath(job.run_dir)

"""How a run ended: `summarize` writes ``summary.json`` and says it in a few lines, `note_failure`
keeps the error of a run that failed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel2d import files
from parallel2d.config import Job
from parallel2d.errors import did_you_mean
from parallel2d.metrics import keys
from parallel2d.metrics.row_file import parse_row

SUMMARY = "summary.json"
_DAY_S = 86400
_COMMAND = "python -m parallel2d."
# By launcher: how ranks are started
_TRAIN = {
    "torchrun": "torchrun ... -m parallel2d.train",
    "srun": "srun ... python -m parallel2d.train",
}


@dataclass
class _Value:
    """Of one key over the rows of a run: the last value, and the smallest with its step."""

    last: float
    best: float
    best_step: int


@dataclass
class _Totals:
    values: dict[str, _Value] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        self.last.update(row)
        for key, written in row.items():
            # The writer puts null for a number that is not finite.
            value = math.nan if written is None else written
            if type(value) not in (int, float):
                continue
            known = self.values.setdefault(key, _Value(value, math.nan, row[keys.STEP]))
            known.last = value
            # No number is smaller than NaN, or larger.
            if math.isnan(known.best) or value < known.best:
                known.best, known.best_step = value, row[keys.STEP]


def summarize(
    job: Job,
    *,
    stopped: bool,
    checkpoint: str | None,
    best: str | None = None,
    reason: str | None = None,
    launcher: str = "self",
) -> list[str]:
    """Writes ``summary.json`` and returns it as lines for people. Rank 0, once the last row is
    written. Raises OSError.

    ``stopped``: the run was asked to end before its last step; ``reason``: why it ended there by
    itself; ``checkpoint``: the newest one; ``best``: that of the best value so far; ``launcher``:
    as `RankIdentity` has it.
    """
    rows = _totals_of(os.path.join(job.run_dir, "metrics.jsonl"))
    if not rows.values:
        return []
    objective = job.config.train.objective
    found = rows.values.get(objective)
    summary = {
        "step": rows.last[keys.STEP],
        "steps": job.config.train.steps,
        "stopped": stopped,
        "tokens": rows.last.get(keys.TOKENS),
        "wall_s": rows.last.get(keys.WALL_S),
        "objective": {
            "name": objective,
            "measured": found is not None,
            "value": _plain(found.last) if found else None,
        },
        "reason": reason,
        "checkpoint": checkpoint,
        "best_checkpoint": best,
        "last": {key: _plain(value.last) for key, value in rows.values.items()},
        "best": {
            key: {"value": _plain(value.best), "step": value.best_step}
            for key, value in rows.values.items()
            if _is_loss(key)
        },
    }
    files.replace(os.path.join(job.run_dir, SUMMARY), json.dumps(summary, indent=1))
    return [*_results(rows, summary), *_commands(job, summary, launcher)]


def _plain(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def _is_loss(key: str) -> bool:
    return key == keys.LOSS or key.split("/")[-1] == "loss"


def _results(rows: _Totals, summary: Mapping[str, Any]) -> list[str]:
    seconds, step, steps = summary["wall_s"] or 0.0, summary["step"], summary["steps"]
    first = "stopped" if summary["stopped"] or summary["reason"] else "done"
    parts = [f"step {step} of {steps}"]
    if summary["tokens"]:
        parts.append(f"{summary['tokens']:,} tokens")
    clock = time.strftime("%H:%M:%S", time.gmtime(seconds % _DAY_S))
    parts.append(f"{int(seconds // _DAY_S)} days {clock}" if seconds >= _DAY_S else clock)
    goodput = rows.values.get(keys.GOODPUT)
    if goodput is not None:
        parts.append(f"goodput {goodput.last:.1%}")
    lines = [f"{first:<12}{', '.join(parts)}"]
    if summary["reason"]:
        lines.append(f"why         {summary['reason']}")
    for key, value in rows.values.items():
        if _is_loss(key):
            label = key.removesuffix("/loss").replace("/", " ")
            lines.append(
                f"{label:<11} {value.last:.4f} at the end, best {value.best:.4f} at step "
                f"{value.best_step}"
            )
    return lines


def _commands(job: Job, summary: Mapping[str, Any], launcher: str) -> list[str]:
    """To go on, to look at it, to export it."""
    run_dir = _short(job.run_dir)
    words = [*_words_to_go_on(job, summary), f"hydra.run.dir={run_dir}"]
    lines = []
    if summary["checkpoint"]:
        lines += [f"checkpoint  {_short(summary['checkpoint'])}"]
    if summary["best_checkpoint"]:
        lines += [f"best        {_short(summary['best_checkpoint'])}"]
    if summary["checkpoint"] and not summary["reason"]:
        train = _TRAIN.get(launcher, f"{_COMMAND}train")
        lines += [f"go on       {train} {shlex.join(words)}"]
    lines += [f"look        {_COMMAND}report {shlex.quote(run_dir)}"]
    if job.config.metrics.tensorboard:
        lines += [f"            {_COMMAND}dashboard {shlex.quote(run_dir)}"]
    if summary["checkpoint"]:
        target = shlex.quote(f"{run_dir}/export")
        source = shlex.quote(_short(summary["checkpoint"]))
        to = _export_format(job)
        lines += [f"export      {_COMMAND}checkpoint convert --to {to} {source} {target}"]
    return lines


# Words that are about how a run begins, or that get another value
_NOT_AGAIN = (
    "train.steps=",
    "train.epochs=",
    "hydra.run.",
    "checkpoint.resume=",
    "checkpoint.load=",
    "train.certify",
)


def _words_to_go_on(job: Job, summary: Mapping[str, Any]) -> list[str]:
    """As far as was planned where the run was stopped, otherwise twice as far."""
    words = [word for word in job.overrides if not word.lstrip("+").startswith(_NOT_AGAIN)]
    epochs = job.config.train.epochs
    further = 1 if summary["stopped"] else 2
    if epochs is not None:
        return [*words, f"train.epochs={further * epochs}"]
    steps = summary["steps"] if summary["stopped"] else 2 * summary["step"]
    return [*words, f"train.steps={steps}"]


def _export_format(job: Job) -> str:
    model = job.config.model
    if model.family == "custom":
        return "safetensors"
    return "peft" if getattr(model, "adapter", None) else "hf"


def _short(path: str) -> str:
    """Relative to the current folder where that is inside it."""
    if "://" in path:
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def read_objective(run_dir: str) -> float | None:
    """The last value of ``train.objective``, NaN where it was not finite; None where it was never
    measured, or no run ended here."""
    try:
        found = files.read_json(os.path.join(run_dir, SUMMARY))["objective"]
        value, measured = found["value"], found["measured"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if type(value) in (int, float):
        return float(value)
    return math.nan if measured is True else None


def objective_missing(name: str, run_dir: str) -> str:
    """The sentence for a sweep whose job has not measured what it is judged by."""
    try:
        measured: Sequence[str] = list(files.read_json(os.path.join(run_dir, SUMMARY))["last"])
    except (OSError, ValueError, KeyError, TypeError):
        measured = []
    hint = did_you_mean(name, measured)
    return (
        f"train.objective={name} was never measured, so the sweep cannot judge the job{hint}; "
        "validation/loss needs train.validate_every and validation data"
    )


def note_failure(run_dir: str, text: str) -> None:
    """Adds the error of a run to its ``train.log``. What cannot be written is not worth another
    error."""
    stamped = f"{time.strftime('%H:%M:%S')} {text}\n"
    with contextlib.suppress(OSError), open(os.path.join(run_dir, "train.log"), "a") as file:
        file.write(stamped)


def _totals_of(path: str) -> _Totals:
    totals = _Totals()
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            row = parse_row(line)
            if row is not None:
                totals.add(row)
    return totals

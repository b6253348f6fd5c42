"""The end of a run. `summarize` writes ``summary.json`` and returns the summary for users;
`note_failure` appends the error of a failed run to ``train.log``."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import time
from collections.abc import Mapping
from typing import Any

from parallel2d.base import files
from parallel2d.base.config import Job
from parallel2d.base.errors import did_you_mean
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.metrics_row import read_rows

SUMMARY = "summary.json"
_MEASURED = (int, float, type(None))
_COMMAND = "python -m parallel2d."
# Launcher -> beginning of the command that starts ranks
_STARTERS = {"torchrun": "torchrun ... -m ", "srun": "srun ... python -m "}


def _read_rows(run_dir: str) -> tuple[dict[str, Any], dict[str, tuple[float, int]]]:
    """Read ``metrics.jsonl``. Return the newest value of each key, and the smallest value of each
    loss with its step."""
    last: dict[str, Any] = {}
    best: dict[str, tuple[float, int]] = {}
    path = os.path.join(run_dir, "metrics.jsonl")
    with contextlib.suppress(FileNotFoundError), files.open_regular(path) as file:
        for row in read_rows(file):
            last.update(row)
            for key in [key for key in row if key.split("/")[-1] == keys.LOSS]:
                value = files.number(row[key])
                least, _ = best.setdefault(key, (value, row[keys.STEP]))
                # A comparison with NaN is always false, so a NaN in `least` is replaced explicitly.
                if math.isnan(least) or value < least:
                    best[key] = (value, row[keys.STEP])
    return last, best


def summarize(
    job: Job,
    *,
    stopped: bool,
    checkpoint: str | None,
    best: str | None = None,
    reason: str | None = None,
    launcher: str = "self",
) -> list[str]:
    """Write ``summary.json``, and return the summary as lines for users. Called on rank 0 after the
    last row.

    Args:
        stopped: True if the run was asked to end before its last step.
        checkpoint: path of the last checkpoint.
        best: path of the best checkpoint.
        reason: the reason if the run itself ended before its last step, for example by
            ``train.stop``.
        launcher: as in `RankIdentity`.
    """
    last, best_losses = _read_rows(job.run_dir)
    if not last:
        return []
    objective = job.config.train.objective
    # JSON has no NaN, so losses that are not finite become null.
    measured = {}
    for key, value in last.items():
        if type(value) in _MEASURED:
            measured[key] = value
    losses: dict[str, Any] = {}
    for key, (value, step) in best_losses.items():
        losses[key] = {"value": None if math.isnan(value) else value, "step": step}
    summary = {
        "step": last[keys.STEP],
        "steps": job.config.train.steps,
        "stopped": stopped,
        "tokens": last.get(keys.TOKENS),
        "wall_s": last.get(keys.WALL_S),
        "objective": {
            "name": objective,
            "measured": objective in measured,
            "value": measured.get(objective),
        },
        "reason": reason,
        "checkpoint": checkpoint,
        "best_checkpoint": best,
        "last": measured,
        "best": losses,
    }
    lines = [*_results(summary), *_commands(job, summary, launcher)]
    try:
        files.replace(os.path.join(job.run_dir, SUMMARY), json.dumps(summary, indent=1))
    except OSError as error:  # a full disk must not fail a finished training
        lines.append(f"warning: {SUMMARY} cannot be written: {error.strerror}")
    return lines


def _results(summary: Mapping[str, Any]) -> list[str]:
    last, seconds = summary["last"], summary["wall_s"] or 0.0
    parts = [f"step {summary['step']} of {summary['steps']}"]
    if summary["tokens"]:
        parts.append(f"{summary['tokens']:,} tokens")
    days, clock = int(seconds // 86400), time.strftime("%H:%M:%S", time.gmtime(seconds % 86400))
    parts.append(f"{days} days {clock}" if days else clock)
    if last.get(keys.GOODPUT) is not None:
        parts.append(f"goodput {last[keys.GOODPUT]:.1%}")
    first = "stopped" if summary["stopped"] or summary["reason"] else "done"
    lines = [f"{first:<12}{', '.join(parts)}"]
    if summary["reason"]:
        lines.append(f"reason      {summary['reason']}")
    for key, best in summary["best"].items():
        label = key.removesuffix("/loss").replace("/", " ")
        at_end, least = files.number(last.get(key)), files.number(best["value"])
        lines.append(
            f"{label:<11} {at_end:.4f} at the end, best {least:.4f} at step {best['step']}"
        )
    return lines


def _commands(job: Job, summary: Mapping[str, Any], launcher: str) -> list[str]:
    run_dir = shlex.quote(_short(job.run_dir, job))
    lines = []
    for label, key in (("checkpoint", "checkpoint"), ("best", "best_checkpoint")):
        if summary[key]:
            lines.append(f"{label:<12}{_short(summary[key], job)}")
    if summary["checkpoint"] and not summary["reason"]:
        start = _STARTERS.get(launcher, "python -m ")
        if launcher == "srun" and os.environ.get("ENVIRONMENT") == "BATCH":  # as sbatch sets it
            start = f"sbatch SCRIPT, with {start}"
        words = files.printable(shlex.join(_resume_overrides(job, summary)), 4000)
        lines.append(f"continue    {start}parallel2d.train {words} hydra.run.dir={run_dir}")
    lines.append(f"report      {_COMMAND}report {run_dir}")
    if job.config.metrics.tensorboard:
        lines.append(f"            tensorboard --logdir {run_dir}")
        lines.append("            http://localhost:6006/#custom_scalars  (once it runs)")
    if summary["checkpoint"]:
        source = shlex.quote(_short(summary["checkpoint"], job))
        target = shlex.quote(f"{_short(job.run_dir, job)}/export")
        model = job.config.model
        form = "peft" if getattr(model, "adapter", None) else "hf"
        if model.family == "custom":
            form = "safetensors"
        convert = f"{_COMMAND}checkpoint convert --to {form}"
        lines.append(f"export      {convert} {source} {target}")
    return lines


# Overrides that are not repeated in the command that continues a run: they affect only its
# beginning, or get another value
_NOT_AGAIN = (
    *("train.steps=", "train.epochs=", "train.certify", "launch.host_id="),
    *("hydra.run.", "checkpoint.resume=", "checkpoint.load="),
)


def _resume_overrides(job: Job, summary: Mapping[str, Any]) -> list[str]:
    """Return the overrides of the command that continues the run: up to the configured number of
    steps if the run was stopped, otherwise to twice the number of steps."""
    words = []
    for word in job.overrides:
        if not word.lstrip("+").startswith(_NOT_AGAIN):
            words.append(word)
    epochs = job.config.train.epochs
    further = 1 if summary["stopped"] else 2
    if epochs is not None:
        return [*words, f"train.epochs={further * epochs}"]
    steps = summary["steps"] if summary["stopped"] else 2 * summary["step"]
    return [*words, f"train.steps={steps}"]


def _short(path: str, job: Job) -> str:
    """Return ``path`` for use in the user's shell: relative to its current folder if the path is
    below this folder."""
    # With hydra.job.chdir=true, the current folder of this process is the run directory, and not
    # the folder of the shell.
    if "://" in path or os.path.realpath(job.run_dir) == os.getcwd():
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _read_summary(run_dir: str, part: str) -> dict[str, Any]:
    """Return the entry ``part`` of the summary. Return an empty dict if the file is missing or
    invalid."""
    try:
        found = files.read_json(os.path.join(run_dir, SUMMARY))[part]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def read_objective(run_dir: str) -> float | None:
    """Return the last value of ``train.objective``: NaN if it is not finite, None if it was not
    measured or the run has no summary."""
    objective = _read_summary(run_dir, "objective")
    return files.number(objective.get("value")) if objective.get("measured") is True else None


def objective_missing(name: str, run_dir: str) -> str:
    """Return the error message for a job of a sweep that has not measured its objective."""
    hint = did_you_mean(name, list(_read_summary(run_dir, "last")))
    return (
        f"train.objective={name} was never measured, so the sweep cannot judge the job{hint}; "
        "validation/loss needs train.validate_every and validation data"
    )


def note_failure(run_dir: str, text: str) -> None:
    """Append the error of a run to its ``train.log``, if the file is writable."""
    stamped = f"{time.strftime('%H:%M:%S')} {files.for_terminal(text)}\n"
    path = os.path.join(run_dir, "train.log")
    with contextlib.suppress(OSError), open(path, "a", opener=files.regular) as file:
        file.write(stamped)

"""Creates the tables of a report (`tables`), and lists the events of a run (`events_of`)."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, repeat
from operator import attrgetter, itemgetter

import numpy as np

from parallel2d.base import files
from parallel2d.instruments.report.runs import (
    BYTES,
    LOST,
    PHASES,
    RATES,
    WAITS,
    Run,
    parts_of,
    ratio,
)
from parallel2d.training.metrics import keys
from parallel2d.training.run_directory.start import changes_since, flat

TextRow = dict[str, str]  # column -> text

# Units from the smallest, each with its size
BYTE_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_UNITS = {**dict.fromkeys(BYTES.values(), BYTE_UNITS), **dict.fromkeys(LOST.values(), TIME_UNITS)}
_UNITS |= dict.fromkeys((keys.STEP_S, keys.WALL_S), TIME_UNITS)
# Formats of values that have neither unit
_FORMS = {
    "share": "{:.1%}",
    "difference": "{:+.2%}",
    keys.STEP: "{:.0f}",
    keys.LOSS: "{:.4f}",
    keys.PEAK_GIB: "{:.3g} GiB",
    keys.TOKENS_PER_S: "{:,.0f}",
    keys.MODEL_TFLOPS_PER_RANK: "{:.4g}",
    keys.MFU: "{:.1%}",
}
_MEANS = {
    **dict(zip(("tokens/s", "TFLOP/s per rank", "MFU"), RATES, strict=True)),
    "time of a step": keys.STEP_S,
    **{f"{axis} per step": key for axis, key in BYTES.items()},
}


def fitting_unit(value: float, units: Mapping[str, float]) -> str:
    """Return the largest of ``units`` in which ``value`` is at least 1. For zero, return the unit
    of size 1."""
    smaller = bisect_right(list(units.values()), abs(value or 1.0))
    return list(units)[max(0, smaller - 1)]


def text_of(key: str, value: float) -> str:
    """Format ``value`` of ``key`` with its unit, such as ``1.5 MB``; ``-`` for NaN."""
    if math.isnan(value):
        return "-"
    if key in _FORMS:
        return _FORMS[key].format(value)
    unit = fitting_unit(value, _UNITS[key])
    return f"{value / _UNITS[key][unit]:.4g} {unit}"


def tables(runs: Sequence[Run]) -> dict[str, list[TextRow]]:
    """Return the rows of each table, by its heading. A run that continued with another layout has a
    row for each layout. Tables without rows are omitted."""
    parts = parts_of(*runs)
    found = {
        "Runs": list(map(_comparison, parts)),
        "Settings that differ": _differing_settings(runs),
        "Measured and predicted": list(chain(*map(_measured_and_predicted, parts))),
        "Where time goes": list(map(_times, parts)),
        "Events": [],
    }
    for run in runs:
        for kind, step, text in events_of(run):
            row = {"run": run.name, "step": text_of(keys.STEP, step), "event": kind}
            # Checkpoints are omitted: there are many, and the curves show them.
            if kind != "checkpoint":
                found["Events"].append(row | {"what": files.printable(text, 2000)})
    return dict(filter(itemgetter(1), found.items()))


def _comparison(run: Run) -> TextRow:
    mesh = run.layout.get("mesh")
    sizes = mesh if isinstance(mesh, dict) else {}
    shown = [sizes[axis] for axis in keys.AXES if axis in sizes] or ["?"]
    certified = any(map(attrgetter("certified"), run.segments))
    row = {
        "run": run.name,
        "strategy": files.printable(run.layout.get("strategy", "-"), 40),
        "mesh": files.printable(" x ".join(map(str, shown)), 60),
        "certified": "yes" if certified else "-",
    }
    validation = run[keys.VALIDATION_LOSS]
    best = np.argmin(np.nan_to_num(validation, nan=math.inf))
    steps = np.where(np.isnan(validation), math.nan, run[keys.STEP])
    values = {
        "steps": (keys.STEP, run.last(keys.STEP)),
        "loss": (keys.LOSS, run.last(keys.LOSS)),
        "validation loss": (keys.LOSS, run.last(keys.VALIDATION_LOSS)),
        "best validation loss": (keys.LOSS, validation[best]),
        "at step": (keys.STEP, steps[best]),
        "goodput": ("share", ratio(run.total(keys.USEFUL_S), run.total(keys.WALL_S))),
        "peak memory of a device": (keys.PEAK_GIB, run.last(keys.PEAK_GIB)),
        "peak memory of a process": (keys.PEAK_GIB, run.last(keys.PEAK_RSS_GIB)),
    }
    for what, key in _MEANS.items():
        values[f"{what} (mean)"] = (key, run.mean(key))
    known = run.known(keys.STEP_S)
    median = float(np.median(known)) if len(known) else math.nan
    values["time of a step (median)"] = (keys.STEP_S, median)
    return row | {what: text_of(*value) for what, value in values.items()}


def _differing_settings(runs: Sequence[Run]) -> list[TextRow]:
    """Return a row for each key with different values among the runs; none if a run has no keys."""
    rows: list[TextRow] = []
    if not all(map(attrgetter("segments"), runs)):
        return rows
    settings = {}
    for run in runs:
        settings[run.name] = dict(flat(run.segments[-1].config))
    for name in dict.fromkeys(chain(*settings.values())):
        row = {}
        for run_name, each in settings.items():
            row[run_name] = files.printable(each.get(name, "-"), 80)
        if len(set(row.values())) > 1:
            rows.append({"": files.printable(name, 80), **row})  # No run has an empty name.
    return rows


def _measured_and_predicted(run: Run) -> list[TextRow]:
    """Return a row for each predicted quantity, and for the bytes of each axis."""
    rows: list[TextRow] = []
    for what, key in _MEANS.items():
        measured, predicted = run.mean(key), run.predicted(key)
        row = {"run": run.name, "mean": what, "measured": text_of(key, measured)}
        row["predicted"] = text_of(key, predicted)
        row["difference"] = text_of("difference", ratio(measured, predicted) - 1)
        # Unexpected bytes of an axis get a row too.
        if predicted > 0 or (measured > 0 and key in BYTES.values()):
            rows.append(row)
    return rows


def _times(run: Run) -> TextRow:
    row = {"run": run.name}
    for what, key in {**PHASES, **WAITS}.items():
        share = ratio(run.mean(key), run.mean(keys.STEP_S))
        row[f"{what} (of a step)"] = text_of("share", share)
    for cause, key in LOST.items():
        row[f"{cause} (lost)"] = text_of(key, run.total(key))
    return row


def events_of(run: Run) -> list[tuple[str, float, str]]:
    """Return (kind, step, text) of the events of a run: starts with their changes, checkpoints,
    replicas that failed or rejoined, and the end of a stopped run. The event of a checkpoint is at
    the step of the row that has its seconds."""
    found: list[tuple[str, float, str]] = []
    # The first start is compared with itself, which gives no changes.
    for before, segment in pairwise((*run.segments[:1], *run.segments)):
        kind = "restart" if segment.restarted else "start"
        versions = " ".join(map(str, chain(*segment.versions.items())))
        command = shlex.join(("parallel2d", "train", *segment.command))
        text = f"start {segment.number}, {segment.begun}, {versions}: {command}"
        found.append((kind, segment.first_step, text))
        changes = "; ".join(changes_since(before, segment))
        if changes:
            found.append(("changed settings", segment.first_step, changes))
    saved = run[keys.STEP][run[keys.time_key("checkpoint_s")] > 0]
    found += zip(repeat("checkpoint"), saved, repeat("at this step, or since the row before"))
    found += _membership_changes(run)
    reason = run.summary.get("reason")
    if run.summary.get("stopped") is True or isinstance(reason, str):
        found.append(("stop", run.last(keys.STEP), str(reason or "it was asked to end")))
    return found


def _membership_changes(run: Run) -> list[tuple[str, float, str]]:
    """Return the failures and joins of replicas, in the format of `events_of`. A restart of all
    ranks sets the totals to 0."""
    totals = []
    for key in (keys.REPLICAS_JOINED, keys.REPEATED_SAMPLES):
        totals.append(run[key])
    joined, samples = np.nan_to_num(np.diff(np.stack(totals))).clip(0.0)
    seconds = np.nan_to_num(np.diff(run[keys.REPLICAS_LOST_S])).clip(0.0)
    there, steps = run[keys.REPLICAS], run[keys.STEP]
    moved = np.nan_to_num(np.diff(there))
    found: list[tuple[str, float, str]] = []
    for before in np.flatnonzero(joined + samples + abs(moved)):
        text = (
            f"{there[before + 1]:.0f} live, {joined[before]:.0f} joined; "
            f"{samples[before]:.0f} samples recomputed, {seconds[before]:.2g} s lost"
        )
        found.append(("replicas", steps[before + 1], text))
    return found

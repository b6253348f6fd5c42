"""The tables of a report, as text: `tables`."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence

from parallel2d import files
from parallel2d.metrics import keys
from parallel2d.report.runs import Run, all_parts, phase_key, settings_of
from parallel2d.run_directory import Segment, changes_since

Table = tuple[str, list[str], list[list[str]]]  # heading, column names, rows
# Quantity, measured, predicted; None where it is not known
Compared = tuple[str, float | None, float | None]

_MB = 1e6
# How a key is shown, with its unit; communication has names of its own, see `quantity_of`
_QUANTITIES = {
    keys.LOSS: "loss",
    keys.VALIDATION_LOSS: "validation loss",
    keys.GRAD_NORM: "gradient norm",
    keys.LEARNING_RATE: "learning rate",
    keys.STEP_S: "step s",
    keys.FIRST_STEP_S: "first step s",
    keys.TOKENS_PER_S: "tokens/s",
    keys.TOKENS_PER_S_PER_RANK: "tokens/s per rank",
    keys.MODEL_TFLOPS_PER_RANK: "TFLOP/s per rank",
    keys.MFU: "MFU (share of the peak)",
    keys.PEAK_GIB: "peak memory of the device GiB",
    keys.PEAK_RSS_GIB: "peak memory of the process GiB",
    keys.GOODPUT: "goodput (share of the wall time)",
}


def _words(name: str) -> str:
    """``first_step`` as `first step`."""
    return name.replace("_", " ")


_CERTIFIED = {"True": "yes", "False": "no"}
_TIME_COLUMNS = [
    "run",
    *(f"{_words(phase)} (of a step)" for phase in keys.PHASES),
    *(f"waits for {axis} (of a step)" for axis in keys.AXES),
    *(f"{_words(cause)} (s lost)" for cause in keys.LOSSES),
]
_BESIDE_COLUMNS = ["run", "per step", "measured", "predicted", "difference"]
_START_COLUMNS = ["run", "start", "begun", "first step", "why", "mesh", "changed"]
_ORIGIN_COLUMNS = [
    "run",
    "from step",
    "begun",
    "parallel2d",
    "torch",
    "python",
    "certificate",
    "command",
]
_MOST_SETTINGS = 60
# Settings that say where a run is, not what it does
_PLACES = ("launch.host_id", "data.cache_dir")


def tables(runs: Sequence[Run]) -> list[Table]:
    """Tables of a report: the comparison of the runs, the settings in which they differ, their
    starts, what was measured beside what was predicted, how the time was spent, and how each run
    was made. A run that went on with another layout has a row for each of its layouts. Tables
    without rows are left out."""
    parts = all_parts(runs)
    compared = [figures(part) for part in parts]
    starts: list[list[str]] = []
    origins: list[list[str]] = []
    for run in runs:
        starts += _starts(run)
        origins += _origins(run)
    beside: list[list[str]] = []
    for part in parts:
        beside += [_beside_row(part, each) for each in measured_and_predicted(part)]
    names = [run.name for run in runs]
    found: list[Table] = [
        ("Runs", list(compared[0]), [list(row.values()) for row in compared]),
        ("Settings that differ", ["key", *names], _differing_settings(runs)),
        ("Starts", _START_COLUMNS, starts),
        ("Measured and predicted", _BESIDE_COLUMNS, beside),
        ("Where time goes", _TIME_COLUMNS, [_time_row(part) for part in parts]),
        ("How each run was made", _ORIGIN_COLUMNS, origins),
    ]
    return [table for table in found if table[2]]


def figures(run: Run) -> dict[str, str]:
    """The columns of the comparison, as text; ``-`` where nothing was measured."""
    useful, wall = run.total(keys.USEFUL_S), run.total(keys.WALL_S)
    goodput = useful / wall if useful is not None and wall else run.last(keys.GOODPUT)
    shown = {
        "run": run.name,
        "strategy": files.printable(run.layout.get("strategy", "-"), 40),
        "mesh": mesh_text(run),
        "certified": _certified(run),
        "steps": str(run.rows[-1][keys.STEP]),
        "loss": number_text(run.last(keys.LOSS), "{:.4f}"),
        "tokens/s": number_text(run.median(keys.TOKENS_PER_S), "{:,.0f}"),
        "step s": number_text(run.median(keys.STEP_S), "{:.4g}"),
        "TFLOP/s per rank": number_text(run.median(keys.MODEL_TFLOPS_PER_RANK), "{:.4g}"),
        "MFU": number_text(run.median(keys.MFU), "{:.1%}"),
        "goodput": number_text(goodput, "{:.1%}"),
    }
    for axis in keys.AXES:
        # The mean: with sync=diloco most steps send nothing between replicas.
        measured = run.mean(keys.communication_key(axis, "bytes"))
        shown[f"{axis} MB/step"] = number_text(measured, "{:.4g}", 1 / _MB)
    memory = run.last(keys.PEAK_GIB) or run.last(keys.PEAK_RSS_GIB)
    shown["peak GiB"] = number_text(memory, "{:.3g}")
    shown["validation loss"] = number_text(run.last(keys.VALIDATION_LOSS), "{:.4f}")
    shown["best validation loss"] = _best_text(run)
    return shown


def _best_text(run: Run) -> str:
    losses = run.series(keys.VALIDATION_LOSS)
    if not losses:
        return "-"
    step, lowest = min(losses, key=lambda point: point[1])
    return f"{lowest:.4f} at step {step}"


def measured_and_predicted(run: Run) -> list[Compared]:
    """Per step and rank: the mean of the bytes of each axis that was measured, and the median of
    any other quantity that the layout predicts, such as ``time/step_s``."""
    found: list[Compared] = []
    for axis in keys.AXES:
        key = keys.communication_key(axis, "bytes")
        measured = run.mean(key)
        if measured is not None:
            found.append((key, measured, run.predicted(key)))
    known = {key for key, _, _ in found}
    for key in run.section("predicted"):
        predicted = run.predicted(key)
        if key not in known and predicted is not None:
            found.append((key, run.median(key), predicted))
    return found


def quantity_of(key: str) -> tuple[str, float]:
    """How a key is shown, with its unit, and by what its values are multiplied for that."""
    parts = key.split("/")
    if len(parts) == 3 and parts[0] == "comm" and parts[2] == "bytes":
        return f"{parts[1]} MB", 1 / _MB
    # A layout that another version wrote may predict a quantity that has no name here.
    return _QUANTITIES.get(key) or files.printable(key, 60), 1.0


def _beside_row(run: Run, compared: Compared) -> list[str]:
    key, measured, predicted = compared
    quantity, scale = quantity_of(key)
    expected = "not predicted"
    if predicted is not None:
        expected = number_text(predicted, "{:,.6g}", scale)
    difference = "-"
    # A prediction of zero has no relative difference.
    if predicted and measured is not None:
        difference = f"{measured / predicted - 1:+.2%}"
    return [run.name, quantity, number_text(measured, "{:,.6g}", scale), expected, difference]


def _time_row(run: Run) -> list[str]:
    waits = [keys.communication_key(axis, "exposed_seconds") for axis in keys.AXES]
    row = [run.name]
    for key in [*map(phase_key, keys.PHASES), *waits]:
        row.append(number_text(run.share(key), "{:.1%}"))
    for cause in keys.LOSSES:
        row.append(number_text(run.total(keys.lost_key(cause)), "{:.1f}"))
    return row


def _differing_settings(runs: Sequence[Run]) -> list[list[str]]:
    """A row for each key of the configuration that not all runs have the same value of."""
    if not all(run.config for run in runs):
        return []
    settings = [settings_of(run.config) for run in runs]
    rows: list[list[str]] = []
    for name in dict.fromkeys(itertools.chain(*settings)):
        values = [files.printable(each.get(name, "-"), 80) for each in settings]
        if name not in _PLACES and len(set(values)) > 1:
            rows.append([files.printable(name, 80), *values])
    if len(rows) > _MOST_SETTINGS:
        left = len(rows) - _MOST_SETTINGS
        rows = [*rows[:_MOST_SETTINGS], [f"and {left} more", *[""] * len(runs)]]
    return rows


def _starts(run: Run) -> list[list[str]]:
    """Of each start: its number, when it began, its first step, why, its mesh, and what it has
    otherwise than the one before. All as text; nothing of a run that was started once."""
    rows: list[list[str]] = []
    if len(run.segments) == 1:
        return rows
    before: Segment | None = None
    for segment in run.segments:
        changes: list[str] = []
        if before is not None:
            changes = changes_since(before, segment)
        rows.append(
            [
                run.name,
                str(segment.number),
                files.printable(segment.begun, 40),
                str(segment.first_step),
                "restart of workers" if segment.restarted else "start",
                _sizes_text(segment.layout.get("mesh")),
                files.printable("; ".join(changes), 400) or "-",
            ]
        )
        before = segment
    return rows


def _origins(run: Run) -> list[list[str]]:
    """Of each start by a command, with other versions or another certificate than the one before:
    when it began, and these. All as text."""
    rows: list[list[str]] = []
    before: list[str] = []
    for segment in run.segments:
        versions = [
            files.printable(segment.versions.get(name) or "-", 40)
            for name in ("parallel2d", "torch", "python")
        ]
        words = files.printable(shlex.join(segment.command), 2000)
        certificate = "yes" if segment.certified else "none"
        made = [*versions, certificate, f"parallel2d train {words}".rstrip()]
        if made != before:
            begun = files.printable(segment.begun, 40)
            rows.append([run.name, str(segment.first_step), begun, *made])
        before = made
    return rows


def _certified(run: Run) -> str:
    if run.segments:
        return "yes" if any(segment.certified for segment in run.segments) else "-"
    return _CERTIFIED.get(str(run.certificate.get("passed")), "-")  # of an older run


def mesh_text(run: Run) -> str:
    """Sizes of the axes: ``2 x 4 x 1``."""
    return _sizes_text(run.layout.get("mesh"))


def _sizes_text(mesh: object) -> str:
    sizes = mesh if isinstance(mesh, dict) else {}
    return " x ".join(files.printable(sizes.get(axis, "?"), 20) for axis in keys.AXES)


def number_text(value: float | None, form: str, scale: float = 1.0) -> str:
    """``value * scale`` formatted by ``form``, or ``-`` for None."""
    if value is None:
        return "-"
    return form.format(value * scale)

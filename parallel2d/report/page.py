"""Makes the report: `markdown`, for reading in a terminal or a merge request, and `page`, the same
with plots as one HTML file."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from parallel2d.metrics import keys
from parallel2d.report.plots import line_plot
from parallel2d.report.runs import (
    LOSSES,
    Moved,
    Points,
    Run,
    figures,
    measured_and_predicted,
    number_text,
    phase_key,
)

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;
max-width:1180px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}
td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1.2em}
svg{width:100%;height:auto}.grid{stroke:#e5e5e5}.tick{font-size:11px;fill:#555}.title{font-size:13px;font-weight:600}
"""

_TIME_COLUMNS = [
    "run",
    *(f"{phase} (of a step)" for phase in keys.PHASES),
    *(f"{cause} (s lost)" for cause in LOSSES),
]

Table = tuple[str, list[str], list[list[str]]]  # heading, column names, rows


def tables(runs: Sequence[Run]) -> list[Table]:
    """Tables of a report: the comparison of the runs, measured and predicted bytes per axis, and
    how the time was spent."""
    compared = [figures(run) for run in runs]
    columns = list(compared[0])
    found: list[Table] = [("Runs", columns, [list(row.values()) for row in compared])]
    moved: list[list[str]] = []
    for run in runs:
        moved += [_moved_row(run, axis) for axis in measured_and_predicted(run)]
    if moved:
        columns = ["run", "axis", "measured", "predicted", "difference"]
        found.append(("Bytes that a rank sends per step", columns, moved))
    found.append(("Where time goes", _TIME_COLUMNS, [_time_row(run) for run in runs]))
    return found


def _moved_row(run: Run, moved: Moved) -> list[str]:
    axis, measured, predicted = moved
    expected = "not predicted"
    difference = "-"
    if predicted is not None:
        expected = f"{predicted:,.0f}"
    # A prediction of zero has no relative difference either.
    if predicted:
        difference = f"{measured / predicted - 1:+.2%}"
    return [run.name, axis, f"{measured:,.0f}", expected, difference]


def _time_row(run: Run) -> list[str]:
    row = [run.name]
    whole = _total(run, keys.STEP_S)
    for phase in keys.PHASES:
        share = _total(run, phase_key(phase)) / whole if whole else None
        row.append(number_text(share, "{:.1%}"))
    for cause in LOSSES:
        lost = run.last(keys.lost_key(cause))
        row.append(number_text(lost, "{:.1f}"))
    return row


def _total(run: Run, key: str) -> float:
    return sum(value for _, value in run.series(key))


def markdown(runs: Sequence[Run]) -> str:
    """The report's tables as Markdown."""
    lines = ["# parallel2d report", ""]
    for heading, names, rows in tables(runs):
        lines += [f"## {heading}", ""]
        lines += [_row(names), _row(["---"] * len(names))]
        lines += [_row(cells) for cells in rows]
        lines.append("")
    return "\n".join(lines)


def page(runs: Sequence[Run]) -> str:
    """The report's tables and plots as one HTML file, which loads no other file."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>parallel2d report</title>"]
    parts += [f"<style>{STYLE}</style>", "<h1>parallel2d report</h1>"]
    parts += [_html_table(table) for table in tables(runs)]
    plots = _comparing_plots(runs)
    for run in runs:
        plots += _plots_of(run, f": {run.name}" if len(runs) > 1 else "")
    # A plot is an empty string where no run has its values.
    shown = "".join(f"<div>{plot}</div>" for plot in plots if plot)
    parts.append(f"<h2>Over the steps</h2><div class=plots>{shown}</div>")
    return "\n".join([*parts, "</html>"])


def _html_table(table: Table) -> str:
    heading, names, rows = table
    parts = [f"<h2>{html.escape(heading)}</h2>", "<table>"]
    parts += ["<tr>", *_html_cells("th", names)]
    for row in rows:
        parts += ["<tr>", *_html_cells("td", row)]
    parts.append("</table>")
    return "".join(parts)


def _html_cells(tag: str, cells: Sequence[str]) -> list[str]:
    return [f"<{tag}>{html.escape(cell)}" for cell in cells]


def _comparing_plots(runs: Sequence[Run]) -> list[str]:
    """Plots that compare the runs, with a line for each."""

    def lines(key: str) -> dict[str, Points]:
        return {run.name: run.series(key) for run in runs}

    return [
        line_plot("Loss", lines(keys.LOSS)),
        line_plot("Validation loss", lines(keys.VALIDATION_LOSS)),
        line_plot("Throughput", lines(keys.TOKENS_PER_S), "tokens/s"),
        line_plot("Goodput", lines(keys.GOODPUT), "share of wall time"),
        line_plot("Memory", {run.name: _memory(run) for run in runs}, "GiB, largest rank"),
    ]


def _plots_of(run: Run, label: str) -> list[str]:
    """Plots of one run, with a line for each mesh axis or each phase of a step."""
    seconds = {}
    for axis in keys.AXES:
        # An axis of one rank sends nothing and takes no time.
        if run.last(keys.communication_key(axis, "bytes")):
            seconds[axis] = run.series(keys.communication_key(axis, "seconds"))
    phases = {phase: run.series(phase_key(phase)) for phase in keys.PHASES}
    return [
        line_plot(f"Bytes per axis{label}", _bytes_lines(run), "sent per rank and step"),
        line_plot(f"Communication time{label}", seconds, "s per step"),
        line_plot(f"Step time{label}", phases, "s"),
    ]


def _bytes_lines(run: Run) -> dict[str, Points]:
    """The measured bytes of each axis, and the predicted ones as a horizontal line."""
    lines = {}
    for axis, measured, predicted in measured_and_predicted(run):
        if not measured and not predicted:
            continue
        points = run.series(keys.communication_key(axis, "bytes"))
        lines[axis] = points
        if predicted is not None:
            first, last = points[0][0], points[-1][0]
            lines[f"{axis} (predicted)"] = [(first, predicted), (last, predicted)]
    return lines


def _memory(run: Run) -> Points:
    """Peak memory of the device if it was measured, otherwise peak resident memory."""
    return run.series(keys.PEAK_GIB) or run.series(keys.PEAK_RSS_GIB)


def _row(cells: Sequence[str]) -> str:
    """A row of a Markdown table. Characters of a cell that Markdown would interpret are escaped."""
    escaped = [re.sub(r"([\\`*\[\]<>|&~])", r"\\\1", cell) for cell in cells]
    return "| " + " | ".join(escaped) + " |"

"""The report itself: Markdown for reading in a terminal or a merge request, HTML in one file for
everything else."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from parallel2d.report.plots import line_plot
from parallel2d.report.runs import AXES, LOSSES, PHASES, Run, figures, measured_and_predicted

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;
max-width:1180px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}
td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1.2em}
svg{width:100%;height:auto}.grid{stroke:#e5e5e5}.tick{font-size:11px;fill:#555}.title{font-size:13px;font-weight:600}
"""

Table = tuple[str, list[str], list[list[str]]]  # heading, column names, rows


def tables(runs: Sequence[Run]) -> list[Table]:
    """Comparison, bytes per axis against the prediction, where time went."""
    compared = [figures(run) for run in runs]
    moved = [
        [
            run.name, axis, f"{measured:,.0f}",
            f"{predicted:,.0f}" if predicted is not None else "not predicted",
            f"{measured / predicted - 1:+.2%}" if predicted else "-",
        ]
        for run in runs
        for axis, measured, predicted in measured_and_predicted(run)
    ]  # fmt: skip
    phases = []
    for run in runs:
        step = sum(value for _, value in run.series("time/step_s"))
        shares = [sum(value for _, value in run.series(f"time/{phase}_s")) for phase in PHASES]
        lost = [run.last(f"goodput/lost_{name}_s") for name in LOSSES]
        phases.append(
            [
                run.name,
                *(f"{share / step:.1%}" if step else "-" for share in shares),
                *(f"{seconds:.1f}" if seconds is not None else "-" for seconds in lost),
            ]
        )
    found: list[Table] = [("Runs", list(compared[0]), [list(row.values()) for row in compared])]
    if moved:
        found.append(
            (
                "Bytes that a rank sends per step",
                ["run", "axis", "measured", "predicted", "difference"],
                moved,
            )
        )
    names = [
        "run",
        *(f"{phase} (of a step)" for phase in PHASES),
        *(f"{name} (s lost)" for name in LOSSES),
    ]
    found.append(("Where time goes", names, phases))
    return found


def markdown(runs: Sequence[Run]) -> str:
    """The tables, and per run its mesh."""
    lines = ["# parallel2d report", ""]
    for heading, names, rows in tables(runs):
        lines += [
            f"## {heading}",
            "",
            _row(names),
            _row(["---"] * len(names)),
            *map(_row, rows),
            "",
        ]
    return "\n".join(lines)


def page(runs: Sequence[Run]) -> str:
    """The same with plots, as one HTML file that loads nothing."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>parallel2d report</title>"]
    parts += [f"<style>{STYLE}</style>", "<h1>parallel2d report</h1>"]
    for heading, names, rows in tables(runs):
        head = "".join(f"<th>{html.escape(name)}" for name in names)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows)
        parts.append(f"<h2>{html.escape(heading)}</h2><table><tr>{head}{body}</table>")
    plots = [
        line_plot("Loss", {run.name: run.series("loss") for run in runs}),
        line_plot("Validation loss", {run.name: run.series("validation/loss") for run in runs}),
        line_plot(
            "Throughput",
            {run.name: run.series("throughput/tokens_per_s") for run in runs},
            "tokens/s",
        ),
        line_plot(
            "Goodput",
            {run.name: run.series("goodput/fraction") for run in runs},
            "share of wall time",
        ),
        line_plot("Memory", {run.name: _memory(run) for run in runs}, "GiB, largest rank"),
    ]
    for run in runs:
        lines = {}
        for axis, measured, predicted in measured_and_predicted(run):
            if not measured and not predicted:
                continue
            points = lines[axis] = run.series(f"comm/{axis}/bytes")
            if predicted is not None:
                lines[f"{axis} (predicted)"] = [
                    (points[0][0], predicted),
                    (points[-1][0], predicted),
                ]
        label = f": {run.name}" if len(runs) > 1 else ""
        plots.append(line_plot(f"Bytes per axis{label}", lines, "sent per rank and step"))
        seconds = {
            axis: run.series(f"comm/{axis}/seconds")
            for axis in AXES
            if run.last(f"comm/{axis}/bytes")
        }
        plots.append(line_plot(f"Communication time{label}", seconds, "s per step"))
        plots.append(
            line_plot(
                f"Step time{label}", {phase: run.series(f"time/{phase}_s") for phase in PHASES}, "s"
            )
        )
    parts.append(
        "<h2>Over the steps</h2><div class=plots>"
        + "".join(f"<div>{plot}</div>" for plot in plots if plot)
        + "</div>"
    )
    return "\n".join([*parts, "</html>"])


def _memory(run: Run) -> list[tuple[float, float]]:
    return run.series("memory/peak_gib") or run.series("memory/peak_rss_gib")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(re.sub(r"([\\`*\[\]<>|&~])", r"\\\1", cell) for cell in cells) + " |"

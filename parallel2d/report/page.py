"""Makes the report: `markdown`, for reading in a terminal or a merge request, and `page`, the same
with drawings as one HTML file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from itertools import groupby

from parallel2d.report.drawings import Drawing, drawings
from parallel2d.report.findings import describe_runs
from parallel2d.report.overview import Table, tables
from parallel2d.report.runs import Run

# The browser refuses whatever would be loaded from elsewhere.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:1.5em auto;padding:0 1em;
color:#222;background:#fff;overflow-wrap:anywhere}
table{border-collapse:collapse}
.table{overflow-x:auto;margin:.6em 0}
td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
td.long{white-space:normal;text-align:left;min-width:20em;font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:1.2em}
figure{margin:0;min-width:0}
figcaption{font-weight:600;font-size:14px}
.controls{display:flex;flex-wrap:wrap;gap:.4em 1.2em;margin:.4em 0}
"""
CONTROLS = """<div class=controls>
<label>x axis <select id=over><option value=steps>steps<option value=tokens>tokens
<option value=hours>hours of wall time</select></label>
<label><input type=checkbox id=logarithmic> logarithmic y axis</label></div>"""
SCRIPT = """
const options = {
  responsive: true, displaylogo: false,
  // No others: plotly.js has one that would send the data to a service.
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};
const places = DRAWINGS.map((drawing, number) => {
  const place = document.getElementById("drawing-" + number);
  Plotly.newPlot(place, drawing.data, drawing.layout, options);
  return place;
});
const curves = places.filter((_, number) => DRAWINGS[number].over);
const over = document.getElementById("over");
over.addEventListener("change", () => {
  for (const place of curves) {
    const xs = place.data.map(trace => trace.meta[over.value]);
    Plotly.update(place, {x: xs}, {"xaxis.title.text": over.value, "xaxis.autorange": true});
  }
});
const logarithmic = document.getElementById("logarithmic");
logarithmic.addEventListener("change", () => {
  const type = logarithmic.checked ? "log" : "linear";
  for (const place of curves) {
    Plotly.relayout(place, {"yaxis.type": type, "yaxis.autorange": true});
  }
});
"""
_MOST_COLUMNS = 6
_LONG = 48  # characters, from which a cell is broken into lines


def markdown(runs: Sequence[Run]) -> str:
    """The sentences and tables of the report as Markdown."""
    lines = ["# parallel2d report", ""]
    sentences = describe_runs(runs)
    if sentences:
        lines += ["## What these runs show", ""]
        lines += [f"* {_escaped(sentence)}" for sentence in sentences]
        lines.append("")
    for heading, names, rows in tables(runs):
        lines += [f"## {heading}", ""]
        lines += [_row(names), _row(["---"] * len(names))]
        lines += [_row(cells) for cells in rows]
        lines.append("")
    return "\n".join(lines)


def page(runs: Sequence[Run], library: str) -> str:
    """The report as one HTML file, which loads no other file. ``library``: the source of
    plotly.js, which draws in it."""
    drawn = drawings(runs)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f'<meta http-equiv=Content-Security-Policy content="{POLICY}">',
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>parallel2d report</title><style>{STYLE}</style>",
        "<h1>parallel2d report</h1>",
    ]
    sentences = describe_runs(runs)
    if sentences:
        items = "\n".join(f"<li>{html.escape(sentence)}" for sentence in sentences)
        parts.append(f"<h2>What these runs show</h2><ul>\n{items}\n</ul>")
    compared, *others = tables(runs)
    parts.append(_html_table(compared))
    parts += _figures(drawn)
    parts += [_html_table(table) for table in others]
    parts.append(f"<script>{library}</script>")
    parts.append(f"<script>const DRAWINGS = {_in_script(drawn)};{SCRIPT}</script>")
    return "\n".join([*parts, "</html>"])


def _figures(drawn: Sequence[Drawing]) -> list[str]:
    """A place for each drawing, under the heading of its group."""
    parts: list[str] = []
    for group, numbered in groupby(enumerate(drawn), key=lambda each: each[1].group):
        parts.append(f"<h2>{html.escape(group)}</h2>")
        places = list(numbered)
        if places[0][1].over:
            parts.append(CONTROLS)
        parts.append("<div class=plots>")
        for number, drawing in places:
            caption = f"<figcaption>{html.escape(drawing.title)}</figcaption>"
            parts.append(f"<figure>{caption}<div id=drawing-{number}></div></figure>")
        parts.append("</div>")
    return parts


def _in_script(drawn: Sequence[Drawing]) -> str:
    """As JSON that ends no script, whatever a run is called."""
    values = [{"data": each.data, "layout": each.layout, "over": each.over} for each in drawn]
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _html_table(table: Table) -> str:
    heading, names, rows = table
    # A table of many columns and few rows is read without scrolling when it is turned.
    if len(names) > max(_MOST_COLUMNS, len(rows)):
        turned = [list(column) for column in zip(names, *rows, strict=True)]
        names, rows = turned[0], turned[1:]
    parts = [f"<h2>{html.escape(heading)}</h2>", "<div class=table><table>"]
    parts += ["<tr>", *(f"<th>{html.escape(name)}" for name in names)]
    for row in rows:
        parts += ["<tr>", *(_html_cell(cell) for cell in row)]
    parts.append("</table></div>")
    return "".join(parts)


def _html_cell(cell: str) -> str:
    kind = "<td class=long>" if len(cell) > _LONG else "<td>"
    return f"{kind}{html.escape(cell)}"


def _row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Characters that Markdown would interpret get a backslash."""
    return re.sub(r"([\\`*\[\]<>|&~])", r"\\\1", text)

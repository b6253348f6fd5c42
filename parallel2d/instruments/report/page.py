"""The report as text, `markdown`, and with figures as one HTML file, `page`."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from parallel2d.base.errors import ConfigError
from parallel2d.instruments.report.findings import describe_runs
from parallel2d.instruments.report.overview import TextRow, tables
from parallel2d.instruments.report.runs import Run

NOTE = "Times, rates and bytes are means over rows; the first step of a process is in none of them."
# The browser refuses to load external resources.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:1.5em auto;padding:0 1em;
color:#222;background:#fff;overflow-wrap:anywhere}
table{border-collapse:collapse}
.table{overflow-x:auto;margin:.6em 0}
td{padding:.25em .7em;border-bottom:1px solid #ddd}
td div{width:max-content;max-width:min(36em,75vw)}
tr:first-child,td:first-child{font-weight:600}
"""
# Only these buttons of plotly.js, because another button sends the data to a service.
BUTTONS = ["toImage", "zoom2d", "pan2d", "resetScale2d"]


def markdown(runs: Sequence[Run]) -> str:
    """Return the sentences and tables of the report as Markdown."""
    lines = ["# parallel2d report", "", "## Findings", ""]
    lines += [*(f"* {_escaped(sentence)}" for sentence in describe_runs(runs)), ""]
    for heading, rows in tables(runs).items():
        lines += [f"## {heading}", ""]
        for cells in (rows[0], ["---"] * len(rows[0]), *map(dict.values, rows)):
            lines.append(f"| {' | '.join(map(_escaped, cells))} |")
        lines.append("")
    return "\n".join([*lines, NOTE, ""])


def page(runs: Sequence[Run]) -> str:
    """Return one self-contained HTML file. Raises `ConfigError` if plotly is not installed."""
    try:
        from parallel2d.instruments.report.drawings import drawings
    except ImportError:
        raise ConfigError(
            "report.html is drawn with plotly: pip install 'parallel2d[report]' "
            "(--markdown writes report.md alone, without it)"
        ) from None
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f'<meta http-equiv=Content-Security-Policy content="{POLICY}">',
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>parallel2d report</title><style>{STYLE}</style>",
        "<h1>parallel2d report</h1><h2>Findings</h2><ul>",
        *(f"<li>{html.escape(sentence)}" for sentence in describe_runs(runs)),
    ]
    compared, *others = [_html_table(*table) for table in tables(runs).items()]
    parts += ["</ul>", compared, f"<p>{NOTE}"]
    for number, (title, figure) in enumerate(drawings(runs).items()):
        drawn = figure.to_html(
            {"responsive": True, "displaylogo": False, "modeBarButtons": [BUTTONS]},
            include_plotlyjs=number == 0,  # the complete library, only with the first figure
            full_html=False,
            default_height=f"{figure.layout.height}px",
            div_id=f"figure-{number}",
        )
        parts.append(f"<h2>{title}</h2>{drawn}")
    return "\n".join([*parts, *others, "</html>"])


def _html_table(heading: str, rows: Sequence[TextRow]) -> str:
    lines = [tuple(rows[0]), *map(tuple, map(dict.values, rows))]
    # Transpose a table with many columns and few rows, so that it needs no horizontal scrolling.
    if len(lines[0]) > max(6, len(rows)):
        lines = list(zip(*lines, strict=True))
    parts = [f"<h2>{heading}</h2><div class=table><table>"]
    for cells in lines:
        shown = "</div><td><div>".join(map(html.escape, cells))
        parts.append(f"<tr><td><div>{shown}</div>")
    return "".join([*parts, "</table></div>"])


def _escaped(text: str) -> str:
    """Escape characters that Markdown would interpret."""
    return re.sub(r"([\\`*\[\]<>|&~])", r"\\\1", text)

"""Figures of a report, drawn with plotly: `drawings`.

Every text from a run is escaped, because plotly.js interprets a few HTML tags.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from parallel2d.base import files
from parallel2d.instruments.report.overview import BYTE_UNITS, TIME_UNITS, events_of, fitting_unit
from parallel2d.instruments.report.runs import BYTES, LOST, PHASES, WAITS, Numbers, Run, parts_of
from parallel2d.training.metrics import keys

_CURVES = {
    "Training loss": keys.LOSS,
    "Validation loss": keys.VALIDATION_LOSS,
    "Throughput (tokens/s)": keys.TOKENS_PER_S,
    "Gradient norm": keys.GRAD_NORM,
    "Learning rate": keys.LEARNING_RATE,
    "Goodput (share of the wall time)": keys.GOODPUT,
    "Peak memory of a device (GiB)": keys.PEAK_GIB,
    "Peak memory of a process (GiB)": keys.PEAK_RSS_GIB,
}
# Unit of the x axis -> its key, and its size
_OVER = {
    "over steps": (keys.STEP, 1),
    "over tokens": (keys.TOKENS, 1),
    "over hours": (keys.WALL_S, 3600),
}
_SYMBOLS = {
    "start": "triangle-right",
    "restart": "x",
    "changed settings": "diamond",
    "checkpoint": "circle",
    "replicas": "triangle-down",
    "stop": "square",
}
_COLOURS = qualitative.Dark24
# Colors of the bars for measured and predicted bytes, one pair per axis
_PAIRS = ("#1f77b4", "#aec7e8", "#d62728", "#ff9896", "#2ca02c", "#98df8a")
ValueOf = Callable[[Run, str], float]


def drawings(runs: Sequence[Run]) -> dict[str, go.Figure]:
    """Return all figures for which these runs have values, by title."""
    parts = parts_of(*runs)
    waits = {"waits for data": PHASES["data"], **WAITS}
    spent = {"useful": keys.USEFUL_S, **LOST}
    compute = "compute, and unmeasured parts"
    found = {
        "Curves": _curves(runs),
        "Where a step's time goes (means)": _split(parts, Run.mean, keys.STEP_S, waits, compute),
        "Bytes that a rank sends per step (means)": _bytes_by_axis(parts),
        "Where the wall time goes": _split(runs, Run.last, keys.WALL_S, spent, "other"),
    }
    return {title: figure for title, figure in found.items() if figure.data}


def _curves(runs: Sequence[Run]) -> go.Figure:
    """Draw a line for each run and quantity over one x axis, and events as marks on the losses."""
    known = {}
    for key in _CURVES.values():
        known[key] = np.concatenate([run.known(key) for run in runs])
    known[keys.LOSS] = np.ones(1)  # always drawn, because it has the marks
    shown = {}
    for title, key in _CURVES.items():
        if len(known[key]):
            shown[title] = key
    height = 150 + 220 * len(shown) + 20 * len(runs)
    titles, space = list(shown), 40 / height
    figure = make_subplots(
        len(shown), 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=space
    )
    drawn: list[Run] = []  # the rows of each trace
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        # With few runs, the lines of the first runs are wider, so that equal curves are visible.
        line = {"color": colour, "width": 1.8 + 1.6 * max(0, min(len(runs), 4) - 1 - number)}
        for place, key in enumerate(shown.values(), 1):
            curve = go.Scatter(x=run[keys.STEP], y=run[key], line=line, connectgaps=True)
            # A line through one point is invisible without a marker.
            curve.update(mode="lines+markers", marker_size=3, legendgroup=number)
            curve.update(name=_short(run.name), showlegend=place == 1)
            figure.add_trace(curve, place, 1)
            drawn.append(run)
        marked, marks = _marks(run)
        figure.add_trace(marks.update(legendgroup=number, marker_color=colour), 1, 1)
        drawn.append(marked)
    # Entries of the legend
    for kind, symbol in _SYMBOLS.items():
        marker = {"symbol": symbol, "color": "#222222"}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=kind)
    figure.update_layout(updatemenus=_menus(figure, drawn))
    return _styled(figure, height, top=100)


def _marks(run: Run) -> tuple[Run, go.Scatter]:
    """Return the events of a run as marks on its losses, and the row of each event."""
    kinds, steps, texts = np.array(events_of(run), dtype=object).reshape(-1, 3).T
    places = np.searchsorted(run[keys.STEP], steps.astype(float)).clip(max=len(run.table) - 1)
    marked = replace(run, table=run.table[places])
    marks = go.Scatter(x=marked[keys.STEP], y=marked[keys.LOSS], mode="markers", hoverinfo="text")
    marks.hovertext = list(map(_wrapped, kinds + f" of {run.name}: " + texts))
    marks.marker = {"symbol": list(map(_SYMBOLS.get, kinds)), "size": 10}
    return marked, marks.update(showlegend=False, marker_line={"width": 1, "color": "#222222"})


def _menus(figure: go.Figure, drawn: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the menus for the unit of the x axis, and for linear or logarithmic y axes."""
    places = list(range(len(drawn)))
    over = []
    for label, (key, size) in _OVER.items():
        xs = []
        for run in drawn:
            xs.append((run[key] / size).tolist())
        over.append({"label": label, "method": "restyle", "args": [{"x": xs}, places]})
    scales = []
    for kind in ("linear", "log"):
        types = {}
        for axis in figure.select_yaxes():
            types[f"{axis.plotly_name}.type"] = kind
        scales.append({"label": f"{kind} y axes", "method": "relayout", "args": [types]})
    place = {"y": 1, "yanchor": "bottom", "pad": {"b": 30}}
    left = {**place, "x": 0, "xanchor": "left", "buttons": over}
    return [left, {**place, "x": 1, "xanchor": "right", "buttons": scales}]


def _split(
    runs: Sequence[Run], value_of: ValueOf, whole: str, parts: Mapping[str, str], rest: str
) -> go.Figure:
    """Draw a bar for each run: its seconds ``whole``, split into ``parts`` (label -> key) and the
    ``rest``."""
    bars: dict[str, Numbers] = {}
    for label, key in parts.items():
        bars[label] = np.nan_to_num([value_of(run, key) for run in runs])
    wholes = np.nan_to_num([value_of(run, whole) for run in runs])
    bars[rest] = np.maximum(0.0, wholes - sum(bars.values()))
    figure = _bars(runs, bars, TIME_UNITS, "stack")
    return figure.update_traces(marker_color="lightgrey", selector={"name": rest})


def _bytes_by_axis(parts: Sequence[Run]) -> go.Figure:
    bars: dict[str, Numbers] = {}
    for axis, key in BYTES.items():
        bars[axis] = np.nan_to_num([part.mean(key) for part in parts])
        bars[f"{axis}, predicted"] = np.nan_to_num([part.predicted(key) for part in parts])
    # In pairs of a light and a dark color
    return _bars(parts, bars, BYTE_UNITS, "group").update_layout(colorway=_PAIRS)


def _bars(
    runs: Sequence[Run], bars: Mapping[str, Numbers], units: Mapping[str, float], mode: str
) -> go.Figure:
    figure = go.Figure(layout={"barmode": mode})
    unit = fitting_unit(float(np.max(list(bars.values()))), units)
    # Names of runs differ, but shortened names may be equal.
    places = []
    for run in runs:
        places.append(html.escape(run.name))
    for label, lengths in bars.items():
        if lengths.any():
            figure.add_bar(orientation="h", name=label, x=lengths / units[unit], y=places)
    figure.update_xaxes(ticksuffix=f" {unit}", hoverformat=".4~g")
    names = []
    for run in runs:
        names.append(_short(run.name))
    figure.update_yaxes(type="category", autorange="reversed", tickvals=places, ticktext=names)
    return _styled(figure, 110 + 20 * len(figure.data) + 50 * len(runs), top=30)


def _styled(figure: go.Figure, height: int, top: int) -> go.Figure:
    return figure.update_layout(
        template="plotly_white",
        colorway=_COLOURS,
        height=height,
        margin={"l": 10, "r": 10, "t": top, "b": 10},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    )


def _short(name: str) -> str:
    """Shorten a path for a page of 400 pixels. The middle is removed, because both ends are
    informative."""
    return html.escape(name if len(name) < 25 else f"{name[:12]}…{name[-12:]}")


def _wrapped(text: str) -> str:
    lines = textwrap.wrap(files.printable(text, 400), 44)
    return "<br>".join(map(html.escape, lines))

"""What all drawings of a report have in common: `Drawing`, its layout, and names that fit and are
escaped."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from parallel2d import files

RUN_COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e",
    "#17becf", "#8c564b", "#e377c2", "#bcbd22", "#7f7f7f",
)  # fmt: skip
_LONGEST_NAME = 28


@dataclass(frozen=True)
class Drawing:
    """``data`` and ``layout`` as `Plotly.newPlot` takes them. ``over``: what its x axis counts can
    be chosen; ``group``: the heading it stands under."""

    title: str
    group: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    over: bool = False


def layout_of(*, x: str, y: str) -> dict[str, Any]:
    """The layout of a drawing whose axes have these titles."""
    axis = {"gridcolor": "#e8e8e8", "zerolinecolor": "#cccccc", "automargin": True}
    return {
        "height": 380,
        "margin": {"l": 52, "r": 10, "t": 34, "b": 40},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#222222"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "hovermode": "closest",
        "showlegend": True,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}},
    }


def short_name(text: str) -> str:
    """Short enough for a legend at 400 pixels; both ends of a path say something."""
    if len(text) > _LONGEST_NAME:
        half = (_LONGEST_NAME - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    return html.escape(text)


def escaped(text: str, longest: int) -> str:
    """At most ``longest`` characters, of which plotly.js takes none as a tag."""
    return html.escape(files.printable(text, longest))


def run_colour(number: int) -> str:
    """Of the run at this place, in every drawing."""
    return RUN_COLOURS[number % len(RUN_COLOURS)]

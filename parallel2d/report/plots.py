"""Draws line plots as inline SVG, so that a page needs neither a library nor a network:
`line_plot`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 260, 64, 34, 28, 12
MOST_POINTS = 600  # per line; more are thinned, ends kept


def line_plot(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], unit: str = ""
) -> str:
    """One SVG with a line per entry of ``lines`` (name -> (step, value) pairs), or an empty string
    if there is nothing to draw.

    The line of a name that ends in `` (predicted)`` is dashed.
    """
    drawn = {name: _thin(points) for name, points in lines.items() if points}
    if not drawn:
        return ""
    xs: list[float] = []
    ys: list[float] = []
    for points in drawn.values():
        xs += [x for x, _ in points]
        ys += [y for _, y in points]
    ticks = _ticks(min(ys), max(ys))
    frame = _Frame(min(xs), max(xs), ticks[0], ticks[-1])
    legend_rows = (len(drawn) + 1) // 2
    label = html.escape(title)
    shown_unit = f" [{html.escape(unit)}]" if unit else ""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 16 * legend_rows}" role="img" aria-label="{label}">',
        f'<text x="{LEFT}" y="16" class="title">{label}{shown_unit}</text>',
    ]
    parts += _grid(frame, ticks)
    for index, (name, points) in enumerate(drawn.items()):
        parts += _line(frame, index, name, points)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Frame:
    """The values at the edges of the plot."""

    left: float
    right: float
    low: float
    high: float

    def place(self, x: float, y: float) -> str:
        """Coordinates in the SVG, with a comma between them."""
        share = 0.5  # of the width: a single step is in the middle
        if self.right > self.left:
            share = (x - self.left) / (self.right - self.left)
        across = LEFT + (WIDTH - LEFT - RIGHT) * share
        up = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (y - self.low) / (self.high - self.low)
        return f"{across:.1f},{up:.1f}"


def _grid(frame: _Frame, ticks: Sequence[float]) -> list[str]:
    """A horizontal line for every tick, and labels of the first and the last step below."""
    parts = []
    for tick in ticks:
        y = frame.place(frame.left, tick).split(",")[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="grid"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y}" class="tick" text-anchor="end" '
            f'dy="0.35em">{_short(tick)}</text>'
        )
    for x, anchor in ((frame.left, "start"), (frame.right, "end")):
        across = frame.place(x, frame.low).split(",")[0]
        parts.append(
            f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" class="tick" '
            f'text-anchor="{anchor}">step {x:g}</text>'
        )
    return parts


def _line(frame: _Frame, index: int, name: str, points: Sequence[tuple[float, float]]) -> list[str]:
    """The line at ``index``, and its name below the plot."""
    colour = COLOURS[index % len(COLOURS)]
    dashed = ' stroke-dasharray="5 4"' if name.endswith("(predicted)") else ""
    parts = []
    # A line through one point would not be seen.
    if len(points) == 1:
        across, up = frame.place(*points[0]).split(",")
        parts.append(f'<circle cx="{across}" cy="{up}" r="3" fill="{colour}"/>')
    path = " ".join(frame.place(x, y) for x, y in points)
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashed}/>'
    )
    # Names are in two columns.
    key = LEFT + (index % 2) * 250
    below = HEIGHT + 16 * (index // 2) + 6
    parts.append(
        f'<line x1="{key}" x2="{key + 18}" y1="{below}" y2="{below}" stroke="{colour}" '
        f'stroke-width="2"{dashed}/>'
    )
    parts.append(
        f'<text x="{key + 24}" y="{below}" class="tick" dy="0.35em">{html.escape(name)}</text>'
    )
    return parts


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    step = max(1, math.ceil(len(points) / MOST_POINTS))
    kept = list(points[::step])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose [low, high]."""
    largest = max(abs(low), abs(high))
    if largest < 1e-300:
        low = high = 0.0
    # Equal values, but for rounding, get room above and below.
    if high - low <= 1e-12 * largest:
        middle = low
        if middle:
            low, high = middle - 0.5 * abs(middle), middle + 0.5 * abs(middle)
        else:
            low, high = 0.0, 1.0
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    # The smallest round step that is not below the exact one
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.floor(low / step)
    return [index * step for index in range(first, math.ceil(high / step) + 1)]


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:.4g}"

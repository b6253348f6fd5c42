"""Boxes, texts, arrows and lines of the pictures of the documentation.

A picture has a white background of its own, so it can be read on a light and on a dark page. It
names no font that would have to be loaded.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
INK, GREY = "#222222", "#8a8a8a"
# One color per mesh axis, then one for what is none of them.
REPLICATE, SHARD, TENSOR, COMPUTE = "#c2571a", "#2f6db5", "#3d8a3a", "#d9dde3"


def box(
    x: float, y: float, width: float, height: float, fill: str = "#ffffff", stroke: str = GREY
) -> str:
    """A rectangle with round corners, in px."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="5" fill="{fill}" stroke="{stroke}"/>'


def text(
    x: float,
    y: float,
    words: str,
    font: str = "13px",
    family: str = "sans-serif",
    color: str = INK,
    anchor: str = "start",
) -> str:
    """One line of text; ``anchor`` is ``start``, ``middle`` or ``end``."""
    style = f'style="font:{font} {family}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style} xml:space="preserve">{html.escape(words)}</text>'


def line(
    points: Iterable[tuple[float, float]],
    color: str = INK,
    width: float = 1.5,
    dashes: str = "none",
    arrows: str = "",
) -> str:
    """A line through ``points``; ``arrows`` is empty, ``end`` or ``both``."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    ends = ' marker-end="url(#arrow)"' if arrows else ""
    if arrows == "both":
        ends += ' marker-start="url(#arrow)"'
    style = f'fill="none" stroke="{color}" stroke-width="{width:g}" stroke-dasharray="{dashes}"'
    return f'<polyline points="{path}" {style}{ends}/>'


def save(name: str, width: float, height: float, title: str, parts: Iterable[str]) -> None:
    """Writes docs/images/``name``; ``title`` is what a screen reader says."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="5" '
        'markerHeight="5" orient="auto-start-reverse">'
        f'<path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>'
    )
    background = box(0, 0, width, height, "#ffffff", "none")
    body = [head, f"<title>{html.escape(title)}</title>", arrow, background, *parts, "</svg>", ""]
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / name).write_text("\n".join(body))
    print(f"wrote {IMAGES / name}")

"""Draw docs/images/architecture.svg from the table in docs/architecture.md.

python -m tools.docs.architecture
"""

from __future__ import annotations

import html
import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "architecture.md", DOCS / "images" / "architecture.svg"
ROW = re.compile(r"\| ([\w ]+) \| `([\w./]+)` \| (.+) \|")
COLORS = ("#f3ecf9", "#e8eef7", "#fdebd3", "#e5f2e2", "#f9e4e4", "#ececec")
WIDTH, LABEL, GAP, PAD = 1120, 110, 8, 12
PER_LINE, HEIGHT, LINE = 5, 62, 14


def layers(page: str) -> dict[str, list[tuple[str, str]]]:
    """Return layer -> [(module or package, purpose)] in the order of the page."""
    found: dict[str, list[tuple[str, str]]] = {}
    for layer, module, purpose in ROW.findall(page):
        found.setdefault(layer, []).append((module, purpose))
    return found


def draw(page: str) -> str:
    """Return the picture as SVG text. It has a band for each layer with a box for each module, in
    the order of the page."""
    parts: list[str] = []
    top = 28
    for color, (layer, modules) in zip(COLORS, layers(page).items(), strict=True):
        rows = -(-len(modules) // PER_LINE)
        height = rows * (HEIGHT + GAP) + 2 * PAD - GAP
        parts.append(_box(8, top, WIDTH - 16, height, color, "none"))
        parts.append(_text(20, top + height / 2 + 5, layer, "bold 14px"))
        width = (WIDTH - 16 - LABEL - PAD - GAP * (PER_LINE - 1)) / PER_LINE
        for index, (module, purpose) in enumerate(modules):
            x = LABEL + 8 + (index % PER_LINE) * (width + GAP)
            y = top + PAD + (index // PER_LINE) * (HEIGHT + GAP)
            parts.append(_box(x, y, width, HEIGHT, "#ffffff", "#8a8a8a"))
            parts.append(_text(x + 8, y + 18, module, "bold 13px", "monospace"))
            lines = textwrap.wrap(purpose.replace("`", ""), 30)
            assert len(lines) <= 2, f"{module}: too long for its box: {purpose}"
            for number, line in enumerate(lines):
                parts.append(_text(x + 8, y + 36 + number * LINE, line, "11.5px"))
        top += height + GAP
    parts.insert(0, _text(12, 18, "imports point down, or to the right within a layer", "12px"))
    size = f'width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, _box(0, 0, WIDTH, top, "#ffffff", "none"), *parts, "</svg>", ""])


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="5" fill="{fill}" stroke="{stroke}"/>'


def _text(x: float, y: float, text: str, font: str, family: str = "sans-serif") -> str:
    style = f'style="font:{font} {family}" fill="#222"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(PAGE.read_text()))
    print(f"wrote {PICTURE}")

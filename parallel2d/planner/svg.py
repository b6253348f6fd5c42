"""Axes of a picture in SVG without a library: `Scale`, `Panel`, `document`. The colours follow the
reader's choice of light or dark."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Six colours that people with any kind of colour vision tell apart, darker on light ground.
_LIGHT = ("#b45309", "#0f766e", "#1d4ed8", "#be185d", "#6d28d9", "#4d7c0f")
_DARK = ("#fbbf24", "#2dd4bf", "#7db2ff", "#f58ac0", "#b79cff", "#a3e635")


@dataclass(frozen=True)
class Scale:
    """From values to a share of an axis. ``ticks``: (value, text)."""

    low: float
    high: float
    is_logarithmic: bool
    ticks: tuple[tuple[float, str], ...]

    @classmethod
    def logarithmic(cls, values: Sequence[float]) -> Scale:
        """Ticks at round values, and room at both ends. ``values``: positive."""
        low, high = min(values) / 1.15, max(values) * 1.15
        factors: tuple[float, ...] = (1, 2, 5)
        if high < 10 * low:
            factors = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
        ticks = []
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
            for factor in factors:
                value = factor * 10.0**power
                if low <= value <= high:
                    ticks.append((value, short(value)))
        return cls(low, high, True, tuple(ticks))

    @classmethod
    def doubling(cls, values: Sequence[float]) -> Scale:
        """A tick at each value; every second has a text where there are many."""
        every = 1 if len(values) <= 8 else 2
        ticks = []
        for number, value in enumerate(values):
            from_last = len(values) - 1 - number
            ticks.append((value, "" if from_last % every else f"{value:,.0f}"))
        # One value alone is in the middle.
        low, high = min(values), max(values)
        if low == high:
            low, high = low / 2, high * 2
        return cls(low, high, True, tuple(ticks))

    @classmethod
    def linear(cls, high: float, *, percent: bool = False) -> Scale:
        """From 0 to the round number above ``high``, in at most six steps."""
        power = 10.0 ** math.floor(math.log10(high / 4))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= high / 5)
        count = math.ceil(high / step - 1e-9)
        ticks = []
        for number in range(count + 1):
            value = number * step
            ticks.append((value, f"{value:.0%}" if percent else short(value)))
        return cls(0.0, count * step, False, tuple(ticks))

    def share(self, value: float) -> float:
        if self.is_logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Panel:
    """A rectangle with two axes; lengths in units of the picture."""

    left: float
    top: float
    width: float
    height: float
    x: Scale
    y: Scale

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = self.left + self.width * self.x.share(x)
        return across, self.top + self.height * (1 - self.y.share(y))

    def grid(self, x_name: str, y_name: str) -> list[str]:
        """Lines and texts of the ticks, the name of the y axis above the panel and of the x axis
        below."""
        right, bottom = self.left + self.width, self.top + self.height
        parts = [f'<text class="small" x="{self.left}" y="{self.top - 8}">{y_name}</text>']
        for value, text in self.y.ticks:
            _, up = self.place(self.x.low, value)
            parts.append(
                f'<line class="grid" x1="{self.left}" x2="{right}" y1="{up:.1f}" y2="{up:.1f}"/>'
            )
            parts.append(
                f'<text class="tick" text-anchor="end" x="{self.left - 8}" y="{up + 4:.1f}">'
                f"{text}</text>"
            )
        for value, text in self.x.ticks:
            across, _ = self.place(value, self.y.low)
            parts.append(
                f'<line class="grid" x1="{across:.1f}" x2="{across:.1f}" y1="{self.top}" '
                f'y2="{bottom}"/>'
            )
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{across:.1f}" y="{bottom + 18}">'
                f"{text}</text>"
            )
        middle = self.left + self.width / 2
        parts.append(
            f'<text class="small" text-anchor="middle" x="{middle}" y="{bottom + 40}">{x_name}'
            "</text>"
        )
        return parts

    def level(self, value: float, name: str, *, at_left: bool = False) -> list[str]:
        """A dashed line across the panel, named below its right end or above its left one."""
        _, up = self.place(self.x.low, value)
        right = self.left + self.width
        anchor, across, shift = "end", right - 6, 13
        if at_left:
            anchor, across, shift = "start", self.left + 6, -5
        return [
            f'<line class="level" x1="{self.left}" x2="{right}" y1="{up:.1f}" y2="{up:.1f}"/>',
            f'<text class="small halo" text-anchor="{anchor}" x="{across}" y="{up + shift:.1f}">'
            f"{html.escape(name)}</text>",
        ]


def apart(places: Sequence[float], least: float, lowest: float) -> list[float]:
    """The places, moved down where two would be nearer than ``least``, and up again from where they
    would be below ``lowest``."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    found = list(places)
    for before, index in itertools.pairwise(order):
        found[index] = max(found[index], found[before] + least)
    limit = lowest
    for index in reversed(order):
        found[index] = min(found[index], limit)
        limit = found[index] - least
    return found


def short(value: float) -> str:
    """With two digits behind the point at most, and k for thousands of ten and more."""
    if value >= 10_000:
        return f"{value / 1000:g}k"
    if value >= 1:
        return f"{value:,.10g}" if value == round(value) else f"{value:,.2f}"
    return f"{value:.2g}"


def document(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """One SVG file, which loads no other."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{html.escape(title)}">',
            f"<style>{_style()}</style>",
            f'<rect class="ground" width="{width}" height="{height}"/>',
            *parts,
            "</svg>",
        ]
    )


def _style() -> str:
    light = ";".join(f"--c{number}:{colour}" for number, colour in enumerate(_LIGHT))
    dark = ";".join(f"--c{number}:{colour}" for number, colour in enumerate(_DARK))
    used = "".join(f".c{number}{{--c:var(--c{number})}}" for number in range(len(_LIGHT)))
    return (
        f"svg{{--ground:#fff;--text:#1f2937;--soft:#6b7280;--grid:#e5e7eb;{light}}}"
        "@media (prefers-color-scheme:dark){"
        f"svg{{--ground:#111827;--text:#f3f4f6;--soft:#9ca3af;--grid:#374151;{dark}}}}}"
        f"{used}"
        "text{font:12px system-ui,sans-serif;fill:var(--text)}"
        ".title{font-size:16px;font-weight:600}.small,.tick{fill:var(--soft)}"
        ".strong,.name{font-weight:600}.name{fill:var(--c)}"
        ".halo{paint-order:stroke;stroke:var(--ground);stroke-width:4px}"
        ".ground{fill:var(--ground)}.grid{stroke:var(--grid)}"
        ".level{stroke:var(--text);stroke-dasharray:6 4}"
        ".dot{fill:var(--c)}.line{stroke:var(--c);fill:none;stroke-width:1.4}"
        ".thick{stroke-width:2.2}.faint{opacity:.6}"
        ".ring{fill:none;stroke:var(--text);stroke-width:1.6}"
    )

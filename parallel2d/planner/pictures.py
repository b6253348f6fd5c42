"""Pictures of what a search has found, as SVG: `layouts_picture`, `scaling_picture`."""

from __future__ import annotations

import html
from collections.abc import Sequence

from parallel2d.config import ClusterConfig, TrainConfig
from parallel2d.config.parallel import STRATEGIES
from parallel2d.planner.layout_search import RankedLayout, SearchResult
from parallel2d.planner.scaling import ScalingResult
from parallel2d.planner.scaling_summary import SATURATED, batch_words
from parallel2d.planner.svg import Panel, Scale, apart, document, short

_GIB = 2**30
_WIDTH = 920


def layouts_picture(result: SearchResult, cluster: ClusterConfig) -> str:
    """Memory against step time of all layouts of a search. A filled circle is a layout whose peak
    is known, an open one is drawn at its states alone; one that does not fit is a cross, at the
    device's memory at least."""
    limit = cluster.device.memory_gib
    sizes = [_size(layout, limit) for layout in result.ranked]
    seconds = [layout.seconds for layout in result.ranked]
    panel = Panel(
        left=70,
        top=92,
        width=_WIDTH - 70 - 150,
        height=420,
        x=Scale.logarithmic(seconds),
        y=Scale.logarithmic([*sizes, *([limit] if limit is not None else [])]),
    )
    parts = [
        *_title(
            f"{len(result.ranked)} layouts on {result.chosen.cost.shape.world_size:,} ranks of "
            f"{cluster.name}: memory against step time",
            "filled: at its peak · open: states alone, more is needed · cross: does not fit",
        ),
        *panel.grid("seconds of a step", "GiB on the fullest rank"),
    ]
    if limit is not None:
        parts += panel.level(limit, f"device: {limit:g} GiB")
    # The chosen one comes last, above the others.
    order = sorted(zip(result.ranked, sizes, strict=True), key=lambda pair: not pair[0].reason)
    for layout, size in order:
        parts += _mark(panel, layout, size, limit)
    parts += _chosen_label(panel, result.chosen, _size(result.chosen, limit))
    parts += _strategy_legend(panel, result.ranked, limit)
    return document(_WIDTH, 570, "layouts of a search", parts)


def _size(layout: RankedLayout, limit: float | None) -> float:
    """In GiB."""
    size = layout.cost.needed / _GIB
    # Of one that was refused without a trace no more is known.
    if limit is not None and layout.reason.startswith("does not fit"):
        return max(size, limit)
    return size


def _is_too_large(layout: RankedLayout, limit: float | None) -> bool:
    # A slower one than the chosen was not refused for its size.
    return limit is not None and _size(layout, limit) >= limit


def _colour(strategy: str) -> str:
    """The class of the style sheet."""
    return f"c{list(STRATEGIES).index(strategy)}"


def _mark(panel: Panel, layout: RankedLayout, size: float, limit: float | None) -> list[str]:
    across, up = panel.place(layout.seconds, size)
    colour = _colour(layout.config.strategy.name)
    reason = layout.reason or "chosen"
    words = html.escape(f"{' '.join(layout.words)}: {layout.seconds:.3f} s, {reason}")
    told = f"<title>{words}</title>"
    if layout.reason and _is_too_large(layout, limit):
        path = f"M{across - 4:.1f} {up - 4:.1f}l8 8m0 -8l-8 8"
        return [f'<path class="{colour} line faint" d="{path}">{told}</path>']
    if not layout.reason:
        return [
            f'<circle class="ring" cx="{across:.1f}" cy="{up:.1f}" r="10"/>',
            f'<circle class="{colour} dot" cx="{across:.1f}" cy="{up:.1f}" r="5.5">{told}</circle>',
        ]
    kind = "dot" if layout.cost.has_peak else "line faint"
    return [
        f'<circle class="{colour} {kind}" cx="{across:.1f}" cy="{up:.1f}" r="4">{told}</circle>'
    ]


def _chosen_label(panel: Panel, chosen: RankedLayout, size: float) -> list[str]:
    across, up = panel.place(chosen.seconds, size)
    shape = chosen.cost.shape
    lines = (
        f"chosen: {chosen.config.strategy.name} {shape.replicate} x {shape.shard} x {shape.tensor}",
        f"{chosen.seconds:.3f} s, recomputation {chosen.config.activation_checkpointing.name}, "
        f"micro-batch {chosen.cost.micro_batch_size}",
    )
    # Below the point, or above it where there is no room.
    first = up + 26 if up + 50 < panel.top + panel.height else up - 32
    parts = []
    for number, line in enumerate(lines):
        parts.append(
            f'<text class="strong halo" x="{across + 12:.1f}" y="{first + 15 * number:.1f}">'
            f"{html.escape(line)}</text>"
        )
    return parts


def _strategy_legend(
    panel: Panel, ranked: Sequence[RankedLayout], limit: float | None
) -> list[str]:
    """Names at the right, each with the step time of its fastest layout that is not refused."""
    parts = []
    left = panel.left + panel.width + 18
    up = panel.top + 10
    used = {layout.config.strategy.name for layout in ranked}
    for name in STRATEGIES:
        if name not in used:
            continue
        fastest = _fastest(name, ranked, limit)
        parts.append(f'<circle class="{_colour(name)} dot" cx="{left}" cy="{up - 4}" r="5"/>')
        parts.append(f'<text class="strong" x="{left + 12}" y="{up}">{name}</text>')
        parts.append(f'<text class="small" x="{left + 12}" y="{up + 15}">{fastest}</text>')
        up += 40
    return parts


def _fastest(strategy: str, ranked: Sequence[RankedLayout], limit: float | None) -> str:
    for layout in ranked:
        if layout.config.strategy.name == strategy and not _is_too_large(layout, limit):
            return f"from {layout.seconds:.3g} s"
    return "does not fit"


def scaling_picture(result: ScalingResult, config: TrainConfig) -> str:
    """Two panels over the ranks, a line for each method: samples per second and rank, and the share
    of a step that waits for links between hosts."""
    ranks = Scale.doubling([point.ranks for point in result.points])
    rates, waits = _series(result, "tokens_per_s"), _series(result, "between_hosts")
    highest = max(value for points in rates.values() for _, value in points)
    size = {"left": 70, "width": _WIDTH - 70 - 150}
    upper = Panel(**size, top=92, height=240, x=ranks, y=Scale.linear(highest))
    lower = Panel(**size, top=390, height=150, x=ranks, y=Scale.linear(1.0, percent=True))
    parts = [
        *_title(
            f"{result.model}, {result.parameters / 1e9:.3g} billion parameters, on "
            f"{config.cluster.name}: {result.kind} scaling",
            f"the fastest layout of each method that fits · {batch_words(result)}",
        ),
        *upper.grid("", f"{result.noun}/s per rank"),
        *lower.grid("ranks", "share of a step that waits between hosts"),
        *lower.level(SATURATED, "10 %", at_left=True),
    ]
    names = [method.name for method in result.methods]
    for panel, lines in ((upper, rates), (lower, waits)):
        parts += _lines(panel, lines, names)
    return document(_WIDTH, 600, "scaling of a job", parts)


def _series(result: ScalingResult, figure: str) -> dict[str, list[tuple[float, float]]]:
    """By method; those without a layout have no entry."""
    found: dict[str, list[tuple[float, float]]] = {}
    for method in result.methods:
        for point in result.points:
            best = point.best[method.name]
            if best is not None:
                found.setdefault(method.name, []).append((point.ranks, getattr(best, figure)))
    return found


def _lines(
    panel: Panel, lines: dict[str, list[tuple[float, float]]], names: Sequence[str]
) -> list[str]:
    """``names``: of all methods, which give each its colour."""
    parts = []
    ends = []
    for name, points in lines.items():
        number = names.index(name)
        places = [panel.place(x, y) for x, y in points]
        path = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
        parts.append(f'<polyline class="c{number} line thick" points="{path}"/>')
        for (across, up), (x, y) in zip(places, points, strict=True):
            parts.append(
                f'<circle class="c{number} dot" cx="{across:.1f}" cy="{up:.1f}" r="3">'
                f"<title>{x:,.0f} ranks: {short(y)}</title></circle>"
            )
        ends.append(places[-1][1])
    left = panel.left + panel.width + 12
    heights = apart(ends, 16, panel.top + panel.height)
    for name, up in zip(lines, heights, strict=True):
        parts.append(
            f'<text class="c{names.index(name)} name" x="{left}" y="{up + 4:.1f}">'
            f"{html.escape(name)}</text>"
        )
    return parts


def _title(first: str, second: str) -> list[str]:
    return [
        f'<text class="title" x="24" y="32">{html.escape(first)}</text>',
        f'<text class="small" x="24" y="52">{html.escape(second)}</text>',
    ]

"""The result of `scale` for people and for programs: `scaling_lines`, `scaling_json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from parallel2d.config import TrainConfig
from parallel2d.planner.scaling import BestLayout, ComparedMethod, ScalingResult

SATURATED = 0.1  # the share of a step that waits for links between hosts
_FASTER = 1.02  # a smaller difference is less than the model of time knows


def scaling_lines(result: ScalingResult, config: TrainConfig) -> list[str]:
    """A table of the best layouts, and below it what it says, in sentences."""
    return [*_table(result, config), *(f"            {answer}" for answer in answers(result))]


def scaling_json(result: ScalingResult, config: TrainConfig) -> str:
    """``scaling``, ``answers``, ``methods`` (words by name) and ``points``: ranks, nodes, global
    batch and by method the best layout, null where there is none."""
    points: list[dict[str, Any]] = []
    for point in result.points:
        best = {name: _fields(layout) for name, layout in point.best.items()}
        points.append(
            {
                "ranks": point.ranks,
                "nodes": point.nodes,
                "global_batch_size": point.global_batch_size,
                "best": best,
            }
        )
    whole = {
        "scaling": result.kind,
        "cluster": config.cluster.name,
        "model": result.model,
        "parameters": result.parameters,
        "unit": f"{result.noun}/s per rank",
        "methods": {method.name: list(method.words) for method in result.methods},
        "points": points,
        "answers": answers(result),
    }
    return json.dumps(whole, indent=1)


def _fields(layout: BestLayout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    return {
        "words": list(layout.words),
        "per_rank": layout.tokens_per_s,
        "between_hosts": layout.between_hosts,
        "seconds": dataclasses.asdict(layout.time.seconds),
        "mfu": layout.time.mfu,
        "needed_bytes": layout.cost.needed,
    }


def batch_words(result: ScalingResult) -> str:
    """How the global batch depends on the ranks."""
    first = result.points[0]
    if result.kind == "strong":
        return f"a global batch of {first.global_batch_size:,} on any number of ranks"
    return f"samples of a global batch per rank: {first.global_batch_size / first.ranks:g}"


def _table(result: ScalingResult, config: TrainConfig) -> list[str]:
    names = [method.name for method in result.methods]
    lines = [
        f"scaling     {result.kind}: {batch_words(result)}; {result.model}, "
        f"{result.parameters:,} parameters",
        f"            cluster {config.cluster.name}; {result.noun}/s per rank, and the share of a "
        "step that waits for links",
        "            between hosts, of the fastest layout of each method that fits",
    ]
    for method in result.methods:
        lines.append(f"            {method.name}: {' '.join(method.words)}")
    heads = "".join(f"{name:>16}" for name in names)
    lines.append(f"{'ranks':>10}{heads}  mesh of hybrid")
    for point in result.points:
        cells = "".join(f"{_cell(point.best[name]):>16}" for name in names)
        lines.append(f"{point.ranks:>10,}{cells}  {_mesh(point.best['hybrid'])}".rstrip())
    return lines


def _cell(layout: BestLayout | None) -> str:
    if layout is None:
        return "-"
    return f"{layout.tokens_per_s:,.0f} {layout.between_hosts:>4.0%}"


def _mesh(layout: BestLayout | None) -> str:
    if layout is None:
        return ""
    shape = layout.cost.shape
    return f"{shape.replicate} x {shape.shard} x {shape.tensor}"


def answers(result: ScalingResult) -> list[str]:
    """Sentences: where hybrid sharding beats flat sharding, from how many ranks links between hosts
    hold a step up, and which sync method moves that point."""
    found = [_hybrid_against_flat(result)]
    for method in result.methods[:3]:
        found += _saturation(result, method)
    for method in result.methods[3:]:
        found += _moved(result, method)
    return found


def _hybrid_against_flat(result: ScalingResult) -> str:
    ratios = []
    for point in result.points:
        hybrid, flat = point.best["hybrid"], point.best["zero3"]
        if hybrid is not None and flat is not None:
            ratios.append((point.ranks, hybrid.tokens_per_s / flat.tokens_per_s))
    if not ratios:
        return "hybrid and flat sharding (zero3) fit nowhere both."
    ranks, largest = max(ratios, key=lambda each: each[1])
    first = _first_lasting([(ranks, ratio > _FASTER) for ranks, ratio in ratios])
    if first is None and largest <= _FASTER:
        return "hybrid is nowhere more than 2 % faster than flat sharding (zero3)."
    where = f"on {ranks:,} ranks alone or on few others"
    if first is not None:
        where = f"from {first:,} ranks on"
    return (
        f"hybrid beats flat sharding (zero3) {where}, by a factor of up to {largest:.2f} on "
        f"{ranks:,} ranks."
    )


def _saturation(result: ScalingResult, method: ComparedMethod) -> Iterator[str]:
    ranks = _saturates_from(result, method)
    if not _layouts_of(result, method):
        yield f"{method.name} has no layout that can run and fits."
    elif ranks is None:
        yield f"{method.name} waits at most 10 % of a step for links between hosts."
    else:
        yield (
            f"{method.name} waits more than 10 % of a step for links between hosts from {ranks:,} "
            "ranks on."
        )


def _moved(result: ScalingResult, method: ComparedMethod) -> Iterator[str]:
    """What the sync method does to hybrid's point."""
    before = _saturates_from(result, result.methods[0])
    after = _saturates_from(result, method)
    if before is None or not _layouts_of(result, method):
        return
    if after is None:
        yield f"{method.name} moves that point of hybrid beyond {result.points[-1].ranks:,} ranks."
    elif after > before:
        yield f"{method.name} moves that point of hybrid from {before:,} to {after:,} ranks."
    else:
        yield f"{method.name} does not move that point of hybrid."


def _layouts_of(result: ScalingResult, method: ComparedMethod) -> list[tuple[int, BestLayout]]:
    found = []
    for point in result.points:
        layout = point.best[method.name]
        if layout is not None:
            found.append((point.ranks, layout))
    return found


def _saturates_from(result: ScalingResult, method: ComparedMethod) -> int | None:
    layouts = _layouts_of(result, method)
    return _first_lasting([(ranks, best.between_hosts > SATURATED) for ranks, best in layouts])


def _first_lasting(points: Sequence[tuple[int, bool]]) -> int | None:
    """The ranks of the first point from which on all are true; None where the last one is not."""
    found = None
    for ranks, holds in points:
        if not holds:
            found = None
        elif found is None:
            found = ranks
    return found

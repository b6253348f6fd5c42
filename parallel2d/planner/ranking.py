"""The result of a search for people and for programs: `ranking_lines`, `as_json`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

from parallel2d.cost.predicted_peak import PredictedMemory
from parallel2d.cost.step_estimate import StepEstimate
from parallel2d.planner.layout_search import RankedLayout, SearchResult

_GIB = 2**30
_MOST_LINES = 12
# What of the words that are given the chosen layout replaces, or training does not want.
_REPLACED = (
    "strategy",
    "mesh.replicate",
    "mesh.shard",
    "mesh.tensor",
    "activation_checkpointing",
    "train.micro_batch_size",
)


def command_line(given: Sequence[str], chosen: RankedLayout) -> str:
    """The train command with the words that were given and the chosen layout."""
    kept = []
    replaced = {*_REPLACED, *map(key_of, chosen.words)}
    for word in given:
        key = key_of(word)
        if key not in replaced and not key.startswith("plan."):
            kept.append(word)
    return shlex.join(["python", "-m", "parallel2d.train", *kept, *chosen.words])


def key_of(word: str) -> str:
    """The key that a word of a command line sets; ``strategy.name`` is ``strategy``."""
    return word.lstrip("+").partition("=")[0].removesuffix(".name")


def fixed_keys(given: Sequence[str]) -> set[str]:
    """The keys that the search leaves as they are: those that are given, and not as ``auto``."""
    found = set()
    for word in given:
        if word.partition("=")[2] != "auto":
            found.add(key_of(word))
    return found


def ranking_lines(result: SearchResult) -> list[str]:
    """A table, the fastest first: layouts that do not fit, the chosen one, and the best one of each
    other mesh and strategy."""
    shown = _shown(result)
    count = len(result.ranked)
    lines = [
        f"search      {count} layouts by their step time; {result.refused} cannot run, "
        f"{result.traced} were traced",
        f"            {'step':>9}  {'rank needs':>12}  layout",
    ]
    for layout in shown:
        lines.append(_line(layout))
        lines.append(f"            {'':>9}  {'':>12}  {layout.reason or 'chosen'}")
    if len(shown) < count:
        lines.append(f"            and {count - len(shown)} more")
    return lines


def _shown(result: SearchResult) -> list[RankedLayout]:
    place = result.ranked.index(result.chosen)
    # Of those that do not fit, the fastest and the one before the chosen one tell most.
    before = list(result.ranked[:place])
    if len(before) > _MOST_LINES // 2:
        before = before[: _MOST_LINES // 2]
    shown = [*before, result.chosen]
    seen = {_mesh_of(result.chosen)}
    for layout in result.ranked[place + 1 :]:
        if len(shown) == _MOST_LINES:
            break
        if _mesh_of(layout) not in seen:
            seen.add(_mesh_of(layout))
            shown.append(layout)
    return shown


def _mesh_of(layout: RankedLayout) -> tuple[str, ...]:
    """The words of strategy and mesh."""
    return layout.words[:4]


def _line(layout: RankedLayout) -> str:
    cost = layout.cost
    needed = f"{cost.needed / _GIB:.1f} GiB"
    if not cost.has_peak:
        # More than the states is needed, and how much is not known.
        needed = f"> {needed}"
    return f"            {layout.seconds:>7.3f} s  {needed:>12}  {' '.join(layout.words)}"


def as_json(result: SearchResult, command: str) -> str:
    """All layouts, as JSON: ``command``, ``refused``, ``layouts`` with ``words``, ``reason`` (null
    for the chosen one), ``seconds`` by part, ``memory``, ``peak`` (traced), ``predicted_peak`` and
    ``bytes`` by kind and axis; ``refusals`` with the words and reasons of what cannot run."""
    layouts = [_fields(layout) for layout in result.ranked]
    refusals = [{"words": list(words), "reason": reason} for words, reason in result.refusals]
    fields = {
        "command": command,
        "refused": result.refused,
        "layouts": layouts,
        "refusals": refusals,
    }
    return json.dumps(fields, indent=1)


def _fields(layout: RankedLayout) -> dict[str, Any]:
    cost = layout.cost
    assert isinstance(cost.time, StepEstimate)
    memory = dataclasses.asdict(cost.states)
    peak = None
    if cost.traced is not None:
        peak = {"bytes": cost.traced.peak, "by_kind": cost.traced.by_kind}
    predicted = None
    if isinstance(cost.predicted, PredictedMemory):
        predicted = {"bytes": cost.predicted.peak, "by_kind": dict(cost.predicted.by_kind)}
    return {
        "words": list(layout.words),
        "reason": layout.reason or None,
        "seconds": dataclasses.asdict(cost.time.seconds),
        "samples_per_s": cost.time.samples_per_s,
        "mfu": cost.time.mfu,
        "memory": memory,
        "peak": peak,
        "predicted_peak": predicted,
        "bytes": dict(cost.moved),
    }

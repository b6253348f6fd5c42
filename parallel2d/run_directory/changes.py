"""What a start has otherwise than the one before it: `changes_since`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parallel2d.config import AXES
from parallel2d.run_directory.segments import Segment

_LONGEST_VALUE = 60


def changes_since(before: Segment, now: Segment) -> list[str]:
    """``optimizer.lr: 0.0003 -> 0.0001``: settings, then the mesh and the versions."""
    # Machines have names of their own.
    pairs = [*_compare(before.config, now.config, skipped=("launch.host_id",))]
    ours, theirs = _mesh(before.layout), _mesh(now.layout)
    if ours and theirs and ours != theirs:
        pairs.append(f"mesh: {ours} -> {theirs}")
    versions = _compare(before.versions, now.versions)
    return [*pairs, *(f"version of {pair}" for pair in versions)]


def _compare(
    before: Mapping[str, Any], now: Mapping[str, Any], skipped: tuple[str, ...] = ()
) -> Iterator[str]:
    ours, theirs = dict(_flat(before)), dict(_flat(now))
    for key in {**ours, **theirs}:
        if key not in skipped and ours.get(key) != theirs.get(key):
            yield f"{key}: {_shown(ours.get(key))} -> {_shown(theirs.get(key))}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _mesh(layout: Mapping[str, Any]) -> str:
    sizes = layout.get("mesh")
    if not isinstance(sizes, Mapping):
        return ""
    return " x ".join(f"{axis} {sizes.get(axis, '?')}" for axis in AXES)

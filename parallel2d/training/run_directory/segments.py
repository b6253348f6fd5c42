"""``segments.jsonl``: one line for every start of a run, which rows of ``metrics.jsonl`` name by
its number (`read_segments`), and what a start changed (`changes_since`)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel2d.base import files
from parallel2d.base.config import AXES

NAME = "segments.jsonl"
_LONGEST_LINE = 1 << 22  # bytes; a layout lists every rank
_LARGEST_FILE = 1 << 28
_MOST_SEGMENTS = 10_000
_LONGEST_VALUE = 60  # of a setting that changed, in characters


@dataclass(frozen=True)
class Segment:
    """One start of a run: by a person or a scheduler, or of workers that replace others."""

    number: int  # from 1
    first_step: int  # that it trains
    restarted: bool  # workers of the same job replaced others
    begun: str  # local time
    begun_s: float = 0.0  # the same as of `time.time`
    certified: bool = False  # compared with one process before its first step
    command: tuple[str, ...] = ()  # the words of the command line
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)  # as in layout.json
    versions: dict[str, str] = field(default_factory=dict)


# What a line of any origin must hold
_KINDS: dict[str, type | tuple[type, ...]] = {
    "restarted": bool,
    "certified": bool,
    "command": (list, tuple),
    "config": dict,
    "layout": dict,
    "versions": dict,
}


def read_segments(run_dir: str) -> list[Segment]:
    """In the order in which they began; none where there is no file, as in older runs. A line that
    is no segment, such as one that a kill has cut, is passed over. Raises OSError."""
    found: list[Segment] = []
    try:
        file = files.open_regular(os.path.join(run_dir, NAME))
    except FileNotFoundError:
        return []
    with file:
        if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
            raise OSError(errno.EFBIG, f"more than {_LARGEST_FILE >> 20} MiB", file.name)
        while len(found) < _MOST_SEGMENTS and (line := file.readline(_LONGEST_LINE)):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found.append(_segment(files.parse(line)))
    return found


def _segment(value: Any) -> Segment:
    """Raises ValueError, TypeError or KeyError for JSON that is none."""
    known = {item.name for item in dataclasses.fields(Segment)}
    segment = Segment(**{name: value[name] for name in known & set(value)})
    are_counts = files.is_count(segment.number) and files.is_count(segment.first_step)
    are_kinds = all(isinstance(getattr(segment, name), kind) for name, kind in _KINDS.items())
    if not are_counts or not are_kinds or not files.is_number(segment.begun_s):
        raise ValueError("no segment")
    return dataclasses.replace(segment, command=tuple(map(str, segment.command)))


def append(run_dir: str, segment: Segment) -> None:
    """Adds a line. Raises OSError."""
    line = json.dumps(dataclasses.asdict(segment), default=str).encode() + b"\n"
    with open(os.path.join(run_dir, NAME), "ab+") as file:
        # A line that a kill has cut must not swallow this one.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                line = b"\n" + line
        file.write(line)


def changes_since(before: Segment, now: Segment) -> list[str]:
    """``optimizer.lr: 0.0003 -> 0.0001``: settings, then the mesh and the versions."""
    old, new = _facts(before), _facts(now)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}" for key in changed]


def _facts(segment: Segment) -> dict[str, Any]:
    """Settings by their full key, sizes of the mesh, and versions."""
    facts = dict(_flat(segment.config))
    facts.pop("launch.host_id", None)  # machines have names of their own
    sizes = segment.layout.get("mesh")
    if isinstance(sizes, Mapping):
        facts["mesh"] = " x ".join(f"{axis} {sizes.get(axis, '?')}" for axis in AXES)
    facts |= {f"version of {name}": version for name, version in segment.versions.items()}
    return facts


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    """As it stands on a command line, shortened."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."

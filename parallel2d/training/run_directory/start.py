"""The starts of a run. `accept_start` records a start after all checks have passed, `read_segments`
reads the records, and `changes_since` compares two starts.

``segments.jsonl`` has one line, a segment, for each start. Rows of ``metrics.jsonl`` contain the
number of their segment.

[Note: pending records] Hydra writes the composed configuration before any check of the start.
Therefore Hydra writes the configuration to a separate folder. When the start is accepted, this
folder replaces ``.hydra``; when the start is refused, the folder is removed. Thus ``.hydra``,
``layout.json`` and ``owner.json`` always describe the last start that was accepted and had steps to
train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import os
import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from parallel2d.base import files
from parallel2d.base.config import AXES, Job
from parallel2d.base.errors import ConfigError
from parallel2d.training.run_directory.end import SUMMARY
from parallel2d.training.run_directory.ownership import OwnershipLock, delete_request

_SEGMENTS = "segments.jsonl"
_LONGEST_LINE = 1 << 22  # bytes; a line is long, because a layout lists every rank
_LARGEST_FILE = 1 << 27
_MOST_SEGMENTS = 10_000
_LONGEST_VALUE = 60  # characters of a setting in a list of changes


@dataclass(frozen=True)
class Segment:
    """One start of a run: by a user or a scheduler, or by workers that replace failed workers."""

    number: int  # from 1
    first_step: int  # the first step of this start
    restarted: bool  # True if its workers replaced other workers of the same job
    begun: str  # local time
    begun_s: float = 0.0  # the same time, in seconds of `time.time`
    certified: bool = False  # True after a parity check before the first step
    command: tuple[str, ...] = ()  # overrides on the command line
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)  # as in layout.json
    versions: dict[str, str] = field(default_factory=dict)


# Required types of the fields in a line, because the file is untrusted
_KINDS: dict[str, type | tuple[type, ...]] = {
    "restarted": bool,
    "certified": bool,
    "command": (list, tuple),
    "config": dict,
    "layout": dict,
    "versions": dict,
}


def read_segments(run_dir: str) -> list[Segment]:
    """Read the segments in chronological order. Invalid lines, such as the incomplete line of a
    killed process, are skipped. Return an empty list if the file does not exist. Raises OSError for
    a file that is too large or cannot be read."""
    found: list[Segment] = []
    try:
        file = files.open_regular(os.path.join(run_dir, _SEGMENTS))
    except FileNotFoundError:
        return []
    with file:
        if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
            raise OSError(errno.EFBIG, f"more than {_LARGEST_FILE >> 20} MiB", file.name)
        lines = iter(lambda: file.readline(_LONGEST_LINE), b"")
        for line in itertools.islice(lines, _MOST_SEGMENTS):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found.append(_segment(files.parse(line)))
    return found


def _segment(value: Any) -> Segment:
    """Convert JSON to a segment. Raises ValueError, TypeError or KeyError if ``value`` is not a
    segment."""
    known = set()
    for item in dataclasses.fields(Segment):
        known.add(item.name)
    segment = Segment(**{name: value[name] for name in known & set(value)})
    are_right = []
    for name, kind in _KINDS.items():
        are_right.append(isinstance(getattr(segment, name), kind))
    are_right += map(files.is_count, (segment.number, segment.first_step))
    if not all(are_right) or not files.is_number(segment.begun_s):
        raise ValueError("no segment")
    return dataclasses.replace(segment, command=tuple(map(str, segment.command)))


def _append(run_dir: str, segment: Segment) -> None:
    line = json.dumps(dataclasses.asdict(segment), default=str).encode() + b"\n"
    with open(os.path.join(run_dir, _SEGMENTS), "ab+", opener=files.regular) as file:
        # If a process was killed, the last line may be incomplete. The new line must not be
        # appended to it.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                line = b"\n" + line
        file.write(line)


def changes_since(before: Segment, now: Segment) -> list[str]:
    """Return lines such as ``optimizer.lr: 0.0003 -> 0.0001`` for changed settings, mesh sizes and
    versions."""
    old, new = _facts(before), _facts(now)
    changed = []
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            changed.append(key)
    found: list[str] = []
    for key in changed:
        found.append(f"{files.printable(key)}: {_shown(old.get(key))} -> {_shown(new.get(key))}")
    return found


def _facts(segment: Segment) -> dict[str, Any]:
    """Return the settings by their full keys, the mesh sizes, and the versions."""
    facts = dict(flat(segment.config))
    facts.pop("launch.host_id", None)  # differs between machines
    sizes = segment.layout.get("mesh")
    if isinstance(sizes, Mapping):
        facts["mesh"] = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if axis in sizes)
    facts |= {f"version of {name}": version for name, version in segment.versions.items()}
    return facts


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) for each value in nested settings."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    """Format a value as on a command line, and shorten it."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return files.printable(text, _LONGEST_VALUE)


log = logging.getLogger(__name__)

# The second is a prefix of folder names, as in conf/train.yaml
_RECORDS, _PENDING = ".hydra", ".hydra-pending-"


@dataclass(frozen=True)
class AcceptedStart:
    """A start that every check has accepted."""

    segment: Segment
    before: Segment | None  # the start that this start continues
    changes: tuple[str, ...]  # lines of `changes_since` with ``before``
    begun_before_s: float  # time at which the run's previous start began; 0 without one


def accept_start(
    job: Job, layout: dict[str, Any], finished_steps: int, ownership: OwnershipLock
) -> AcceptedStart:
    """Accept a start: take ``ownership``, and replace the records in the run directory of ``job``.

    Runs only on rank 0, before any other write to this directory.

    Args:
        layout: the facts for ``layout.json``.
        finished_steps: finished steps of the restored run; 0 for a new run.
        ownership: the lock of the run directory.

    Raises OSError if the directory is not writable. Raises `ConfigError` for records that are too
    large or not regular files, and if another start has meanwhile taken the directory.
    """
    run_dir = job.run_dir
    try:
        earlier = read_segments(run_dir)
    except OSError as error:  # too large, or not a regular file
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    # Restarted ranks may be one half of a job whose network has split, and must take over the
    # directory although the other half may still train.
    if not job.restarted:
        ownership.refuse_live_owner()
    certified = job.certified
    if job.restarted and earlier:
        # The layout of restarted workers may differ from the layout that the parity check has
        # tested.
        last = earlier[-1]
        same = []
        for key in ("mesh", "ranks", "strategy"):
            same.append(last.layout.get(key) == layout.get(key))
        certified = last.certified and all(same)
    segment = Segment(
        number=max((each.number for each in earlier), default=0) + 1,
        first_step=finished_steps + 1,
        restarted=job.restarted,
        begun=time.strftime("%F %T %z"),
        begun_s=time.time(),
        certified=certified,
        command=job.overrides,
        config=dataclasses.asdict(job.config),
        layout=layout,
        versions={
            "parallel2d": _own_version(),
            "torch": str(layout.get("torch", "")),
            "python": platform.python_version(),
        },
    )
    # All checks that may refuse this start have passed. The lock is written first. If the other
    # half of a split job still trains, it checks the lock before each write, and therefore stops
    # before the records below describe this start. The segment is written next, because rows
    # contain its number. The later files only describe the start, so a crash between their writes
    # loses no training.
    ownership.take()
    delete_request(run_dir)
    _append(run_dir, segment)
    files.replace(os.path.join(run_dir, "layout.json"), json.dumps(layout, indent=1))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(run_dir, SUMMARY))
    _publish_pending(run_dir, job.records)
    before = _start_before(job, earlier, finished_steps)
    changes = changes_since(before, segment) if before is not None else []
    what = "restart" if job.restarted else "start"
    words = files.printable(shlex.join(segment.command), 4000)
    log.info("%s %d, at step %d: %s", what, segment.number, segment.first_step, words)
    begun_before_s = earlier[-1].begun_s if earlier else 0.0
    return AcceptedStart(segment, before, tuple(changes), begun_before_s)


def _own_version() -> str:
    try:
        return metadata.version("parallel2d")
    except metadata.PackageNotFoundError:  # not installed, imported from its sources
        return "unknown"


def _start_before(job: Job, earlier: list[Segment], finished_steps: int) -> Segment | None:
    """Return the start that the new start continues: the last start of this run, or of the run in
    ``checkpoint.resume``."""
    if not finished_steps:
        return None
    if earlier:
        return earlier[-1]
    named = os.path.realpath(job.config.checkpoint.resume)
    checkpoints = os.path.dirname(named)
    # The path may be a run directory, its folder of checkpoints, or one checkpoint in this folder
    for folder in (named, checkpoints, os.path.dirname(checkpoints)):
        with contextlib.suppress(OSError):
            if found := read_segments(folder):
                return found[-1]
    return None


def _publish_pending(run_dir: str, name: str) -> None:
    pending, records = os.path.join(run_dir, name), os.path.join(run_dir, _RECORDS)
    # A restart has no pending records, and a user may have set hydra.output_subdir to another
    # folder.
    if not name.startswith(_PENDING) or not os.path.isdir(pending):
        return
    # Two renames replace the folder, so that `.hydra` never contains a mix of old and new files. A
    # crash between the renames leaves both folders, and the next start repeats the replacement.
    aside = f"{records}-before"
    files.remove_tree(aside)
    with contextlib.suppress(FileNotFoundError):
        os.rename(records, aside)
    os.rename(pending, records)
    files.remove_tree(aside)


def discard_pending(job: Job) -> None:
    """Remove Hydra's pending records of ``job``, if they exist. Called after the start was
    refused."""
    if job.records.startswith(_PENDING):
        files.remove_tree(os.path.join(job.run_dir, job.records))

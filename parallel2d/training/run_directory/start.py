"""The starts of a run: `accept_start` records a start after all checks have passed, `read_segments`
reads the records, `changes_since` compares two starts.

``segments.jsonl`` has one line per start; rows of ``metrics.jsonl`` refer to it by its number.

[Note: pending records] Hydra writes the composed configuration before any check. Hydra writes into
a separate folder, which replaces ``.hydra`` when the start is accepted and is removed when the
start is refused. Therefore ``.hydra``, ``layout.json`` and ``owner.json`` always describe the last
start that was accepted and had steps to train.
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
_LONGEST_LINE = 1 << 22  # bytes; a layout lists every rank
_LARGEST_FILE = 1 << 27
_MOST_SEGMENTS = 10_000
_LONGEST_VALUE = 60  # characters of a setting in a list of changes


@dataclass(frozen=True)
class Segment:
    """One start of a run: by a user or a scheduler, or by workers that replace others."""

    number: int  # from 1
    first_step: int  # the first step that it trains
    restarted: bool  # its workers replaced other workers of the same job
    begun: str  # local time
    begun_s: float = 0.0  # the same time as of `time.time`
    certified: bool = False  # True after a parity check before the first step
    command: tuple[str, ...] = ()  # the overrides of the command line
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)  # as in layout.json
    versions: dict[str, str] = field(default_factory=dict)


# Required types in a line, which may have any origin
_KINDS: dict[str, type | tuple[type, ...]] = {
    "restarted": bool,
    "certified": bool,
    "command": (list, tuple),
    "config": dict,
    "layout": dict,
    "versions": dict,
}


def read_segments(run_dir: str) -> list[Segment]:
    """Read the segments in chronological order; empty without a file, as in older runs. A line that
    is not a segment, such as an incomplete line after a kill, is skipped. Raises OSError."""
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
    """Convert JSON to a segment. Raises ValueError, TypeError or KeyError if it is not one."""
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
        # After a kill the last line may lack its end; a new line must not continue it.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                line = b"\n" + line
        file.write(line)


def changes_since(before: Segment, now: Segment) -> list[str]:
    """Return lines such as ``optimizer.lr: 0.0003 -> 0.0001``: settings, mesh and versions."""
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
    """Return settings by their full key, sizes of the mesh, and versions."""
    facts = dict(flat(segment.config))
    facts.pop("launch.host_id", None)  # differs between machines
    sizes = segment.layout.get("mesh")
    if isinstance(sizes, Mapping):
        facts["mesh"] = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if axis in sizes)
    facts |= {f"version of {name}": version for name, version in segment.versions.items()}
    return facts


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings by their full key."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    """Format a value as on a command line, shortened."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return files.printable(text, _LONGEST_VALUE)


log = logging.getLogger(__name__)

_RECORDS, _PENDING = ".hydra", ".hydra-pending-"  # the second is a prefix, as in conf/train.yaml


@dataclass(frozen=True)
class AcceptedStart:
    """A start that every check has accepted."""

    segment: Segment
    before: Segment | None  # the start that this start continues
    changes: tuple[str, ...]  # lines with the differences from that start
    begun_before_s: float  # begin of the run's previous start, as of `time.time`; 0: none


def accept_start(
    job: Job, layout: dict[str, Any], finished_steps: int, ownership: OwnershipLock
) -> AcceptedStart:
    """Accept a start: take ``ownership`` and replace the records in the directory of ``job``.

    Runs only on rank 0, before it writes anything else there.

    Args:
        layout: the facts for ``layout.json``.
        finished_steps: finished steps of the restored run; 0 for a new run.
        ownership: the lock of the run directory.

    Raises OSError, and `ConfigError` for records that are too large or not regular files, and for a
    directory that another start has taken since this one began.
    """
    run_dir = job.run_dir
    try:
        earlier = read_segments(run_dir)
    except OSError as error:  # too large, or not a regular file
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    # Restarted ranks may be half of a job whose network has split; the other half may be live.
    if not job.restarted:
        ownership.refuse_live_owner()
    certified = job.certified
    if job.restarted and earlier:
        # Restarted workers may have a different layout, for which the certificate does not hold.
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
    # Every operation that may reject this start has succeeded. The lock comes first: a half of the
    # job that is cut off checks it before each write, so that it stops before the records below
    # describe this start. The segment follows, because rows refer to it by its number; the files
    # after it only describe the start, and a crash between them loses no training.
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
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def _start_before(job: Job, earlier: list[Segment], finished_steps: int) -> Segment | None:
    """Return the start that the new start continues: of this run, or of the run in
    ``checkpoint.resume``."""
    if not finished_steps:
        return None
    if earlier:
        return earlier[-1]
    named = os.path.realpath(job.config.checkpoint.resume)
    checkpoints = os.path.dirname(named)
    # A run, its folder of checkpoints, or a checkpoint in it
    for folder in (named, checkpoints, os.path.dirname(checkpoints)):
        with contextlib.suppress(OSError):
            if found := read_segments(folder):
                return found[-1]
    return None


def _publish_pending(run_dir: str, name: str) -> None:
    pending, records = os.path.join(run_dir, name), os.path.join(run_dir, _RECORDS)
    # A restart has no pending records, and hydra.output_subdir may name another folder.
    if not name.startswith(_PENDING) or not os.path.isdir(pending):
        return
    # Two renames replace the folder, so that `.hydra` is never half old and half new. A crash
    # between them leaves both folders, and the next start repeats the replacement.
    aside = f"{records}-before"
    files.remove_tree(aside)
    with contextlib.suppress(FileNotFoundError):
        os.rename(records, aside)
    os.rename(pending, records)
    files.remove_tree(aside)


def discard_pending(job: Job) -> None:
    """Remove Hydra's pending records of ``job``, if they exist, after its refusal."""
    if job.records.startswith(_PENDING):
        files.remove_tree(os.path.join(job.run_dir, job.records))

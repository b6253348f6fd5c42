"""The starts of a run: `accept_start` records one once nothing can refuse it any more,
`read_segments` reads the records, `changes_since` says what a start changed.

``segments.jsonl`` has one line for every start, which rows of ``metrics.jsonl`` name by its number.

[Note: pending records] Hydra writes what it composed before anything is checked. It does so into
a folder of its own, which takes the place of ``.hydra`` when the start is accepted and is removed
when it is refused. So ``.hydra``, ``layout.json`` and ``owner.json`` always describe the last start
that was accepted and had steps to train.

[Note: two halves of a job] When a network splits, both halves may go on as what is left of the job,
and write rows and checkpoints of one run: the rendezvous cannot reach a node that is cut off from
it. So every start writes its mark into the run directory before anything else, and rank 0 checks at
every step whether the mark is still its own. The half that was there first ends, and joins the
other once it can reach it.
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
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from parallel2d.base import files
from parallel2d.base.config import AXES, Job
from parallel2d.base.errors import ConfigError, PlainError
from parallel2d.training.run_directory.end import SUMMARY

_SEGMENTS = "segments.jsonl"
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
    """Reads them in the order in which they began; none where there is no file, as in older runs. A
    line that is no segment, such as one that a kill has cut, is passed over. Raises OSError."""
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
    """Raises ValueError, TypeError or KeyError for JSON that is none."""
    known = {item.name for item in dataclasses.fields(Segment)}
    segment = Segment(**{name: value[name] for name in known & set(value)})
    are_right = [isinstance(getattr(segment, name), kind) for name, kind in _KINDS.items()]
    are_right += map(files.is_count, (segment.number, segment.first_step))
    if not all(are_right) or not files.is_number(segment.begun_s):
        raise ValueError("no segment")
    return dataclasses.replace(segment, command=tuple(map(str, segment.command)))


def _append(run_dir: str, segment: Segment) -> None:
    line = json.dumps(dataclasses.asdict(segment), default=str).encode() + b"\n"
    with open(os.path.join(run_dir, _SEGMENTS), "ab+", opener=files.regular) as file:
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
    return [
        f"{files.printable(key)}: {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in changed
    ]


def _facts(segment: Segment) -> dict[str, Any]:
    """Settings by their full key, sizes of the mesh, and versions."""
    facts = dict(flat(segment.config))
    facts.pop("launch.host_id", None)  # machines have names of their own
    sizes = segment.layout.get("mesh")
    if isinstance(sizes, Mapping):
        facts["mesh"] = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if axis in sizes)
    facts |= {f"version of {name}": version for name, version in segment.versions.items()}
    return facts


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested settings, by their full key."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    """Writes a value as on a command line, shortened."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return files.printable(text, _LONGEST_VALUE)


log = logging.getLogger(__name__)

_RECORDS, _PENDING = ".hydra", ".hydra-pending-"  # the second begins a name, as in conf/train.yaml
_OWNER = "owner.json"


def has_owner(run_dir: str) -> bool:
    """Whether a start of a run has taken this directory."""
    return os.path.exists(os.path.join(run_dir, _OWNER))


class RunTakenOver(PlainError):  # noqa: N818  (named after what happened; it need not be a fault)
    """Another start of this run has taken its directory over."""


class OwnershipLock:
    """Rank 0's mark in the run directory during a run; nothing before `take`, nor elsewhere."""

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, _OWNER)
        self._token = os.urandom(8).hex()
        self._seen: tuple[int, int] | None = None

    def take(self) -> None:
        """Takes the directory, from whoever has it. Raises OSError when it cannot be written."""
        mark = {
            "token": self._token,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "time": time.strftime("%F %T"),
        }
        files.replace(self._path, json.dumps(mark))
        self._seen = _identity(self._path)

    def check(self) -> None:
        """Raises `RunTakenOver`, naming who. Reads the file only if its inode or time changed."""
        if self._seen is None:
            return
        try:
            if _identity(self._path) == self._seen:
                return
            mark = files.read_json(self._path)
        except (OSError, ValueError):
            # An error of the file system does not mean that another start owns the run.
            return
        known = mark if isinstance(mark, dict) else {}
        if known.get("token") == self._token:
            return
        shown = [files.printable(known.get(key)) for key in ("host", "process", "time")]
        host, process, since = shown
        raise RunTakenOver(
            f"another start of this run, on {host} (process {process}, {since}), has taken over "
            f"{os.path.dirname(self._path)}: this one ends without writing anything more"
        )


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


@dataclass(frozen=True)
class AcceptedStart:
    """A start that may go on."""

    segment: Segment
    before: Segment | None  # the start that this one continues
    changes: tuple[str, ...]  # lines about what differs from it
    begun_before_s: float  # when the last start of this run began, as of `time.time`; 0: none


def accept_start(
    job: Job, layout: dict[str, Any], finished_steps: int, ownership: OwnershipLock
) -> AcceptedStart:
    """Makes the records of ``job``'s directory those of this start, which takes ``ownership``. On
    rank 0 alone, before it writes anything else there. Raises OSError, and `ConfigError` for
    records of another origin.

    ``layout``: the facts that programs read; ``finished_steps``: 0, or those of what is resumed.
    """
    run_dir = job.run_dir
    try:
        earlier = read_segments(run_dir)
    except OSError as error:  # too large, or no file
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    certified = job.certified
    if job.restarted and earlier:
        # Workers that replace others may be on another layout than that which was certified.
        last = earlier[-1]
        same = [last.layout.get(key) == layout.get(key) for key in ("mesh", "ranks", "strategy")]
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
    # What may fail is done: from here on this start owns the directory.
    ownership.take()
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
    """The start that this one goes on from: of this run, or of the one that
    ``checkpoint.resume`` names."""
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
    # A restart has none, and hydra.output_subdir may name another place.
    if not name.startswith(_PENDING) or not os.path.isdir(pending):
        return
    aside = f"{records}-before"
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(records, aside)
    os.rename(pending, records)
    shutil.rmtree(aside, ignore_errors=True)


def discard_pending(job: Job) -> None:
    """Removes Hydra's records of ``job`` if they still wait, because it was refused."""
    if job.records.startswith(_PENDING):
        shutil.rmtree(os.path.join(job.run_dir, job.records), ignore_errors=True)

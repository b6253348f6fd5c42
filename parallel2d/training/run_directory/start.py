"""A start of a run once nothing can refuse it any more: `accept_start`.

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
import json
import logging
import os
import platform
import shlex
import shutil
import socket
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from parallel2d.base import files
from parallel2d.base.config import Job
from parallel2d.training.run_directory.end import SUMMARY
from parallel2d.training.run_directory.segments import Segment, append, changes_since, read_segments

log = logging.getLogger(__name__)

_RECORDS, _PENDING = ".hydra", ".hydra-pending-"  # the second begins a name, as in conf/train.yaml
_OWNER = "owner.json"


class RunTakenOver(RuntimeError):  # noqa: N818  (named after what happened; it need not be a fault)
    """Another start of this run has taken its directory over."""


class RunClaim:
    """Rank 0's mark in the run directory, from the start of a run to its end; nothing before
    `take`, nor on other ranks."""

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
        """Raises `RunTakenOver` naming who took the directory. Reads the file only when its inode
        or its modification time has changed."""
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
        host, process, since = (
            files.printable(known.get(key)) for key in ("host", "process", "time")
        )
        raise RunTakenOver(
            f"another start of this run, on {host} (process {process}, {since}), has taken over "
            f"{os.path.dirname(self._path)}: this one ends without writing anything more"
        )


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


@dataclass(frozen=True)
class AcceptedStart:
    """``changes``: lines about what differs from the start before; ``begun_before_s``: when that
    start of this run began, as of `time.time`; 0 without one."""

    segment: Segment
    changes: tuple[str, ...]
    begun_before_s: float


def accept_start(
    job: Job, layout: dict[str, Any], finished_steps: int, claim: RunClaim
) -> AcceptedStart:
    """Makes the records of ``job``'s directory those of this start, which takes ``claim``. On rank
    0 alone, before it writes anything else there. Raises OSError.

    ``layout``: the facts that programs read; ``finished_steps``: 0, or those of what is resumed.
    """
    run_dir = job.run_dir
    earlier = read_segments(run_dir)
    segment = Segment(
        number=max((each.number for each in earlier), default=0) + 1,
        first_step=finished_steps + 1,
        restarted=job.restarted,
        begun=time.strftime("%F %T %z"),
        begun_s=time.time(),
        certified=_is_certified(job, layout, earlier),
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
    claim.take()
    append(run_dir, segment)
    files.replace(os.path.join(run_dir, "layout.json"), json.dumps(layout, indent=1))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(run_dir, SUMMARY))
    _publish_pending(run_dir, job.records)
    before = _start_before(job, earlier, finished_steps)
    changes = changes_since(before, segment) if before is not None else []
    what = "restart" if job.restarted else "start"
    words = shlex.join(segment.command)
    log.info("%s %d, at step %d: %s", what, segment.number, segment.first_step, words)
    begun_before_s = earlier[-1].begun_s if earlier else 0.0
    return AcceptedStart(segment, tuple(changes), begun_before_s)


def _is_certified(job: Job, layout: dict[str, Any], earlier: list[Segment]) -> bool:
    """Also of workers that replace others on the layout that was certified."""
    if not job.restarted or not earlier:
        return job.certified
    before = earlier[-1]
    same = all(before.layout.get(key) == layout.get(key) for key in ("mesh", "ranks", "strategy"))
    return before.certified and same


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

"""The ownership of a run directory: `OwnershipLock`. A later start calls `wait_for_owner`.

[Note: two halves of a job] If the network splits, each half of a job may regard itself as the
survivors, restart its ranks, and write rows and checkpoints of the same run. The rendezvous cannot
prevent this conflict, because the rendezvous cannot reach the nodes of the other half. Therefore
every start writes its ownership lock with a new token into the run directory, and rank 0 checks in
every step that the lock still has its token. The half with the older token ends, and joins the
other half when the network works again.

[Note: a second start] A user or a scheduler may start the same command twice. The later start
writes a request into the run directory and waits. In its next step, the earlier start reads the
request, saves, ends, and marks its lock as ended. The later start then restores the checkpoint of
this save. The later start does not wait for an owner that has failed: its process has ended on this
machine, or its heartbeat (the modification time of ``owner.json``) is old.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from parallel2d.base import files
from parallel2d.base.errors import ConfigError, PlainError
from parallel2d.base.files.private_folders import process_identity

_OWNER, _REQUEST = "owner.json", "takeover.json"
_HEARTBEAT_S = 5.0
_STALE_S = 20.0  # an owner with an older heartbeat has failed
# Less than the 300 s for which the other ranks wait for rank 0
_LONGEST_WAIT_S = 240.0


def has_owner(run_dir: str) -> bool:
    """True if a start has written an ownership lock into this directory."""
    return os.path.exists(os.path.join(run_dir, _OWNER))


class RunTakenOver(PlainError):  # noqa: N818  (an event, which need not be an error)
    """Another start of this run has taken over its directory."""


class OwnershipLock:
    """Rank 0's ownership lock on the run directory. The methods have no effect before `take`, nor
    on other ranks.

    Args:
        saves: True if this start saves checkpoints, so that it can end for a later start without
            losing steps.
    """

    def __init__(self, run_dir: str, saves: bool = True) -> None:
        self._run_dir, self._path = run_dir, os.path.join(run_dir, _OWNER)
        self._mark = {"token": os.urandom(8).hex(), "saves": saves}
        self._seen: tuple[int, int] | None = None
        self._last_heartbeat = 0.0

    def take(self) -> None:
        """Become the owner of the directory, in place of the current owner. Raises OSError if the
        directory is not writable."""
        self._mark |= _this_process()
        files.replace(self._path, json.dumps(self._mark))
        self._seen = _identity(self._path)

    def refuse_live_owner(self) -> None:
        """Raise `ConfigError` if another start owns the directory and still trains."""
        owner = _read(self._path)
        if _is_live(self._run_dir, owner):
            raise ConfigError(
                f"{_named(owner)} began to train in {self._run_dir} at the same moment: end it "
                "before this one, or set another hydra.run.dir"
            )

    def check(self) -> None:
        """Raise `RunTakenOver`, with the name of the new owner, if the lock has another token.

        The method reads the file only if its inode or its modification time has changed, because
        the loop calls the method before every row and every checkpoint.
        """
        if self._seen is None:
            return
        try:
            identity = _identity(self._path)
            if identity == self._seen:
                return
            mark = files.read_json(self._path)
        except (OSError, ValueError):
            # An error of the file system does not prove that another start owns the run.
            return
        known = mark if isinstance(mark, dict) else {}
        if known.get("token") == self._mark["token"]:
            self._seen = identity  # only the heartbeat has changed
            return
        raise RunTakenOver(
            f"{_named(known)} has taken over {self._run_dir}: this one ends without writing "
            "anything more"
        )

    def requester(self) -> str | None:
        """Return the name of a later start that waits for this start to save and end. Return None
        if no start waits, and on ranks without the lock."""
        if self._seen is None:
            return None
        request = os.path.join(self._run_dir, _REQUEST)
        # A cheap check first, because in most steps no request exists.
        return _named(_read(request)) if os.path.lexists(request) else None

    def send_heartbeat(self) -> None:
        """Update the modification time of the lock, at most once in 5 s. Other threads may call
        this method."""
        if self._seen is None or time.monotonic() - self._last_heartbeat < _HEARTBEAT_S:
            return
        self._last_heartbeat = time.monotonic()
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def release(self) -> None:
        """Mark the lock as ended. Called after the last write of this start."""
        if self._seen is None or _read(self._path).get("token") != self._mark["token"]:
            return
        self._seen = None
        with contextlib.suppress(OSError):
            files.replace(self._path, json.dumps({**self._mark, "ended": time.strftime("%F %T")}))


def wait_for_owner(
    run_dir: str, log: Callable[[str], object], limit_s: float = _LONGEST_WAIT_S
) -> None:
    """If an earlier start still trains in ``run_dir``, wait until it has saved and ended; see
    [Note: a second start].

    Raises `ConfigError` if the earlier start saves no checkpoints, or has not ended after
    ``limit_s`` seconds.
    """
    path, request = os.path.join(run_dir, _OWNER), os.path.join(run_dir, _REQUEST)
    owner = _read(path)
    if not _is_live(run_dir, owner):
        return
    where = f"{_named(owner)} trains in {run_dir}"
    if not owner.get("saves"):
        raise ConfigError(
            f"{where} and saves no checkpoints: end it before this one, or set another "
            "hydra.run.dir"
        )
    log(f"{where}; waiting until it has saved and ended")
    end = time.monotonic() + limit_s
    try:
        while _is_live(run_dir, owner):
            if time.monotonic() > end:
                raise ConfigError(
                    f"{where} and has not saved and ended within {limit_s:g} s: end it before "
                    "this one, or set another hydra.run.dir"
                )
            if not os.path.lexists(request):  # another start may have deleted the request
                files.replace(request, json.dumps(_this_process()))
            time.sleep(0.1)
            owner = _read(path)  # after a failure, another rank may have taken the lock
    finally:
        delete_request(run_dir)


def delete_request(run_dir: str) -> None:
    """Delete the request of a later start, if one exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(run_dir, _REQUEST))


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "identity": process_identity(os.getpid()),
        "time": time.strftime("%F %T"),
    }


def _named(mark: dict[str, Any]) -> str:
    """Return the name of the start that has written ``mark``, for messages."""
    shown = []
    for key in ("host", "process", "time"):
        shown.append(files.printable(mark.get(key)))
    host, process, since = shown
    return f"another start of this run, on {host} (process {process}, {since}),"


def _read(path: str) -> dict[str, Any]:
    """Read a lock or a request. Return an empty dict if the file is missing or invalid."""
    with contextlib.suppress(OSError, ValueError):
        mark = files.read_json(path)
        if isinstance(mark, dict):
            return mark
    return {}


def _is_live(run_dir: str, owner: dict[str, Any]) -> bool:
    """True if the owner is another process, and still trains."""
    theirs, own = owner.get("identity"), process_identity(os.getpid())
    if "ended" in owner or not isinstance(theirs, str) or theirs == own:
        return False
    if _heartbeat_age(run_dir) >= _STALE_S:
        return False
    machine, _, process = theirs.partition("/")
    number = process.partition("-")[0]
    if machine == "unknown" or machine != own.partition("/")[0] or not number.isdecimal():
        return True
    return process_identity(int(number)) == theirs


def _heartbeat_age(run_dir: str) -> float:
    """Return the seconds since the owner's last heartbeat, measured by the clock of the file
    system."""
    probe = os.path.join(run_dir, f"{_REQUEST}.{os.getpid()}")
    try:
        with open(probe, "w", opener=files.regular) as file:
            now = os.fstat(file.fileno()).st_mtime
        # For an open file, a network file system returns the current modification time.
        with files.open_regular(os.path.join(run_dir, _OWNER)) as file:
            return now - os.fstat(file.fileno()).st_mtime
    except OSError:
        return _STALE_S
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns

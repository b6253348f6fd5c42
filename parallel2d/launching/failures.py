"""Failures of ranks and their reports. The module has the exceptions that end a launcher, the error
file that a rank writes for its launcher, and the context manager `failures_reported_once`, which
runs all code of a rank."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from parallel2d.base import files
from parallel2d.base.errors import ConfigError, EndsSweep, PlainError
from parallel2d.base.exit_codes import LOST
from parallel2d.base.launcher_environment import RankIdentity
from parallel2d.base.store.address import answered_within
from parallel2d.launching.rank_processes import has_own_log
from parallel2d.training.run_directory.end import note_failure

_BROKEN_CONNECTION = re.compile(
    "Connection closed by peer|Connection reset|Broken pipe|Connection refused|"
    "connection was closed"
)


_OTHERS = ("torchrun", "srun")  # not launchers of this package
_PEER_REPORTS_S = 1.5  # time in which the rank that failed first reports its error


class WorkersFailed(Exception):  # noqa: N818 (named after the event)
    """Workers ended with an error. Users see the messages of all exceptions in this module."""


class StoreLost(Exception):  # noqa: N818 (named after the event)
    """The rendezvous store no longer answers this launcher."""


class StoppedBySignal(WorkersFailed, EndsSweep):
    """A signal ended the run before it could save."""


class Preempted(EndsSweep):
    """The run was asked to stop and has saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank, as stored in its error file."""

    text: str
    # With fractions of seconds: other ranks fail within the same second because of this failure
    time: float
    config_error: bool
    complete: bool  # the text explains the failure to users, without a traceback
    step: int | None = None  # step of the failure

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        complete = isinstance(error, ConfigError | PlainError)
        text = str(error) if complete else "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        is_config, step = isinstance(error, ConfigError), getattr(error, "step_of_run", None)
        return cls(text, time.time(), is_config, complete, step)


def _lost_a_peer(text: str) -> bool:
    return bool(_BROKEN_CONNECTION.search(text))


@dataclass(frozen=True)
class RankFailure:
    """The end of a failed rank."""

    rank: int
    exit_code: int
    error: RankError | None  # None if the rank ended before it wrote an error
    waiting: str = ""  # the late ranks that this rank waited for when it was killed

    @property
    def lost_a_peer(self) -> bool:
        """True if this rank failed only because another rank failed and their connection broke."""
        return bool(self.error and _lost_a_peer(self.error.text))

    @property
    def was_killed(self) -> bool:
        """True if this rank, or the process that forks ranks, was killed before the rank wrote an
        error."""
        return not self.error and (self.exit_code < 0 or self.exit_code == LOST)

    def __str__(self) -> str:
        """Describe the failure in one line."""
        if self.lost_a_peer:
            return "lost the connection to another rank"
        if self.error:
            return ["", *self.error.text.splitlines()][-1]
        code = self.exit_code
        if code == LOST:
            return f"exited with code {code}, as ranks do when the process that forks them is ended"
        if code >= 0:
            return f"exited with code {code}"
        cause = "; possibly out of memory" if code == -signal.SIGKILL else ""
        before = f" while {self.waiting}" if self.waiting else ""
        return f"killed ({signal.Signals(-code).name}{cause}){before}"


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the earliest failure of one node. ``failures`` are in the order of their detection."""
    reported = []
    for each in failures:
        if each.error:
            reported.append(each)
    killed = [each for each in failures if each.was_killed]
    # A killed rank leaves no error file, and its peers report only a broken connection.
    if killed and all(map(attrgetter("lost_a_peer"), reported)):
        return killed[0]
    # Several ranks may have failed between two polls, so the order of detection is not sufficient.
    return min(reported, key=attrgetter("error.time")) if reported else failures[0]


def write_error_file(error: RankError) -> None:
    """Write the error to the file that the launcher reads."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps(asdict(error)))


def note_waiting(text: str | None) -> None:
    """Write a note for the launcher that explains why this rank waits; None deletes the note."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    with contextlib.suppress(OSError):
        if path and text:
            Path(f"{path}.waiting").write_text(text)
        elif path:
            os.unlink(f"{path}.waiting")


def read_waiting(path: str) -> str:
    """Return the note of `note_waiting` for the error file at ``path``; empty without one."""
    with contextlib.suppress(OSError):
        return Path(f"{path}.waiting").read_text()
    return ""


def read_error_file(path: str) -> RankError | None:
    """Return the error of `write_error_file`, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RankError(**json.loads(Path(path).read_text()))
    return None


@contextlib.contextmanager
def failures_reported_once(
    identity: RankIdentity, store: Any, run_dir: str | None = None
) -> Iterator[None]:
    """Convert an exception on a rank to a non-zero exit code. All ranks together print one message.

    With the launchers of this package, the launcher prints the message. With other launchers, the
    rank that first sets a key in ``store`` prints it.

    Args:
        run_dir: run directory. The message is also written to its ``train.log``, unless the
            launcher of a single node does this.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as exception:
        error, launcher = RankError.of(exception), identity.launcher
        # The job may continue; the launcher decides this
        if not error.complete and peers_continue():
            write_error_file(error)
            os._exit(1)
        if launcher in _OTHERS and not error.complete and _lost_a_peer(error.text):
            # Wait, so that a rank with an error of its code reports first. If a rank was killed,
            # only the launcher knows it, from the exit code.
            time.sleep(_PEER_REPORTS_S)
            text = f"rank {identity.rank} lost the connection to another rank, which has ended: "
            error = replace(error, text=f"{text}{launcher} names it below", complete=True)
        is_first = launcher != "self" and _is_first_to_report(store)
        if is_first and run_dir is not None:
            note_failure(run_dir, error.text)
        # On a single node, ranks with a log write the error to their log, and the launcher prints
        # it on the console.
        shows = {"self": has_own_log(), "nodes": False}.get(launcher, is_first)
        # torchrun would print the content of the error file in addition to this message.
        if launcher in ("self", "nodes"):
            write_error_file(error)
        elif not error.complete:
            error = replace(error, text=f"rank {identity.rank} failed first:\n{error.text}")
        if shows:
            print(files.for_terminal(error.text), file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # without destructors, which could wait for ranks that are inside a collective


def peers_continue() -> bool:
    """True if the other replicas train on after a replica has failed."""
    # Imported here, because this import loads torch, which a launcher does not need.
    from parallel2d.base.replicas import current

    replicas = current()
    return replicas is not None and replicas.on


def _is_first_to_report(store: Any) -> bool:
    if store is None:
        return True
    claim = functools.partial(store.add, "parallel2d/failure", 1)
    # If the store has ended, rank 0 has ended too and has printed its error.
    with contextlib.suppress(Exception):
        # If rank 0 is stopped, the store does not answer. Then every rank prints its message.
        return answered_within(5.0, claim, 1) == 1
    return False

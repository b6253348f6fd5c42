"""How ranks fail, and who reports it: exceptions that end a launcher, the error file that a rank
leaves for its launcher, and `failures_reported_once` around all that a rank does."""

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
from parallel2d.base.store.address import answered_within
from parallel2d.base.topology import RankIdentity
from parallel2d.launching.rank_processes import LOST, has_own_log
from parallel2d.training.run_directory.end import note_failure

_BROKEN_CONNECTION = re.compile(
    "Connection closed by peer|Connection reset|Broken pipe|Connection refused|"
    "connection was closed"
)


class WorkersFailed(Exception):  # noqa: N818 (named after what happened)
    """Workers ended with an error. As of all exceptions here, the message is for the user."""


class StoreLost(Exception):  # noqa: N818 (named after what happened)
    """The rendezvous store does not answer any more."""


class StoppedBySignal(WorkersFailed, EndsSweep):
    """A signal ended the run before it could save."""


class Preempted(EndsSweep):
    """The run was asked to stop and has saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank, as its error file holds it."""

    text: str
    time: float  # with fractions: peers fail within the same second because this one did
    config_error: bool
    complete: bool  # the text is for the user and says which rank failed
    step: int | None = None  # in which it failed

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        complete = isinstance(error, ConfigError | PlainError)
        text = str(error) if complete else "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        is_config, step = isinstance(error, ConfigError), getattr(error, "step_of_run", None)
        return cls(text, time.time(), is_config, complete, step)


@dataclass(frozen=True)
class RankFailure:
    """The end of a rank that failed."""

    rank: int
    exit_code: int
    error: RankError | None  # None if it was killed before it wrote one
    waiting: str = ""  # why it was stuck when it was killed, if it was

    @property
    def lost_a_peer(self) -> bool:
        """Whether it failed only because another rank had ended: its connection broke."""
        return bool(self.error and _BROKEN_CONNECTION.search(self.error.text))

    @property
    def was_killed(self) -> bool:
        """Whether it was, or the process that forks ranks, before it wrote an error."""
        return not self.error and (self.exit_code < 0 or self.exit_code == LOST)

    def __str__(self) -> str:
        """Says in one line what happened."""
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
    """The failure that came first, of those of one node, in the order in which they were seen."""
    reported = [each for each in failures if each.error]
    killed = [each for each in failures if each.was_killed]
    # A rank that was killed leaves no error file, and its peers have only lost a connection.
    if killed and all(map(attrgetter("lost_a_peer"), reported)):
        return killed[0]
    # Several may have failed between two looks.
    return min(reported, key=attrgetter("error.time")) if reported else failures[0]


def write_error_file(error: RankError) -> None:
    """Leaves the error where its launcher looks for it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps(asdict(error)))


def note_waiting(text: str | None) -> None:
    """Keep for the launcher why this rank is stuck; None removes the note."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    with contextlib.suppress(OSError):
        if path and text:
            Path(f"{path}.waiting").write_text(text)
        elif path:
            os.unlink(f"{path}.waiting")


def read_waiting(path: str) -> str:
    """Return the note of `note_waiting` beside the error file at ``path``; empty without one."""
    with contextlib.suppress(OSError):
        return Path(f"{path}.waiting").read_text()
    return ""


def read_error_file(path: str) -> RankError | None:
    """Returns what `write_error_file` wrote, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RankError(**json.loads(Path(path).read_text()))
    return None


@contextlib.contextmanager
def failures_reported_once(
    identity: RankIdentity, store: Any, run_dir: str | None = None
) -> Iterator[None]:
    """Turns an exception on a rank into a non-zero exit and, over all ranks, one message. Workers
    of our own launchers leave the message to them. Otherwise the rank that is first to claim it in
    ``store`` prints it. ``run_dir``: where the message is kept in ``train.log``, unless the
    launcher of a single node does so."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as exception:
        error, launcher = RankError.of(exception), identity.launcher
        # If the peers continue, the job has not failed: the launcher judges.
        if not error.complete and peers_continue():
            write_error_file(error)
            os._exit(1)
        is_first = launcher != "self" and _is_first_to_report(store)
        if is_first and run_dir is not None:
            note_failure(run_dir, error.text)
        # The standard error of ranks beside the first is a log, where one launcher runs all.
        shows = {"self": has_own_log(), "nodes": False}.get(launcher, is_first)
        # torchrun would print what it finds in the file beside what is printed here.
        if launcher in ("self", "nodes"):
            write_error_file(error)
        elif not error.complete:
            error = replace(error, text=f"rank {identity.rank} failed first:\n{error.text}")
        if shows:
            print(files.for_terminal(error.text), file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # peers may be inside a collective: no destructor may wait for them


def peers_continue() -> bool:
    """Whether replicas may be lost while others train."""
    # Imported here because torch comes with it, which a launcher does not need.
    from parallel2d.base.replicas import current

    replicas = current()
    return replicas is not None and replicas.on


def _is_first_to_report(store: Any) -> bool:
    if store is None:
        return True
    claim = functools.partial(store.add, "parallel2d/failure", 1)
    # A store that has ended did so with rank 0, which has printed its error.
    with contextlib.suppress(Exception):
        # Where rank 0 is stopped: better printed by every rank than by none.
        return answered_within(5.0, claim, 1) == 1
    return False

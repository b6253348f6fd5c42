"""How ranks fail, and who says it: exceptions that end a launcher, the error file that a rank
leaves for its launcher, and `failures_told_once` around all that a rank does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from parallel2d.base import files
from parallel2d.base.errors import ConfigError, EndsSweep, HookError
from parallel2d.base.store.address import answered_within
from parallel2d.base.topology import RankIdentity
from parallel2d.launching.rank_processes import LOST
from parallel2d.training.run_directory import note_failure

_BROKEN_CONNECTION = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "connection was closed",
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
    """The exception that ended a rank, as its error file holds it.

    ``time``: in seconds, with fractions, since peers fail within the same second because this one
    did. ``complete``: the text is for the user and says which rank failed.
    """

    text: str
    time: float
    config_error: bool
    complete: bool

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        config_error = isinstance(error, ConfigError)
        complete = config_error or isinstance(error, HookError)
        if complete:
            text = str(error)
        elif isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        else:
            text = "".join(traceback.format_exception(error)).rstrip()
        return cls(text, time.time(), config_error, complete)

    @property
    def last_line(self) -> str:
        return self.text.splitlines()[-1] if self.text else ""


@dataclass(frozen=True)
class RankFailure:
    """The end of a rank that failed. ``error``: None where it was killed before it could tell."""

    rank: int
    exit_code: int
    error: RankError | None

    @property
    def lost_a_peer(self) -> bool:
        """Whether it failed only because another rank had ended: its connection broke."""
        if self.error is None:
            return False
        return any(words in self.error.text for words in _BROKEN_CONNECTION)

    @property
    def time(self) -> float:
        """When, in seconds; infinite where it is not known."""
        return self.error.time if self.error else math.inf

    def __str__(self) -> str:
        """Says in one line what happened."""
        if self.lost_a_peer:
            return "lost the connection to another rank"
        if self.error:
            return self.error.last_line
        if self.exit_code == -signal.SIGKILL:
            return "killed by SIGKILL, by a user or by the kernel when memory ran out"
        if self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        if self.exit_code == LOST:
            return f"exited with code {LOST}, as ranks do when the process that forks them is ended"
        return f"exited with code {self.exit_code}"


def first_failure(failures: dict[int, Any]) -> RankFailure:
    """The failure that came first. ``failures``: torch's records, by rank."""
    found = [
        RankFailure(rank, failure.exitcode, read_error_file(failure.error_file))
        for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp)
    ]
    told = [failure for failure in found if failure.error]
    killed = [failure for failure in found if not failure.error and failure.exit_code < 0]
    if killed and all(failure.lost_a_peer for failure in told):
        return killed[0]
    # torch's times are whole seconds, within which one failure makes others.
    return min(told, key=lambda failure: failure.time) if told else found[0]


def write_error_file(error: RankError) -> None:
    """Leaves the error where torch's elastic agent looks for it, in the form that it reads."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {
            "py_callstack": error.text,
            "timestamp": str(int(error.time)),
            "parallel2d": asdict(error),
        }
        with open(path, "w") as file:
            json.dump({"message": {"message": error.last_line, "extraInfo": extra}}, file)


def read_error_file(path: str) -> RankError | None:
    """Returns what `write_error_file` wrote, or None."""
    try:
        with open(path) as file:
            return RankError(**json.load(file)["message"]["extraInfo"]["parallel2d"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def failures_told_once(
    identity: RankIdentity, store: Any, run_dir: str | None = None
) -> Iterator[None]:
    """Turns an exception on a rank into a non-zero exit and, over all ranks, one message.

    Workers of our own launchers leave the message to them. Otherwise the rank that is first to
    claim it in ``store`` prints it. ``run_dir``: where the message is kept in ``train.log``, unless
    the launcher of a single node does so.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as exception:
        error = RankError.of(exception)
        first = identity.launcher != "self" and _first_to_claim(store)
        if first and run_dir is not None:
            note_failure(run_dir, error.text)
        # torchrun would print what it finds there beside what is printed here
        if identity.launcher in ("self", "nodes"):
            write_error_file(error)
            if identity.rank and identity.launcher == "self":  # its stderr is its log
                print(files.for_terminal(error.text), file=sys.stderr, flush=True)
        elif first:
            prefix = "" if error.complete else f"rank {identity.rank} failed first:\n"
            print(f"{prefix}{files.for_terminal(error.text)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # peers may be inside a collective: no destructor may wait for them


def _first_to_claim(store: Any) -> bool:
    def claim() -> bool:
        try:
            return store is None or store.add("parallel2d/failure", 1) == 1
        except Exception:  # the store ended with rank 0, which has printed its error
            return False

    # rank 0 is stopped: better printed by every rank than by none
    return answered_within(5.0, claim, True)

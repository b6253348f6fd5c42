"""Exceptions that end a launcher; their messages are for the user."""

from __future__ import annotations

from parallel2d.errors import EndsSweep


class WorkersFailed(Exception):  # noqa: N818 (named after what happened)
    """Workers ended with an error."""


class StoreLost(Exception):  # noqa: N818 (named after what happened)
    """The rendezvous store does not answer any more."""


class StoppedBySignal(WorkersFailed, EndsSweep):
    """A signal ended the run before it could save."""


class Preempted(EndsSweep):
    """The run was asked to end and has saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

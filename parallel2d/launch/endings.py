"""How a launcher's work can end, beside well: exceptions whose message is for a person."""

from __future__ import annotations


class WorkersFailed(Exception):  # noqa: N818 (it says what happened)
    """Workers ended with an error."""


class StoreLost(Exception):  # noqa: N818 (it says what happened)
    """The rendezvous store does not answer any more."""


class Preempted(Exception):  # noqa: N818 (not an error)
    """The run was told to end and saved itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

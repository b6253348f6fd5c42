"""The states of a rank of a job with replicas that may fail (`Phase`, `ReplicaState`), and the
error `ReplicaLost`."""

from __future__ import annotations

import enum


class ReplicaLost(RuntimeError):  # noqa: N818 (named after the event)
    """A collective across replicas has no result, because a replica failed."""


class Phase(enum.Enum):
    """The phases of a rank of a job with replicas that may fail."""

    STARTING = enum.auto()  # the ranks are not divided into replicas yet
    BUILDING = enum.auto()  # replicas are known, but a failed rank still ends all ranks
    BETWEEN_STEPS = enum.auto()  # collectives are repeated until all live ranks have the result
    IN_STEP = enum.auto()  # collectives may have no result; the step is then repeated
    ENDING = enum.auto()  # the job is done, or the other replicas continue without this replica


class ReplicaState(enum.Enum):
    """The state of the model and optimizer in this replica."""

    MISSING = enum.auto()
    RECEIVING = enum.auto()
    COMPLETE = enum.auto()

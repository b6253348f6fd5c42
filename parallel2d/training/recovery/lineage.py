"""Which copies in memory belong to the run as it stands: `Lineage`, which lists the starts of a run
and the step from which each one went on.

Every start of a run gets a random name, its incarnation, and writes it, with the step it starts
from, into ``memory.json`` in the run directory. A copy counts only when its writer is named there
and no later start went back behind its step. So the copies of another run, and those of steps that
the run has left for an older checkpoint, are never loaded, whichever node holds them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from parallel2d.base import files
from parallel2d.base.exchange import sendable
from parallel2d.base.files import is_count
from parallel2d.base.files.tensor_file import DamagedCheckpointError, parse_json
from parallel2d.training.checkpoint.manifest import MAX_BYTES

NAME = "memory.json"
_KEPT = 64  # starts that are remembered; copies of earlier ones were overwritten long ago


@sendable
@dataclass(frozen=True)
class Lineage:
    """(incarnation, step it started from), in the order of time."""

    starts: tuple[tuple[str, int], ...] = ()

    def holds(self, incarnation: str, step: int) -> bool:
        """Whether the copy of ``step`` that ``incarnation`` wrote is a state that this run passed
        through and did not leave."""
        names = [name for name, _ in self.starts]
        if incarnation not in names:
            return False
        return all(step <= base for _, base in self.starts[names.index(incarnation) + 1 :])

    def followed_by(self, incarnation: str, base: int) -> Lineage:
        """With one more start."""
        return Lineage((*self.starts, (incarnation, base))[-_KEPT:])

    @classmethod
    def read(cls, run_dir: str) -> Lineage:
        """Empty when there is none. Raises `DamagedCheckpointError` when it is damaged, OSError
        when it cannot be read."""
        try:
            with open(os.path.join(run_dir, NAME), "rb") as file:
                starts = parse_json(file.read(MAX_BYTES), NAME).get("starts")
        except FileNotFoundError:
            return cls()
        if not isinstance(starts, list):
            raise DamagedCheckpointError(f"{NAME}: starts is missing or not a list")
        for start in starts:
            is_pair = isinstance(start, list) and [type(each) for each in start] == [str, int]
            if not is_pair or not is_count(start[1]):
                raise DamagedCheckpointError(f"{NAME}: a start is not a name and a step")
        return cls(tuple((name, base) for name, base in starts))

    def write(self, run_dir: str) -> None:
        """Replaces the file in one rename."""
        os.makedirs(run_dir, exist_ok=True)
        files.replace(
            os.path.join(run_dir, NAME), json.dumps({"starts": self.starts}), durable=True
        )

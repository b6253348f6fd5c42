"""Whose a run directory is: the last start of the run that took it.

A run directory flows in; an error flows out of a rank that goes on after another start has taken
over.

[Note: two halves of a job] When a network splits, or a launcher is silent for longer than the
others wait, both halves may believe that they are what is left of the job, and both would write
rows and checkpoints of one run. The rendezvous cannot rule that out, since whoever is cut off from
it does not hear of its end. So every start leaves its mark in the run directory before it reads
anything there, and rank 0 looks at every step whether the mark is still its own. The half that was
there first ends, and joins the other when it hears of it.
"""

from __future__ import annotations

import json
import os
import socket
import time

from parallel2d import files

_FILE = "owner.json"


class RunTakenOver(RuntimeError):  # noqa: N818  (what happened; whoever it happens to is in order)
    """Another start of this run has taken its directory over."""


class RunClaim:
    """Rank 0's, from the start of a run to its end."""

    def __init__(self, run_dir: str) -> None:
        """Takes the directory, from whoever has it. Raises OSError when it cannot be written."""
        self._path = os.path.join(run_dir, _FILE)
        self._token = os.urandom(8).hex()
        mark = {
            "token": self._token,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "time": time.strftime("%F %T"),
        }
        files.replace(self._path, json.dumps(mark))
        self._seen = self._identity(self._path)

    def check(self) -> None:
        """Raises `RunTakenOver` naming who took the directory. A look at the file's number and
        time, unless they have changed."""
        try:
            if self._identity(self._path) == self._seen:
                return
            mark = files.read_json(self._path)
        except (OSError, ValueError):
            return  # a file system that hiccups has not given the run to anybody
        if not isinstance(mark, dict) or mark.get("token") != self._token:
            told = mark if isinstance(mark, dict) else {}
            host, process, since = (
                files.printable(told.get(key)) for key in ("host", "process", "time")
            )
            raise RunTakenOver(
                f"another start of this run, on {host} (process {process}, {since}), has taken "
                "over "
                f"{os.path.dirname(self._path)}: this one ends without writing anything more"
            )

    @staticmethod
    def _identity(path: str) -> tuple[int, int]:
        found = os.stat(path)
        return found.st_ino, found.st_mtime_ns

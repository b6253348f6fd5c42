"""Makes the last start of a run the owner of its run directory: an earlier start that still trains
ends at its next step. Start at `RunClaim`.

[Note: two halves of a job] When a network splits, or a launcher does not answer for longer than the
others wait, both halves may go on as what is left of the job, and both would write rows and
checkpoints of one run. The rendezvous cannot rule that out, since it cannot reach a node that is
cut off from it. So every start writes its mark into the run directory before it writes anything
else there, and rank 0 checks at every step whether the mark is still its own. The half that was
there first ends, and joins the other once it can reach it.
"""

from __future__ import annotations

import json
import os
import socket
import time

from parallel2d import files

_FILE = "owner.json"


class RunTakenOver(RuntimeError):  # noqa: N818  (named after what happened; it need not be a fault)
    """Another start of this run has taken its directory over."""


class RunClaim:
    """Rank 0's mark in the run directory, from the start of a run to its end."""

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
        """Raises `RunTakenOver` naming who took the directory.

        Compares the inode and the modification time of the file, and reads it only when they have
        changed.
        """
        try:
            if self._identity(self._path) == self._seen:
                return
            mark = files.read_json(self._path)
        except (OSError, ValueError):
            # An error of the file system does not mean that another start owns the run.
            return
        if not isinstance(mark, dict):
            mark = {}
        if mark.get("token") == self._token:
            return
        host = files.printable(mark.get("host"))
        process = files.printable(mark.get("process"))
        since = files.printable(mark.get("time"))
        raise RunTakenOver(
            f"another start of this run, on {host} (process {process}, {since}), has taken over "
            f"{os.path.dirname(self._path)}: this one ends without writing anything more"
        )

    @staticmethod
    def _identity(path: str) -> tuple[int, int]:
        found = os.stat(path)
        return found.st_ino, found.st_mtime_ns

"""`MemoryCheckpointer`: a `Checkpointer` that also keeps copies in the nodes' shared memory. It is
what ``import parallel2d`` calls ``Checkpointer``, and what the train command uses."""

from __future__ import annotations

import os

from parallel2d.checkpoint import Checkpointer
from parallel2d.checkpoint.save import Group
from parallel2d.recovery.net import MemoryNet, wanted


class MemoryCheckpointer(Checkpointer):
    """`Checkpointer`, with copies in memory as ``config.memory_every`` says; see [Note: memory
    net].

    Attributes:
        memory: the copies, None without.
    """

    memory: MemoryNet | None

    def _copies_every(self) -> int:
        return wanted(self.config, self.group)

    def _open_copies(self, every: int, run_dir: str | os.PathLike[str], votes: Group) -> MemoryNet:
        return MemoryNet(every, os.fspath(run_dir), self.mesh, votes)

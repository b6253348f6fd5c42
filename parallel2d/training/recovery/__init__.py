"""Copies of a run's state in the nodes' shared memory, so that restarted workers need not go back
to a checkpoint on disk: `memory_copies`.

[Note: memory copies] Workers that an elastic agent restarts lose their own memory, but the shared
memory of their node remains. Every few steps each rank copies its part of the state into a buffer
there, in the format of a checkpoint. A node holds every rectangle that its ranks hold once; what
replicas split among them (``strategy=hybrid_full``) is sent to the next one, which keeps it too.
There are two buffers: while one is written, the other one is complete on all nodes. After a restart
the newest copy is chosen of which the remaining nodes still hold every rectangle. It is verified,
each node is sent what it lacks, and it is loaded like any checkpoint, on any mesh. A copy that is
damaged or incomplete is passed over with its reason; the checkpoints on disk remain for that case.
"""

from __future__ import annotations

import os

from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import CheckpointConfig
from parallel2d.training.checkpoint.save import Group
from parallel2d.training.recovery.copies import MemoryCopies

__all__ = ["MemoryCopies", "memory_copies"]

AUTO_EVERY = 10  # steps, with checkpoint.memory_every=auto


def memory_copies(
    config: CheckpointConfig, run_dir: str | os.PathLike[str], mesh: DeviceMesh | None
) -> MemoryCopies | None:
    """The copies that ``config.memory_every`` asks for, for a `Checkpointer` of the same arguments;
    None for none. Rank 0 decides, since environments may differ. Collective."""
    group = Group.new()
    every, why = _decide(config)
    if why:
        group.say(f"memory copies off: {why}")
    every = int(group.broadcast(every))
    return MemoryCopies(every, os.fspath(run_dir), mesh, group) if every else None


def _decide(config: CheckpointConfig) -> tuple[int, str]:
    """Steps between copies, and why there are none."""
    if not config.enabled:
        return 0, "checkpoint.enabled=false"
    if config.memory_every != "auto":
        every = int(config.memory_every)
        return every, "" if every else "checkpoint.memory_every=0"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not restarts.isdecimal() or not int(restarts):
        return (
            0,
            "nothing restarts this job's workers (TORCHELASTIC_MAX_RESTARTS is 0); "
            "checkpoint.memory_every=N turns it on",
        )
    return AUTO_EVERY, ""

"""Copies of a run's state in the nodes' shared memory, so that restarted workers need not go back
to a checkpoint on disk: `memory_copies`.

[Note: memory net] Workers that an elastic agent restarts lose their own memory, but the shared
memory of their node remains. Every few steps each rank copies its part of the state into a buffer
there, in the format of a checkpoint. A node holds every rectangle that its ranks hold once; what
replicas split among them (``strategy=hybrid_full``) is sent to the next one, which keeps it too.
There are two buffers: while one is written, the other one is complete on all nodes. After a restart
the newest copy is chosen of which the remaining nodes still hold every rectangle. It is verified,
each node is sent what it lacks, and it is loaded like any checkpoint, on any mesh. A copy that is
damaged or incomplete is passed over with its reason; the checkpoints on disk remain for that case.
"""

from parallel2d.recovery.net import MemoryNet, memory_copies

__all__ = ["MemoryNet", "memory_copies"]

"""The state of a run left in the nodes' shared memory, so that restarted workers need not go back
to a disk checkpoint: `MemoryNet`.

[Note: memory net] Workers that an elastic agent restarts lose their own memory, their node does
not. Every few steps each rank copies its part of the state into a buffer in the node's shared
memory, in the format of a checkpoint. A node holds every rectangle that its ranks hold once. There
are two buffers: while one is written the other one is complete on all nodes. After a restart the
newest copy of which the nodes that are left still hold every rectangle is verified, what a node
lacks is sent to it, and it is loaded like any checkpoint, on any mesh. Anything that is not as it
should be is passed over with its reason; the disk remains behind it.
"""

from parallel2d.checkpoint.memory.net import MemoryNet

__all__ = ["MemoryNet"]

"""Saves and loads checkpoints. `Checkpointer` saves and restores a run; `Checkpoint` reads one
checkpoint.

An interrupted save leaves no checkpoint. A checkpoint loads on any mesh, and reading it executes no
code.
"""

from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.training.checkpoint.checkpointer import Checkpointer
from parallel2d.training.checkpoint.in_memory import in_memory_checkpoints
from parallel2d.training.checkpoint.reader import Checkpoint
from parallel2d.training.checkpoint.storage import CheckpointError

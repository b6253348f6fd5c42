"""Saves and loads checkpoints: `Checkpointer` for a run, `Checkpoint` to read a checkpoint.

A checkpoint is complete or absent, loads on any mesh, and executes no code when it is read.
"""

from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.training.checkpoint.checkpointer import Checkpointer
from parallel2d.training.checkpoint.in_memory import in_memory_checkpoints
from parallel2d.training.checkpoint.reader import Checkpoint
from parallel2d.training.checkpoint.storage import CheckpointError

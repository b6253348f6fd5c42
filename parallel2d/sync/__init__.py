"""What crosses the replicate axis, and when."""

from parallel2d.sync.accumulation import (
    accumulate,
    clear_with_gradients,
    discard_accumulated,
    no_sync,
)
from parallel2d.sync.engine import GradientSync, register_sync_hook, replicate_group
from parallel2d.sync.torch_engine import TorchSync

__all__ = [
    "GradientSync",
    "TorchSync",
    "accumulate",
    "clear_with_gradients",
    "discard_accumulated",
    "no_sync",
    "register_sync_hook",
    "replicate_group",
]

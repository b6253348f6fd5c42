"""Which sample is in which global batch, and how a rank reads it.

`open_data` opens the sample streams that a `DataConfig` describes, `BatchPlan` gives the positions
that a rank reads, and `BatchFeed` reads them ahead of the training step. The names below are
imported when they are first used, so that preparing data does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel2d.training.data.batch import IGNORED, Batch
    from parallel2d.training.data.feed import BatchFeed, BatchPlan, EndOfData, StepBatch
    from parallel2d.training.data.opening import OpenData, open_data
    from parallel2d.training.data.stream import SampleStream

_NAMES = {
    "batch": ("IGNORED", "Batch"),
    "feed": ("BatchFeed", "BatchPlan", "EndOfData", "StepBatch"),
    "opening": ("OpenData", "open_data"),
    "stream": ("SampleStream",),
}

__all__ = [
    "IGNORED",
    "Batch",
    "BatchFeed",
    "BatchPlan",
    "EndOfData",
    "OpenData",
    "SampleStream",
    "StepBatch",
    "open_data",
]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a run needs of copies of its state that are kept elsewhere than in its store: `Copies`.

`recovery.MemoryNet` is one: copies in the nodes' shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel2d.checkpoint.archive import Checkpoint
from parallel2d.checkpoint.manifest import Manifest


class Copies(Protocol):
    """All methods are collective, `is_due` excepted, which says the same on every rank."""

    def steps(self) -> list[int]:
        """Steps of this run that `open` can be called with, ascending."""

    def open(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Checkpoint:
        """The copy of ``step``. Raises `DamagedCheckpointError` on all ranks when there is none
        that is whole and sound."""

    def close(self, *, loaded: int | None = None) -> None:
        """After `open`. ``loaded``: its step, when the run goes on from there."""

    def begin(self, base: int) -> None:
        """The run goes on from step ``base``: copies of any other state are dropped."""

    def is_due(self, step: int) -> bool:
        """Whether `save` is called after ``step``."""

    def save(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        of_replica: Mapping[str, Tensor],
        rng: Mapping[str, Tensor],
    ) -> None:
        """Copies the state. Never raises for a fault of the place where copies are kept."""

    def finish(self) -> None:
        """The run has ended well: its copies are removed."""

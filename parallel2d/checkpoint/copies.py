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
    """Collective, `is_due` excepted, which says the same on every rank. `MemoryNet` says what each
    method does; none but `open` raises for a fault of the place where copies are kept."""

    def steps(self) -> list[int]: ...
    def open(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Checkpoint: ...
    def close(self, *, loaded: int | None = None) -> None: ...
    def begin(self, base: int) -> None: ...
    def is_due(self, step: int) -> bool: ...
    def save(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        of_replica: Mapping[str, Tensor],
        rng: Mapping[str, Tensor],
    ) -> None: ...
    def finish(self) -> None: ...

"""``sync.engine=torch``: the second axis of `fully_shard` reduces over the replicas.

It stays for comparison. Its partial sums do not record which parameters they hold, so parameters
that ranks or micro-batches use differently may get each other's gradients; it adds in the dtype in
which gradients are sent; and it takes no hooks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.sync.engine import register_engine
from parallel2d.sync.group import ParameterGroup
from parallel2d.sync.group_gradients import clear_gradients


class TorchSync:
    """The engine of a model whose gradients torch reduces over both axes."""

    # Torch has reduced everything when a backward pass ends, on process groups of its own.
    pending = False
    replicate_group = None

    def __init__(
        self, model: nn.Module, groups: Sequence[ParameterGroup], mesh: DeviceMesh
    ) -> None:
        self._groups = groups
        self.update_mesh = mesh
        register_engine(model, self)

    def prepare(self) -> None:
        """Does nothing."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing: nothing follows updates."""

    def finish(self) -> None:
        """Does nothing: backward has reduced everything."""

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""
        clear_gradients(self._groups, set_to_none)
        self.reset()

    def reset(self) -> None:
        """Drops partial sums that an interrupted global batch left behind."""
        for group in self._groups:
            group.discard()

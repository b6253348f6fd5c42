"""Keeps what a model has of the gradients of one global batch, and drops it: `GlobalBatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from parallel2d.parallel.sync.engine.buckets import BucketQueue
from parallel2d.parallel.sync.engine.group_state import GroupState, clear_gradients


class ScalarGradient(Protocol):
    """The gradient of a parameter without dimensions: `parallelize.scalars.Scalar`, which says what
    its methods do."""

    @property
    def gradient(self) -> Tensor | None: ...
    def set_mean(self, mean: Tensor | None) -> None: ...
    def discard(self) -> None: ...
    def rest(self) -> None: ...


class GlobalBatch:
    """The gradients of one global batch.

    ``states``: of the groups, in the order in which backward ends them. ``scalars``: parameters
    that are whole on every rank. ``buckets``: None where no gradients cross the replicate axis.
    ``clear_updated``: drops the gradients of the parts that this replica updates.
    """

    def __init__(
        self,
        device_type: str,
        states: Sequence[GroupState],
        scalars: Sequence[ScalarGradient] = (),
        buckets: BucketQueue | None = None,
        clear_updated: Callable[[bool], None] | None = None,
    ) -> None:
        self.states = states
        self.scalars = scalars
        self.buckets = buckets
        self._device_type = device_type
        self._clear_updated = clear_updated
        # Whether gradients were added that are not reduced over the replicas.
        self.pending = False
        # Whether ranks have agreed on what the gradients hold.
        self.agreed = True

    def join_streams(self) -> None:
        """Lets the current stream wait for the reduced gradients."""
        if self.buckets is not None:
            self.buckets.join_stream()
        elif self._device_type != "cpu":
            # With a single replica, gradients come from the streams of torch.
            current = torch.accelerator.current_stream()
            for state in self.states:
                state.group.wait_for_gradients(current)

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""
        self._clear(set_to_none)
        self.reset()

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind: sums that are not reduced over all
        data ranks."""
        # Reductions that were started write into gradients until they end.
        if self.buckets is not None:
            self.buckets.cancel()
        self.join_streams()
        # Before the agreement some gradients may be those of this rank alone.
        if not self.agreed:
            self._clear(set_to_none=True)
        self.pending = False
        self.agreed = True
        for state in self.states:
            state.reset()
        for scalar in self.scalars:
            scalar.discard()
            scalar.rest()

    def _clear(self, set_to_none: bool) -> None:
        clear_gradients([state.group for state in self.states], set_to_none)
        if self._clear_updated is not None:
            self._clear_updated(set_to_none)

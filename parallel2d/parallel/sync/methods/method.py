"""What every method of synchronization answers (`SyncMethod`), and what follows the updates of the
parameters (`UpdateFollower`). As they stand here they are those of a single replica, for which
nothing crosses the replicate axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals import FSDPGroup, GroupTraffic
from parallel2d.parallel.sync.engine.reductions import Reduction
from parallel2d.parallel.sync.wires import WIRES, Wire, wire_of
from parallel2d.parallel.sync.wires.blocks import RoundingKeys
from parallel2d.parallel.weights.geometry import Region


class UpdateFollower:
    """What happens after each update of one model's parameters."""

    # Whether anything happens, so that an optimizer must be attached.
    follows = False

    def __init__(self) -> None:
        # The optimizer whose updates are followed
        self._optimizer: torch.optim.Optimizer | None = None

    def make(self, model: nn.Module) -> None:
        """Called once, when the parameters of ``model`` have their values. Collective."""

    def after_update(self) -> None:
        """Called after each update. Collective."""

    def shared_values(self) -> Mapping[str, Tensor]:
        """By name, what replicas share in the place of their parameters."""
        return {}

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops the gradients of what the optimizer has in the place of parameters."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows the updates of ``optimizer``; see `parallel2d.attach_optimizer`."""
        if not self.follows or optimizer is self._optimizer:
            return
        self._optimizer = optimizer

        def after_step(stepped: torch.optim.Optimizer, *unused: Any) -> None:
            # Only the optimizer that was attached last counts.
            if stepped is self._optimizer:
                self.after_update()

        optimizer.register_step_post_hook(after_step)

    def check_attached(self) -> None:
        """Raises `ConfigError` where updates must be followed and no optimizer is attached."""
        if self.follows and self._optimizer is None:
            raise ConfigError(
                "no optimizer follows this model: with strategy=hybrid_full and with sync=diloco "
                "the replicas must be told of updates; build the optimizer with "
                "parallel2d.build_optimizer, or pass it to parallel2d.attach_optimizer(model, "
                "optimizer)"
            )


class Message(NamedTuple):
    """What replicas send at once. ``size``: bytes that each has of it, before the collective
    divides or repeats them."""

    collective: str
    size: int


class Started(NamedTuple):
    """A method at work on one model. ``reduction_for``: how buckets of gradients are reduced, from
    what is sent; None: they are not."""

    updates: UpdateFollower
    reduction_for: Callable[[Wire], Reduction] | None


@dataclass(frozen=True)
class SyncMethod:
    """What crosses the replicate axis, known from the configuration alone. ``replicas``: the size
    of that axis."""

    config: SyncConfig
    replicas: int

    # Whether anything crosses
    crosses = False
    # Whether each replica updates its own rows of the parameters
    splits_updates = False
    # Whether all replicas have the same parameters after every update, and so send the same in
    # every step
    replicas_equal = True

    @property
    def description(self) -> str:
        """What crosses, for people, with numbers for ``auto``."""
        return "one replica: nothing crosses the replicate axis"

    @property
    def keeps_masters(self) -> bool:
        """Whether a rank keeps unrounded values of the parameters that it updates."""
        return False

    @property
    def shared_copies(self) -> int:
        """Values that a rank keeps of each value of a parameter, beside it and the optimizer's."""
        return 0

    # What is sent, and when

    def wire(self, dtype: torch.dtype) -> Wire:
        """In which values are sent where the shard axis sends ``dtype``."""
        return self.named_wire or wire_of(dtype)

    @property
    def named_wire(self) -> Wire | None:
        """The wire that ``sync.wire`` names; None for ``auto``."""
        return WIRES.get(self.config.wire)

    def reductions(self, accumulation: int) -> int:
        """How often gradients are reduced in a step of ``accumulation`` micro-batches."""
        return 0

    def gradients(self, group: GroupTraffic) -> Message:
        """One reduction of the gradients of ``group``."""
        return Message("all_reduce", 0)

    def parameters(self, group: GroupTraffic) -> Message:
        """What crosses of the parameters of ``group`` after an update."""
        return Message("all_gather", 0)

    @property
    def update_period(self) -> int:
        """After how many updates the parameters of a group cross."""
        return 1

    @property
    def shortest_period(self) -> int:
        """The least ``sync.every`` that shows all that happens; 0 where a step does."""
        return 0

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        """Bytes of the buckets in flight beside the gradients. ``sums``: bytes of the gradients of
        each group; ``item_bytes``: of an element where ``sync.wire`` is ``auto``."""
        return 0

    # At work

    def start(
        self,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        groups: Sequence[FSDPGroup],
        keys: RoundingKeys,
        gradient_dtype: torch.dtype | None,
    ) -> Started:
        """Prepares one model. Collective over the world.

        ``group``: the process group of the replicas. ``groups``: of the model's parameters, in the
        order in which backward ends them. ``gradient_dtype``: of gradients once they are reduced;
        None: in which they are added.
        """
        return Started(UpdateFollower(), None)

    # What one process would compute, for proofs

    @property
    def gradients_are_exact(self) -> bool:
        """Whether gradients of several replicas may be added in any order and grouping."""
        return self.named_wire is None or not self.named_wire.rounds

    def expected_gradient(
        self, values: Sequence[Tensor], cut: Sequence[Region], keys: RoundingKeys, name: str
    ) -> Tensor:
        """What reductions make of ``values``, the gradients of the replicas for the whole parameter
        ``name``; see `expected_mean`."""
        (value,) = values
        return value

    def expected_copy(self, updated: Tensor) -> Tensor:
        """What all replicas should have of an ``updated`` parameter."""
        return updated

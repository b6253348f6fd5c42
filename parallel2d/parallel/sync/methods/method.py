"""What every method of synchronization answers (`SyncMethod`), and what follows the updates of the
parameters (`UpdateFollower`). As they stand here they are those of a single replica, for which
nothing crosses the replicate axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.sync.engine.buckets import Reduction
from parallel2d.parallel.sync.wires import WIRES, Wire, wire_of
from parallel2d.parallel.sync.wires.blocks import RoundingKeys
from parallel2d.parallel.weights.geometry import Region


class UpdateFollower:
    """What happens after each update of one model's parameters."""

    # Whether anything happens, so that an optimizer must be attached.
    follows = False
    # The optimizer whose updates are followed
    _optimizer: torch.optim.Optimizer | None = None
    # Under what checkpoints have the residuals; empty where there are none
    residual_name = ""
    replica = 0
    replicas = 1
    # Updates of this replica of which the others do not have everything
    unshared_steps = 0
    # How many times as large gradients are as those of the loss
    loss_scale = 1.0

    def make(self, model: nn.Module) -> None:
        """Called once, when the parameters of ``model`` have their values. Collective."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any ``optimizer``. Takes over what was written to parameters.
        Raises `ConfigError` for parameters and gradients that the step would pass over."""

    def after_update(self) -> None:
        """Called after each update. Collective."""

    def shared_values(self) -> Mapping[str, Tensor]:
        """By name, what replicas share in the place of their parameters."""
        return {}

    def residuals(self) -> Mapping[str, Tensor]:
        """By name, what this replica has not sent yet, like the parameter."""
        return {}

    def set_residual(self, name: str, value: Tensor) -> None:
        """Goes on from a value that `residuals` had."""

    def scale(self, factor: float) -> None:
        """The number of replicas over which gradients are averaged changes by ``factor``."""

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
                "no optimizer follows this model: with strategy=hybrid_full, sync=diloco and "
                "sync.wire=int4 updates must be followed; build the optimizer with "
                "parallel2d.build_optimizer, or pass it to parallel2d.attach_optimizer(model, "
                "optimizer)"
            )


def needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether its ``step`` computes losses between its updates, as that of LBFGS does."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


class GroupTraffic(NamedTuple):
    """What a group of parameters moves, on the first rank of the shard axis."""

    gathered_bytes: int  # of this rank's padded parts, in the dtype in which they are gathered
    reduced_bytes: int  # of their gradients, in the dtype in which they are reduced
    reduced_itemsize: int  # bytes of one element of these; 4 for a group without gradients
    reduced_shapes: tuple[torch.Size, ...]  # of this rank's part of each of these gradients
    hidden_shapes: tuple[torch.Size, ...]  # of these, those of hidden matrices
    stored_itemsize: int  # bytes of one element of the sharded parameters
    replicas: int

    @property
    def reduced_numel(self) -> int:
        """Elements of all gradients."""
        return sum(shape.numel() for shape in self.reduced_shapes)

    @property
    def sum_itemsize(self) -> int:
        """Bytes of one element in the dtype in which gradients are added: fp32 at least."""
        return max(4, self.stored_itemsize)


class Message(NamedTuple):
    """The payload of one collective over the replicas."""

    collective: str
    size: int  # bytes before the collective divides or repeats them


class ReplicatedModel(NamedTuple):
    """One model that a method works on."""

    mesh: DeviceMesh
    group: dist.ProcessGroup  # of the replicas
    groups: Sequence[FSDPGroup]  # of the parameters, in the order in which backward ends them
    keys: RoundingKeys  # of stochastic rounding
    hidden: Container[str]  # FQNs of the hidden matrices


@dataclass
class ExpectedState:
    """The state of a reference run in one process, for parity checks."""

    keys: RoundingKeys
    hidden: Container[str]  # as of `ReplicatedModel`
    residuals: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # by replica and FQN


class Started(NamedTuple):
    """A method at work."""

    updates: UpdateFollower
    reduction_for: Callable[[Wire], Reduction] | None  # of buckets; None: there is none


class SyncMethod:
    """The traffic over the replicate axis, known from the configuration only."""

    crosses = False  # True if anything crosses the axis
    splits_updates = False  # True if each replica updates its own rows of the parameters
    replicas_equal = True  # True if all replicas have the same parameters after every update
    description = "one replica: nothing crosses the replicate axis"  # without ``auto``
    update_period = 1  # updates after which the parameters of a group cross
    shortest_period = 0  # the least ``sync.every`` that shows all behaviour; 0: one step does
    warmup = 0.0  # the first steps, which are sent in bf16; below 1 a share of all steps
    shared_copies = 0  # copies of each parameter, beside its own and the optimizer's state
    keeps_masters = False  # True if a rank keeps unrounded values of the rows that it updates
    keeps_residuals = False  # True if gradients of hidden matrices have error feedback
    gradients_are_exact = True  # True if the gradients of replicas are added unrounded

    def __init__(self, config: SyncConfig) -> None:
        self.config = config
        # The one that ``sync.wire`` names; None for ``auto``.
        self.named_wire = WIRES.get(config.wire)
        self.bucket_bytes = int(config.bucket_mib * 2**20)

    def wire(self, dtype: torch.dtype) -> Wire:
        """In which values are sent where the shard axis sends ``dtype``."""
        return self.named_wire or wire_of(dtype)

    def item_bytes(self, auto: int) -> int:
        """Bytes of an element as it is sent; ``auto``: where ``sync.wire`` is that."""
        return auto if self.named_wire is None else self.named_wire.item_bytes

    def reductions(self, accumulation: int) -> int:
        """How often gradients are reduced in a step of ``accumulation`` micro-batches."""
        return 0

    def gradients(self, group: GroupTraffic) -> Message:
        """One reduction of the gradients of ``group``."""
        return Message("all_reduce", 0)

    def parameters(self, group: GroupTraffic) -> Message:
        """What crosses of the parameters of ``group``, once in `update_period` updates."""
        return Message("all_gather", 0)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        """Bytes of the buckets in flight beside the gradients. ``sums``: bytes of the gradients of
        each group; ``item_bytes``: of an element where ``sync.wire`` is ``auto``."""
        return 0

    def start(self, model: ReplicatedModel) -> Started:
        """Prepares one model. Collective over the world."""
        return Started(UpdateFollower(), None)

    def expected_gradient(
        self, values: Sequence[Tensor], cut: Sequence[Region], name: str, state: ExpectedState
    ) -> Tensor:
        """What one process would compute in the place of reductions, for proofs: the mean of
        ``values``, the replicas' gradients of the whole parameter ``name``; see `expected_mean`."""
        (value,) = values
        return value

    def expected_copy(self, updated: Tensor) -> Tensor:
        """What all replicas should have of an ``updated`` parameter, for proofs."""
        return updated

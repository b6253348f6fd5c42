"""Interface of synchronization methods (`SyncMethod`) and of the objects that act after updates of
the parameters (`UpdateFollower`).

The base classes implement a single replica, without traffic over the replicate axis.
"""

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
from parallel2d.parallel.sync.formats import FORMATS, CommunicationFormat, format_of
from parallel2d.parallel.sync.formats.quantize import RoundingKeys
from parallel2d.parallel.weights.geometry import Region


class UpdateFollower:
    """Acts after each update of one model's parameters."""

    # True if it acts after updates, so that an optimizer must be attached
    follows = False
    # The attached optimizer
    _optimizer: torch.optim.Optimizer | None = None
    # Prefix of the error feedback in checkpoints; empty without error feedback
    residual_name = ""
    replica = 0
    replicas = 1
    # Number of updates of this replica that the other replicas have not completely received
    unshared_steps = 0
    # Factor of the loss before backward
    loss_scale = 1.0

    def make(self, model: nn.Module) -> None:
        """Initialize, once the parameters of ``model`` have their values. Collective."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Adopt a script's writes to parameters, before each step of any ``optimizer``.

        Raises `ConfigError` for parameters and gradients that the step would ignore.
        """

    def after_update(self) -> None:
        """Run after each update. Collective."""

    def shared_values(self) -> Mapping[str, Tensor]:
        """Return the tensors that replicas share instead of their parameters, by name."""
        return {}

    def residuals(self) -> Mapping[str, Tensor]:
        """Return this replica's error feedback, by name, with the shape of the parameter."""
        return {}

    def set_residual(self, name: str, value: Tensor) -> None:
        """Continue from a value of `residuals`."""

    def scale(self, factor: float) -> None:
        """Scale the state when the number of averaged replicas changes by ``factor``."""

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drop gradients of tensors that the optimizer has instead of parameters."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Run `after_update` after steps of ``optimizer``; see `parallel2d.attach_optimizer`."""
        if not self.follows or optimizer is self._optimizer:
            return
        self._optimizer = optimizer

        def after_step(stepped: torch.optim.Optimizer, *unused: Any) -> None:
            # Only the last attached optimizer counts.
            if stepped is self._optimizer:
                self.after_update()

        optimizer.register_step_post_hook(after_step)

    def check_attached(self) -> None:
        """Raise `ConfigError` if updates must be followed and no optimizer is attached."""
        if self.follows and self._optimizer is None:
            raise ConfigError(
                "no optimizer follows this model: with strategy=hybrid_full, sync=diloco and "
                "sync.wire=int4 updates must be followed; build the optimizer with "
                "parallel2d.build_optimizer, or pass it to parallel2d.attach_optimizer(model, "
                "optimizer)"
            )


def needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return True if ``step`` computes losses between updates, like the step of LBFGS."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


class GroupTraffic(NamedTuple):
    """The traffic of a group of parameters, on the first rank of the shard axis."""

    gathered_bytes: int  # this rank's padded local shards, in the all-gather dtype
    reduced_bytes: int  # their gradients, in the reduction dtype
    reduced_itemsize: int  # bytes of an element of a gradient; 4 for a group without gradients
    reduced_shapes: tuple[torch.Size, ...]  # local shards of the gradients
    hidden_shapes: tuple[torch.Size, ...]  # the subset of hidden matrices
    stored_itemsize: int  # bytes of an element of the sharded parameters
    replicas: int
    stays_unsharded: bool = False  # between forward and backward, under every strategy

    @property
    def reduced_numel(self) -> int:
        """Elements of all gradients."""
        return sum(map(torch.Size.numel, self.reduced_shapes))

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element in the accumulation dtype of gradients: fp32 at least."""
        return max(4, self.stored_itemsize)


class Message(NamedTuple):
    """Payload of one collective over the replicas."""

    collective: str
    size: int  # bytes, before the collective divides or repeats them


class ReplicatedModel(NamedTuple):
    """One model on several replicas, as a method gets it."""

    mesh: DeviceMesh
    group: dist.ProcessGroup  # process group of the replicas
    groups: Sequence[FSDPGroup]  # in the order of their ends in backward
    keys: RoundingKeys  # of stochastic rounding
    hidden: Container[str]  # FQNs of the hidden matrices


@dataclass
class ExpectedState:
    """The state of a reference run in one process, for parity checks."""

    keys: RoundingKeys
    hidden: Container[str]  # see `ReplicatedModel`
    residuals: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # by replica and FQN


class Started(NamedTuple):
    """A method that has started on a model."""

    updates: UpdateFollower
    reduction_for: Callable[[CommunicationFormat], Reduction] | None  # of buckets; None: no buckets


class SyncMethod:
    """Traffic over the replicate axis, as the configuration defines it."""

    crosses = False  # True if there is traffic over the axis
    splits_updates = False  # True if each replica updates its own rows of the parameters
    replicas_equal = True  # True if all replicas have equal parameters after every update
    description = "one replica: nothing crosses the replicate axis"  # without ``auto``
    update_period = 1  # updates between two exchanges of the parameters of a group
    shortest_period = 0  # the least ``sync.every`` with all behaviour of the method; 0: one step
    warmup = 0.0  # number of first steps in bf16; below 1 a share of all steps
    shared_copies = 0  # copies of each parameter, in addition to parameter and optimizer state
    keeps_masters = False  # True if a rank keeps unrounded values of the rows that it updates
    has_error_feedback = False  # True if gradients of hidden matrices have error feedback
    gradients_are_exact = True  # True if the gradients of replicas are summed unrounded

    def __init__(self, config: SyncConfig) -> None:
        self.config = config
        # The format of ``sync.wire``; None for ``auto``.
        self.named_format = FORMATS.get(config.wire)
        self.bucket_bytes = config.bucket_bytes

    def format_for(self, dtype: torch.dtype) -> CommunicationFormat:
        """Return the communication format, if the shard axis sends ``dtype``."""
        return self.named_format or format_of(dtype)

    def item_bytes(self, auto: int) -> int:
        """Return bytes of an element in communication; ``auto``: the value for ``auto``."""
        return auto if self.named_format is None else self.named_format.item_bytes

    def reductions(self, accumulation: int) -> int:
        """Return the number of reductions in a step of ``accumulation`` micro-batches."""
        return 0

    def gradients(self, group: GroupTraffic) -> Message:
        """Return one reduction of the gradients of ``group``."""
        return Message("all_reduce", 0)

    def parameters(self, group: GroupTraffic) -> Message:
        """Return the exchange of the parameters of ``group``, once per `update_period` updates."""
        return Message("all_gather", 0)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        """Return bytes of the buckets in flight, in addition to the gradients.

        Args:
            sums: bytes of the gradients of each group.
            item_bytes: bytes of an element if ``sync.wire`` is ``auto``.
        """
        return 0

    def start(self, model: ReplicatedModel) -> Started:
        """Start on one model. Collective over the world."""
        return Started(UpdateFollower(), None)

    def expected_gradient(
        self, values: Sequence[Tensor], cut: Sequence[Region], name: str, state: ExpectedState
    ) -> Tensor:
        """Return the reduced gradient of a reference run in one process, for parity checks.

        ``values`` are the replicas' gradients of the unsharded parameter ``name``. For the other
        arguments see `expected_mean`.
        """
        (value,) = values
        return value

    def expected_copy(self, updated: Tensor) -> Tensor:
        """Return the expected value of an ``updated`` parameter on all replicas."""
        return updated

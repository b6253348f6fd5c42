"""Interfaces of synchronization methods (`SyncMethod`), and of their state that follows the updates
of parameters (`UpdateFollower`).

The base classes implement a single replica, without communication over the replicate axis.
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
    """State of a method for one model, which is called before and after updates of parameters."""

    # True if `after_update` does something, so that an optimizer must be attached
    follows = False
    # The attached optimizer
    _optimizer: torch.optim.Optimizer | None = None
    # Prefix of the error feedback in checkpoints; empty without error feedback
    residual_name = ""
    replica = 0  # number of this rank's replica
    replicas = 1  # number of replicas
    # Number of updates of this replica that are not completely sent to the other replicas
    unshared_steps = 0
    # Factor of the loss before backward
    loss_scale = 1.0

    def make(self, model: nn.Module) -> None:
        """Initialize the state, after the parameters of ``model`` have their values. Collective."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any ``optimizer``. Takes over a script's writes to parameters.

        Raises `ConfigError` if the step would ignore parameters or gradients.
        """

    def after_update(self) -> None:
        """Called after each step of the attached optimizer. Collective."""

    def shared_values(self) -> Mapping[str, Tensor]:
        """Return the tensors that must be equal on all replicas instead of the parameters,
        by FQN."""
        return {}

    def residuals(self) -> Mapping[str, Tensor]:
        """Return this replica's error feedback by FQN, with the shapes of the parameters."""
        return {}

    def set_residual(self, name: str, value: Tensor) -> None:
        """Set the error feedback of one parameter to a value from `residuals`."""

    def scale(self, factor: float) -> None:
        """Multiply the error feedback by ``factor``, after a change of the number of ranks."""

    def clear_gradients(self, set_to_none: bool) -> None:
        """Clear gradients of tensors that the optimizer updates instead of the parameters."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `after_update` after each step of ``optimizer``. See
        `parallel2d.attach_optimizer`."""
        if not self.follows or optimizer is self._optimizer:
            return
        self._optimizer = optimizer

        def after_step(stepped: torch.optim.Optimizer, *unused: Any) -> None:
            # Only the last attached optimizer counts.
            if stepped is self._optimizer:
                self.after_update()

        optimizer.register_step_post_hook(after_step)

    def check_attached(self) -> None:
        """Raise `ConfigError` if an optimizer must be attached and none is."""
        if self.follows and self._optimizer is None:
            raise ConfigError(
                "no optimizer follows this model: with strategy=hybrid_full, sync=diloco and "
                "sync.wire=int4 updates must be followed; build the optimizer with "
                "parallel2d.build_optimizer, or pass it to parallel2d.attach_optimizer(model, "
                "optimizer)"
            )


def needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return True if ``step`` requires a closure that computes the loss, like the step of LBFGS."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


class GroupTraffic(NamedTuple):
    """Sizes of the payloads of one FSDP group, on the first rank of the shard axis."""

    gathered_bytes: int  # bytes of the padded local shards, in the all-gather dtype
    reduced_bytes: int  # bytes of the gradients of the local shards, in the reduction dtype
    reduced_itemsize: int  # bytes of an element of a gradient; 4 for a group without gradients
    reduced_shapes: tuple[torch.Size, ...]  # shapes of the local shards of the gradients
    hidden_shapes: tuple[torch.Size, ...]  # the shapes in ``reduced_shapes`` of hidden matrices
    stored_itemsize: int  # bytes of an element of the sharded parameters
    replicas: int
    stays_unsharded: bool = False  # between forward and backward, under every strategy

    @property
    def reduced_numel(self) -> int:
        """Number of elements of all gradients."""
        return sum(map(torch.Size.numel, self.reduced_shapes))

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element in the accumulation dtype of gradients, which is fp32 or wider."""
        return max(4, self.stored_itemsize)


class Message(NamedTuple):
    """Payload of one collective over the replicas."""

    collective: str
    size: int  # bytes, before the collective divides or repeats them


class ReplicatedModel(NamedTuple):
    """The parts of a model that `SyncMethod.start` needs."""

    mesh: DeviceMesh
    group: dist.ProcessGroup  # process group of the replicas
    groups: Sequence[FSDPGroup]  # in the order of their backward passes
    keys: RoundingKeys  # keys of stochastic rounding
    hidden: Container[str]  # FQNs of the hidden matrices


@dataclass
class ExpectedState:
    """The state of a reference run in one process, for parity checks.

    ``residuals`` is the error feedback by (replica, FQN).
    """

    keys: RoundingKeys
    hidden: Container[str]  # see `ReplicatedModel`
    residuals: dict[tuple[int, str], Tensor] = field(default_factory=dict)


class Started(NamedTuple):
    """Result of `SyncMethod.start` for one model."""

    updates: UpdateFollower
    # Returns the reduction of a bucket in a format; None: gradients are not reduced
    reduction_for: Callable[[CommunicationFormat], Reduction] | None


class SyncMethod:
    """A synchronization method of the replicate axis, and its communication volume."""

    crosses = False  # True if there is communication over the axis
    splits_updates = False  # True if each replica updates only its rows of the parameters
    replicas_equal = True  # True if all replicas have equal parameters after every update
    description = "one replica: nothing crosses the replicate axis"  # for logs
    update_period = 1  # number of updates between two exchanges of the parameters of a group
    # Smallest ``sync.every`` at which the parity check covers the method; 0: one step is enough
    shortest_period = 0
    warmup = 0.0  # number of first steps in bf16; if below 1, a fraction of all steps
    shared_copies = 0  # tensors per parameter, in addition to parameter and optimizer state
    keeps_masters = False  # True if a rank stores unrounded values of the rows that it updates
    has_error_feedback = False  # True if gradients of hidden matrices have error feedback
    gradients_are_exact = True  # True if the gradients of replicas are summed unrounded

    def __init__(self, config: SyncConfig) -> None:
        self.config = config
        # The format of ``sync.wire``; None for ``auto``.
        self.named_format = FORMATS.get(config.wire)
        self.bucket_bytes = config.bucket_bytes

    def format_for(self, dtype: torch.dtype) -> CommunicationFormat:
        """Return the communication format. ``dtype`` is used if ``sync.wire`` is ``auto``."""
        return self.named_format or format_of(dtype)

    def item_bytes(self, auto: int) -> int:
        """Return the bytes of an element in communication; ``auto`` if ``sync.wire`` is
        ``auto``."""
        return auto if self.named_format is None else self.named_format.item_bytes

    def reductions(self, accumulation: int) -> int:
        """Return the number of gradient reductions per step of ``accumulation`` micro-batches."""
        return 0

    def gradients(self, group: GroupTraffic) -> Message:
        """Return the payload of one reduction of the gradients of ``group``."""
        return Message("all_reduce", 0)

    def parameters(self, group: GroupTraffic) -> Message:
        """Return the payload of the exchange of the parameters of ``group``.

        The exchange runs once per `update_period` updates.
        """
        return Message("all_gather", 0)

    def buffer_bytes(self, sums: Sequence[int], item_bytes: int) -> int:
        """Return the bytes of communication buffers, in addition to the gradients.

        Args:
            sums: bytes of the gradients of each group.
            item_bytes: bytes of an element if ``sync.wire`` is ``auto``.
        """
        return 0

    def start(self, model: ReplicatedModel) -> Started:
        """Create the state of this method for one model. Collective over the world."""
        return Started(UpdateFollower(), None)

    def expected_gradient(
        self, values: Sequence[Tensor], cut: Sequence[Region], name: str, state: ExpectedState
    ) -> Tensor:
        """Compute a reduced gradient in one process, for parity checks.

        ``values`` are the gradients of all replicas for the unsharded parameter ``name``. For
        ``cut`` see `expected_mean`.
        """
        (value,) = values
        return value

    def expected_copy(self, updated: Tensor) -> Tensor:
        """Return the value that all replicas have after the exchange of an ``updated``
        parameter."""
        return updated

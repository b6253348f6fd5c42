"""What an engine needs of a model: groups of parameters, scalars, the order of collectives.

These are protocols, which `parallel2d.parallelize` implements in its `fsdp_internals`, `scalars`
and `collective_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GroupParameter(Protocol):
    """One parameter of a group.

    Its *whole* gradient is the one that autograd computes for the gathered parameter; its *local*
    gradient is this rank's part after the reduction over the shard axis.
    """

    name: str
    """Its fully qualified name (FQN)."""

    @property
    def start(self) -> int:
        """The position of this rank's first value in the whole parameter, flattened."""

    @property
    def sharded(self) -> nn.Parameter:
        """The parameter that the optimizer has, a `DTensor`."""

    @property
    def has_whole_gradient(self) -> bool:
        """Whether this rank has a gradient of it that is not reduced over the shard axis."""

    @property
    def whole_gradient_dtype(self) -> torch.dtype | None:
        """The dtype of the whole gradient of this pass, or of the zeros that replace a missing one;
        None before the first forward."""

    @property
    def is_accumulated(self) -> bool:
        """Whether earlier micro-batches left a sum that is not reduced over the shard axis."""

    def accumulate(self) -> None:
        """Turns the whole gradient into such a sum, in `gradient_dtype`; zeros if there is none."""

    @property
    def part(self) -> Tensor | None:
        """The whole gradient where it is one part of a sum over the tensor axis, else None."""

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The process group of the tensor axis, for a parameter with a `part`."""

    def set_sum_of_parts(self, total: Tensor) -> None:
        """Replaces the whole gradient by ``total``, the sum over the tensor axis, cast to
        `gradient_dtype`."""

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient."""

    def set_gradient(self, local: Tensor | None) -> None:
        """Sets the reduced gradient from this rank's part."""

    @property
    def local_size(self) -> torch.Size:
        """The shape of `local_gradient`."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which reduced gradients are added."""

    def take_hooks(self) -> list[Callable[[Tensor], object]]:
        """Removes and returns the hooks of `register_post_accumulate_grad_hook`."""

    def give_hooks_back(self) -> None:
        """Registers again what `take_hooks` has removed."""


class ParameterGroup(Protocol):
    """A group of parameters that are gathered and reduced over the shard axis together."""

    called: str
    """The names of its modules, for messages."""
    wire: torch.dtype
    """The dtype in which gradients are sent to other replicas, where they are added in fp32 at
    least; int8: blocks of 8 bits a value."""

    @property
    def parameters(self) -> Sequence[GroupParameter]:
        """All of them, always in the same order."""

    @property
    def trained(self) -> Sequence[GroupParameter]:
        """Those that require gradients."""

    @property
    def crosses_replicas(self) -> bool:
        """Whether this backward pass is to be reduced over the replicas."""

    @property
    def reduces_gradients(self) -> bool:
        """Whether this backward pass reduces over the shard axis."""

    def fill_unused(self, fill: bool) -> None:
        """Whether parameters without a gradient contribute zeros to the next reduction."""

    def around_backward(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Calls ``before`` and ``after`` around each reduction of the group over the shard axis."""

    def on_forward(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` at each forward of the group that autograd records."""

    def reduce_late(self) -> None:
        """Reduces over the shard axis what earlier backward passes left. Collective."""

    def wait_for_gradients(self, stream: torch.Stream) -> None:
        """Lets ``stream`` wait for the reduced gradients."""

    def discard(self) -> None:
        """Drops sums that are not reduced over the shard axis."""


class ScalarGradient(Protocol):
    """The gradient of a parameter without dimensions; see `parallelize.scalars`."""

    @property
    def gradient(self) -> Tensor | None:
        """What this rank has added up."""

    def set_mean(self, mean: Tensor | None) -> None:
        """Adds the mean over the data ranks to the parameter's gradient; None: there is none."""

    def discard(self) -> None:
        """Drops what this rank has added up."""

    def rest(self) -> None:
        """Puts the parameter that the optimizer has into the modules."""


class IssueOrder(Protocol):
    """The order of the collectives of this rank's shard group; see
    `parallelize.collective_order`."""

    def end_backward(self) -> None:
        """Records that this rank's backward pass has ended. Raises OutOfOrder."""

    def acknowledge(self) -> None:
        """Goes on after another rank raised OutOfOrder."""

    def digest(self) -> int:
        """A hash of what was issued since the last call; 0 where it was compared already."""

    def differing_on_other_hosts(self) -> str:
        """The message when digests differ. Collective over the shard group."""

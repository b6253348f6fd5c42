"""What synchronization needs to know of a group of parameters that are gathered together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GroupParameter(Protocol):
    """One parameter of a group. `parallel2d.parallelize.fsdp_internals` has the implementation."""

    @property
    def sharded(self) -> nn.Parameter:
        """The one that the optimizer has, a `DTensor`."""

    @property
    def has_whole_gradient(self) -> bool:
        """Whether this rank has a gradient of it that is not reduced over the shard axis."""

    @property
    def whole_gradient_dtype(self) -> torch.dtype | None:
        """Of the gradient of this pass that is not reduced over the shard axis, or of zeros in its
        place; None before the first forward."""

    @property
    def is_accumulated(self) -> bool:
        """Whether earlier micro-batches left an unreduced sum."""

    def accumulate(self) -> None:
        """Turns the gradient into an unreduced sum in the wide dtype, zeros if there is none."""

    @property
    def part(self) -> Tensor | None:
        """The unreduced gradient where it is a part of a sum over the tensor axis."""

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """That of the tensor axis, where there are parts."""

    def set_sum_of_parts(self, total: Tensor) -> None:
        """Makes the sum over the tensor axis, in the wide dtype, the unreduced gradient."""

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient."""

    def set_gradient(self, local: Tensor | None) -> None:
        """Sets the reduced gradient from this rank's part."""

    @property
    def local_size(self) -> torch.Size: ...

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which reduced gradients are added."""

    def take_hooks(self) -> list[Callable[[Tensor], object]]:
        """Removes and returns what `register_post_accumulate_grad_hook` has registered."""

    def give_hooks_back(self) -> None:
        """Registers again what `take_hooks` has removed."""


class ParameterGroup(Protocol):
    """A group of parameters that are gathered and reduced over the shard axis together."""

    called: str
    """Its modules, for messages."""
    wire: torch.dtype
    """Of gradients on the way to other ranks; they are added in fp32 at least."""

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
        """Drops unreduced sums."""


def clear_gradients(groups: Iterable[ParameterGroup], set_to_none: bool) -> None:
    """Drops the gradients of sharded parameters, also while gathered ones stand in their places."""
    for group in groups:
        for parameter in group.trained:
            local = parameter.local_gradient
            if set_to_none:
                parameter.set_gradient(None)
            elif local is not None:
                local.zero_()

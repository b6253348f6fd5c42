"""What the engine keeps about one group of parameters between its hooks (`GroupState`), and what
prepares its gradients for a reduction: one dtype, and additions in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.base.device import keep_until_done
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup, FSDPParameter
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.sync.wires import Wire
from parallel2d.parallel.weights.geometry import pieces_of


class GroupState:
    """A group in the current global batch. ``wire``: in which gradients go to other replicas."""

    def __init__(self, group: FSDPGroup, wire: Wire) -> None:
        self.group = group
        self.wire = wire
        # By parameter, frozen ones included: whether this rank has a gradient; once agreed, any.
        self.used = [False] * len(group.parameters)
        # Forwards that autograd recorded and no backward pass has ended since; 2 means several.
        self.forwards = 0
        # It has run more than once before a backward pass, and may again.
        self.repeats = False
        # Its reduction over the shard axis has begun in this backward pass.
        self.started = False
        # Its gradients will not change any more in this backward pass.
        self.final = False
        # What its gradients hold is the mean over all data ranks already.
        self.averaged = False
        self._set_aside: list[tuple[FSDPParameter, Tensor]] = []

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which its gradients are added."""
        return self.group.trained[0].gradient_dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's reduced gradients."""
        numel = sum(parameter.local_size.numel() for parameter in self.group.trained)
        return numel * self.gradient_dtype.itemsize

    @property
    def has_whole_gradients(self) -> bool:
        """Whether this rank has a gradient that is not reduced over the shard axis."""
        return any(parameter.has_whole_gradient for parameter in self.group.trained)

    def count_forward(self) -> None:
        """Called at each forward of the group that autograd records."""
        self.forwards = min(self.forwards + 1, 2)
        self.repeats |= self.forwards > 1

    def start_reduction(self) -> bool:
        """Its reduction over the shard axis begins; whether this rank has gradients for it. Raises
        RuntimeError in a backward pass that autograd records, and where gradients were final."""
        # Gradients are enabled in a backward pass only with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward(create_graph=True) reached {self.group.called}: second derivatives are "
                "not possible here, because its parameters are released after the first; the "
                "difference of two forward passes, (model(x + e) - model(x)) / |e|, gives such "
                "penalties"
            )
        any_gradient = self.has_whole_gradients
        if any_gradient and self.final:
            raise RuntimeError(
                f"{self.group.called} got gradients twice in one backward pass, and the first were "
                "on their way to other replicas: call the module, not parts of it"
            )
        # The second one in this backward pass.
        self.repeats |= self.started
        self.started = True
        return any_gradient

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        # A forward whose backward pass is still to come goes on counting.
        self.forwards = max(self.forwards - self.started, 0)
        self.started = False

    def complete(self, dtype: torch.dtype | None) -> None:
        """Its gradients are the means over all data ranks by now: casts them to ``dtype``."""
        if dtype is not None:
            for parameter in self.group.trained:
                cast_gradient(parameter, dtype)
        self.final = False
        self.averaged = True

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind."""
        self.final = False
        self.started = False
        self._set_aside = []
        for parameter in self.group.parameters:
            parameter.give_hooks_back()
            parameter.forget_hooks()
        self.group.discard()

    def note_used(self) -> None:
        """Brings `used` up to date with this pass."""
        for number, parameter in enumerate(self.group.parameters):
            sharded = parameter.sharded
            if parameter.has_whole_gradient:
                self.used[number] = True
            # One of an earlier pass is in the part that this replica updates once it is reduced.
            elif sharded.grad is None and updated_as(sharded).grad is None:
                self.used[number] = False

    def apply_used(self, used: Sequence[bool]) -> None:
        """Removes the gradients of parameters that no rank has ``used``, and calls the hooks of
        `register_post_accumulate_grad_hook` of the others."""
        self.used = list(used)
        for parameter, is_used in zip(self.group.parameters, used, strict=True):
            if not is_used:
                updated_as(parameter.sharded).grad = None
        for parameter in self.group.trained:
            updated = updated_as(parameter.sharded)
            # Autograd calls none for a parameter that was not used.
            if updated.grad is not None:
                parameter.call_hooks(updated)
            parameter.forget_hooks()

    def set_aside_means(self) -> None:
        """Takes out means that a narrow dtype would round again."""
        were_averaged = self.averaged
        self.averaged = False
        # In 32 bits or more they stay: averaging equal gradients again rounds once, in fp32.
        if not were_averaged or not self.wire.rounds:
            return
        for parameter in self.group.trained:
            local = parameter.local_gradient
            if local is not None:
                self._set_aside.append((parameter, local))
                parameter.set_gradient(None)

    @property
    def adds_to_means(self) -> bool:
        """Whether its reduction is added to means of earlier backward passes."""
        return bool(self._set_aside)

    def add_means(self) -> None:
        """Adds what `set_aside_means` has taken out to the new gradients."""
        for parameter, earlier in self._set_aside:
            local = parameter.local_gradient
            # There is none where the global batch was abandoned.
            if local is not None:
                local.add_(earlier)
                keep_until_done(earlier)
        self._set_aside = []


def clear_gradients(groups: Iterable[FSDPGroup], set_to_none: bool) -> None:
    """Drops the gradients of sharded parameters, or sets them to zero.

    ``model.zero_grad()`` does not reach them while the gathered parameters are in the modules.
    """
    for group in groups:
        for parameter in group.trained:
            local = parameter.local_gradient
            if set_to_none:
                parameter.set_gradient(None)
            elif local is not None:
                # As `zero_grad(set_to_none=False)` does: the memory is kept.
                local.zero_()


def cast_gradient(parameter: FSDPParameter, dtype: torch.dtype) -> None:
    """Casts the reduced gradient, if there is one, to ``dtype``."""
    local = parameter.local_gradient
    if local is not None and local.dtype != dtype:
        parameter.set_gradient(local.to(dtype))


def make_uniform(parameters: Sequence[FSDPParameter]) -> None:
    """Gives the whole gradients of a group one dtype, in which torch reduces them.

    They differ where some are sums of micro-batches, and where a module casts its own weights.
    """
    dtypes = {parameter.whole_gradient_dtype for parameter in parameters}
    # None: there is no gradient before the first forward.
    dtypes.discard(None)
    any_accumulated = any(parameter.is_accumulated for parameter in parameters)
    # Sums over micro-batches hold the parts of the tensor axis too, in fp32 at least.
    if len(dtypes) > 1 or any_accumulated or _sum_parts(parameters):
        for parameter in parameters:
            parameter.accumulate()


@torch.no_grad()
def _sum_parts(parameters: Sequence[FSDPParameter]) -> bool:
    """Adds the parts of gradients over the tensor axis that have fewer than 32 bits, in fp32 and in
    one all-reduce. Returns whether there were any: the group must then have the dtype of sums.

    torch would add them in the dtype that computes (pytorch issue 190626).
    """
    narrow: list[FSDPParameter] = []
    parts: list[Tensor] = []
    for parameter in parameters:
        part = parameter.part
        if part is not None and part.dtype.itemsize < 4:
            narrow.append(parameter)
            parts.append(part)
    if narrow:
        flat = torch.cat([part.flatten().float() for part in parts])
        dist.all_reduce(flat, group=narrow[0].tensor_group)
        totals = pieces_of(flat, [part.shape for part in parts])
        for parameter, total in zip(narrow, totals, strict=True):
            parameter.set_sum_of_parts(total)
    return bool(narrow)

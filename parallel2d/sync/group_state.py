"""What the engine keeps about one group of parameters between its hooks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from parallel2d.model_structure import updated_as
from parallel2d.sync.bucket import keep_until_done
from parallel2d.sync.group import GroupParameter, ParameterGroup


class GroupState:
    """The state of a group in the current global batch."""

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group
        # By parameter, frozen ones included: whether this rank holds a gradient of it. After the
        # agreement: whether any rank does.
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
        self._set_aside: list[tuple[GroupParameter, Tensor]] = []
        self._hooks: list[tuple[GroupParameter, list[Callable[[Tensor], object]]]] = []

    # Forward and backward passes

    def count_forward(self) -> None:
        """Called at each forward of the group that autograd records."""
        self.forwards = min(self.forwards + 1, 2)
        if self.forwards > 1:
            self.repeats = True

    def start_reduction(self) -> None:
        """Its reduction over the shard axis begins."""
        # The second one in this backward pass.
        if self.started:
            self.repeats = True
        self.started = True

    def set_final(self) -> None:
        """Decides, after a reduction over the shard axis, whether another one may follow."""
        # A group that ran twice is reduced twice. It is final at the end of the backward pass.
        ran_once = self.forwards == 1
        self.final = ran_once and not self.repeats

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        if self.started:
            # A forward whose backward pass is still to come goes on counting.
            self.forwards = max(self.forwards - 1, 0)
        self.started = False

    # Used parameters

    def note_used(self) -> None:
        """Brings `used` up to date with this pass."""
        for number, parameter in enumerate(self.group.parameters):
            if parameter.has_whole_gradient:
                self.used[number] = True
            # One without a gradient in this pass may have one of an earlier pass.
            elif _reduced_gradient(parameter) is None:
                self.used[number] = False

    def drop_unused(self) -> None:
        """Removes the gradients of parameters that are not `used`."""
        for parameter, used in zip(self.group.parameters, self.used, strict=True):
            if not used:
                updated_as(parameter.sharded).grad = None

    # Means of earlier backward passes

    def set_aside_means(self) -> None:
        """Takes gradients out that are averaged already, where sending them again in a narrow dtype
        would round them again."""
        were_averaged = self.averaged
        self.averaged = False
        if not were_averaged:
            return
        # In 32 bits or more they stay: averaging equal gradients again rounds once, in fp32.
        if self.group.wire.itemsize >= 4:
            return
        for parameter in self.group.trained:
            local = parameter.local_gradient
            if local is not None:
                self._set_aside.append((parameter, local))
                parameter.set_gradient(None)

    def add_means(self) -> None:
        """Adds what `set_aside_means` has taken out to the new gradients."""
        for parameter, earlier in self._set_aside:
            local = parameter.local_gradient
            # There is none where the global batch was abandoned.
            if local is not None:
                local.add_(earlier)
                keep_until_done(earlier)
        self._set_aside = []

    # Hooks of `register_post_accumulate_grad_hook`: torch would call them after the reduction over
    # the shard axis, and they are to see the mean over all data ranks.

    def take_hooks(self) -> None:
        """Removes the hooks of its parameters and keeps them."""
        self._hooks = []
        for parameter in self.group.trained:
            hooks = parameter.take_hooks()
            # Most parameters have none.
            if hooks:
                self._hooks.append((parameter, hooks))

    def give_hooks_back(self) -> None:
        """Registers them again; `call_hooks` can still call them."""
        for parameter, _ in self._hooks:
            parameter.give_hooks_back()

    def call_hooks(self) -> None:
        """Calls the hooks that `take_hooks` has kept, for parameters that have a gradient."""
        for parameter, hooks in self._hooks:
            updated = updated_as(parameter.sharded)
            # Autograd calls none for a parameter that was not used.
            if updated.grad is None:
                continue
            for hook in hooks:
                hook(updated)
        self._hooks = []

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind."""
        self.final = False
        self.started = False
        self._set_aside = []
        self.give_hooks_back()
        self._hooks = []
        self.group.discard()


def _reduced_gradient(parameter: GroupParameter) -> Tensor | None:
    """The gradient that earlier backward passes have left: of the sharded parameter, or of the part
    that this replica updates once it is reduced over the replicas."""
    gradient = parameter.sharded.grad
    return updated_as(parameter.sharded).grad if gradient is None else gradient

"""Sums the sharded gradients of a model over the replicate axis, by parameter, once per global
batch. `GradientSync` is the engine.

[Note: owning the replicate axis] `fully_shard` reduces over the shard axis alone. Each group's
sharded gradients are then averaged over the replicas here: a parameter that a replica did not use
counts as zero, and so does a whole group that its last micro-batch skipped. That is right for any
routing of data through the model, which torch's own second axis is not: its partial sums do not
record which parameters they hold.

The reductions start during the last backward pass (`bucket_reducer.py`) and are all awaited at its
end, so that ``loss.backward()`` returns with the mean over all data ranks in every ``.grad``.
Averaging is idempotent: after a second backward pass the sum is averaged again, and is the sum of
both means. Which parameters have a gradient is agreed on last; see [Note: unused parameters].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.errors import ConfigError
from parallel2d.mesh import has_cpu_backend, mesh_shape, sum_over_data_ranks
from parallel2d.sync.bucket_reducer import BucketReducer
from parallel2d.sync.engine import own_replicate_group, register_engine
from parallel2d.sync.group import IssueOrder, ParameterGroup, ScalarGradient
from parallel2d.sync.group_gradients import (
    cast_gradient,
    clear_gradients,
    make_uniform,
    refuse_second_derivatives,
)
from parallel2d.sync.group_state import GroupState
from parallel2d.sync.reduction import Hook
from parallel2d.sync.used_parameters import UsedParameterAgreement


class GradientSync:
    """The engine of one model; made by `parallel2d.parallelize`.

    ``groups``: in the order in which backward ends them. ``final_dtype``: of gradients once they
    are reduced, if not that in which they are added. ``scalars``: parameters that are whole on
    every rank. ``order``: None where nothing is gathered or reduced over the shard axis.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        groups: Sequence[ParameterGroup],
        *,
        final_dtype: torch.dtype | None,
        scalars: Sequence[ScalarGradient] = (),
        order: IssueOrder | None = None,
        bucket_mib: float = 4.0,
    ) -> None:
        self.mesh = mesh
        self._final_dtype = final_dtype
        self._scalars = list(scalars)
        self._order = order
        self._groups = groups
        self._states = [GroupState(group) for group in groups]
        self._agreement = UsedParameterAgreement(mesh, self._states, order)
        # None with a single replica.
        self._reducer: BucketReducer | None = None
        if mesh_shape(mesh).replicate > 1:
            group = own_replicate_group(mesh)
            bucket_bytes = int(bucket_mib * 2**20)
            self._reducer = BucketReducer(group, mesh.device_type, self._states, bucket_bytes)
        self._pending = False
        # Whether ranks have agreed on what the gradients hold.
        self._agreed = True
        # Whether the trainer sums `vector`.
        self._deferred = False
        for state in self._states:
            before = functools.partial(self._before_reduction, state)
            after = functools.partial(self._after_reduction, state)
            state.group.around_backward(before, after)
            state.group.on_forward(state.count_forward)
        register_engine(model, self)

    @property
    def pending(self) -> bool:
        """Whether gradients were added that are not reduced over the replicas."""
        return self._pending

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The process group on which gradients are reduced over the replicas; None with a single
        replica."""
        return self._reducer.group if self._reducer is not None else None

    def register_hook(self, state: Any, hook: Hook) -> None:
        """Lets ``hook`` reduce the buckets; see `parallel2d.register_sync_hook`."""
        assert self._reducer is not None, "no gradients are reduced over replicas"
        self._reducer.register_hook(state, hook)

    # Hooks that the sharding engine calls

    def _before_reduction(self, state: GroupState) -> None:
        """Autograd has the group's gradients of this pass, and they are about to be reduced over
        the shard axis."""
        group = state.group
        refuse_second_derivatives(group)
        any_gradient = any(parameter.has_whole_gradient for parameter in group.trained)
        if any_gradient:
            _refuse_second_gradient(state)
        state.start_reduction()
        self._pending = True
        self._agreed = False
        state.note_used()
        if not group.reduces_gradients:
            return
        if self._final_dtype is not None:
            # Gradients of earlier backward passes have the final dtype; they are added to.
            for parameter in group.trained:
                cast_gradient(parameter, parameter.gradient_dtype)
        # Sums that stay on this replica are no means any more.
        if not group.crosses_replicas:
            state.averaged = False
        elif self._reducer is not None:
            state.set_aside_means()
        # All ranks of a shard group run the same groups, so one that did not run here ran nowhere.
        group.fill_unused(any_gradient or state.forwards > 0)
        make_uniform(group.trained)
        # They are called after the agreement, when gradients are complete.
        state.take_hooks()

    def _after_reduction(self, state: GroupState) -> None:
        """The group's sharded gradients have been accumulated."""
        state.give_hooks_back()
        if self._reducer is not None and state.group.crosses_replicas:
            state.set_final()
            self._reducer.start_final()

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        crosses_replicas = any(state.group.crosses_replicas for state in self._states)
        for state in self._states:
            state.end_backward()
        if crosses_replicas:
            self.finish()

    # The end of a global batch

    def finish(self) -> None:
        """Reduces what is left, waits for all, and agrees on used parameters.

        Collective over the data ranks. Raises `ConfigError` on every rank when ranks of a shard
        group did not run the same groups, and when a gradient hook could not be called.
        """
        self._agreement.fault = self._hook_never_called()
        # Ranks that differ must stop here: the collectives below would never be answered.
        if self._order is not None:
            try:
                self._order.end_backward()
            except ConfigError as error:
                raise self.abandon(error) from None
        self._reduce_late()
        if self._reducer is not None:
            self._reducer.finish()
        self._join_streams()
        for state in self._states:
            self._complete(state)
        # Only now: until here the gradients may be views of the buckets' memory.
        if self._reducer is not None:
            self._reducer.forget_buckets()
        self._pending = False
        if not self._deferred:
            self._agree()

    def _hook_never_called(self) -> str:
        """The message for a hook of `register_hook`, which autograd would never call; empty when
        there is none."""
        for state in self._states:
            for parameter in state.group.trained:
                if parameter.sharded._backward_hooks:
                    return (
                        f"register_hook was called on a parameter of {state.group.called} of shape "
                        f"{tuple(parameter.sharded.shape)}: autograd computes gradients of "
                        "gathered parameters and would never call it; use "
                        "register_post_accumulate_grad_hook"
                    )
        return ""

    def _reduce_late(self) -> None:
        """Reduces over the shard axis what no backward pass has reduced. Nothing is left after a
        backward pass that was set up as the last one."""
        for state in self._states:
            is_left = any(parameter.has_whole_gradient for parameter in state.group.trained)
            if is_left:
                # This calls `_before_reduction` and `_after_reduction`, as a backward pass does.
                state.group.reduce_late()
                state.started = False

    def _join_streams(self) -> None:
        """Lets the current stream wait for the reduced gradients."""
        if self._reducer is not None:
            self._reducer.join_stream()
        elif self.mesh.device_type != "cpu":
            # With a single replica, gradients come from the streams of the sharding engine.
            current = torch.accelerator.current_stream()
            for state in self._states:
                state.group.wait_for_gradients(current)

    def _complete(self, state: GroupState) -> None:
        """The group's gradients are the means over all data ranks: casts them to the final
        dtype."""
        if self._final_dtype is not None:
            for parameter in state.group.trained:
                cast_gradient(parameter, self._final_dtype)
        state.final = False
        state.averaged = True

    # The agreement on used parameters

    def defer_agreement(self) -> bool:
        """Leaves the agreement to the caller: after each backward pass that ends a global batch,
        `vector` must be summed over all ranks and passed to `agree_on`.

        Returns whether the caller has to do this; not where scalars have to be summed first.
        """
        self._deferred = not self._scalars
        return self._deferred

    def vector(self) -> Tensor:
        """What to sum over all ranks and pass to `agree_on`: fp64, on CPU."""
        return self._agreement.vector()

    def agree_on(self, summed: Tensor) -> None:
        """Removes the gradients of parameters that no rank used. ``summed``: the sum of `vector`
        over all ranks. Raises `ConfigError` on all ranks when one cannot go on, and when ranks of a
        shard group differ."""
        error = self._agreement.error_in(summed)
        if error is not None:
            self.reset()
            raise error
        self._agreement.apply(summed)
        self._agreed = True

    def _agree(self) -> None:
        """Sums `vector` and the gradients of scalars over the data ranks in one all-reduce, and
        applies both."""
        vector = self.vector()
        parts = [vector]
        for scalar in self._scalars:
            parts.append(_gradient_and_use(scalar))
        device = "cpu" if has_cpu_backend() else self.mesh.device_type
        # One all-reduce for all: such small ones cost their latency.
        summed = sum_over_data_ranks(torch.cat(parts).to(device), self.mesh).cpu()
        count = len(vector)
        self.agree_on(summed[:count])
        ranks = mesh_shape(self.mesh).data_ranks
        for scalar, (total, used) in zip(self._scalars, summed[count:].view(-1, 2), strict=True):
            mean = total / ranks if used > 0 else None
            scalar.set_mean(mean)
            scalar.rest()

    # Failure

    def abandon(self, error: ConfigError) -> BaseException:
        """Takes part in what the other ranks still do in this global batch, with zeros, so that
        none of them waits forever; returns the error that all ranks then raise."""
        # The trainer's agreement tells the others.
        if self._deferred:
            return error
        if self._reducer is not None:
            self._reducer.finish_with_zeros()
        self._agreement.fault = str(error)
        try:
            self._agree()
        except ConfigError as agreed:
            return agreed
        return error

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""
        clear_gradients(self._groups, set_to_none)
        self.reset()

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind: sums that are not reduced over all
        data ranks."""
        # Reductions that were started write into gradients until they end.
        if self._reducer is not None:
            self._reducer.cancel()
        self._join_streams()
        # Before the agreement some gradients may be those of this rank alone.
        if not self._agreed:
            clear_gradients(self._groups, set_to_none=True)
        self._pending = False
        self._agreed = True
        for state in self._states:
            state.reset()
        for scalar in self._scalars:
            scalar.discard()
            scalar.rest()


def _refuse_second_gradient(state: GroupState) -> None:
    """Raises RuntimeError when the group's gradients of this backward pass were final."""
    if state.final:
        raise RuntimeError(
            f"{state.group.called} got gradients twice in one backward pass, and the first were on "
            "their way to other replicas: call the module, not parts of it, or use "
            "sync.engine=torch"
        )


def _gradient_and_use(scalar: ScalarGradient) -> Tensor:
    """fp64 [2], on CPU: the gradient of this rank, and 1 if it has one."""
    gradient = scalar.gradient
    entry = torch.zeros(2, dtype=torch.float64)
    if gradient is not None:
        entry[0] = gradient.double().cpu()
        entry[1] = 1.0
    return entry

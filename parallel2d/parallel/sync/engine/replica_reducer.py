"""Sums the sharded gradients of a model over the replicate axis, by parameter, once per global
batch. `ReplicaReducer` is the engine.

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

from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh import (
    has_cpu_backend,
    mesh_shape,
    sum_over_data_ranks,
    without_replicas,
)
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.sync.engine.bucket_queue import BucketQueue
from parallel2d.parallel.sync.engine.group_state import (
    GroupState,
    cast_gradient,
    clear_gradients,
    make_uniform,
    refuse_second_derivatives,
)
from parallel2d.parallel.sync.engine.reductions import Hook
from parallel2d.parallel.sync.engine.registry import engines_in, register_engine
from parallel2d.parallel.sync.engine.used_parameters import UsedParameterAgreement
from parallel2d.parallel.sync.group import IssueOrder, ParameterGroup, ScalarGradient
from parallel2d.parallel.sync.methods import method_for
from parallel2d.parallel.sync.wires.blocks import RoundingKeys
from parallel2d.parallel.weights.named_tensors import parameters_by_name, register_masters


class ReplicaReducer:
    """The engine of one model; made by `parallel2d.parallelize`.

    ``groups``: in the order in which backward ends them. ``final_dtype``: of gradients once they
    are reduced, if not that in which they are added. ``scalars``: parameters that are whole on
    every rank. ``order``: None where nothing is gathered or reduced over the shard axis.
    ``config``, ``splits_updates``: what crosses the replicate axis (`method_for`). ``seed``: of
    what is rounded at random on the way to other replicas.
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
        config: SyncConfig | None = None,
        splits_updates: bool = False,
        seed: int = 0,
    ) -> None:
        config = config or SyncConfig()
        self.config = config
        self.mesh = mesh
        self._final_dtype = final_dtype
        self._scalars = list(scalars)
        self._order = order
        self.groups = groups
        self._states = [GroupState(group) for group in groups]
        self._model = model
        # `finish` counts the steps; a trainer that resumes sets the number of the next one.
        self.keys = RoundingKeys(seed)
        self.method = method_for(
            mesh,
            groups,
            config,
            self.keys,
            splits_updates=splits_updates,
            gradient_dtype=final_dtype,
        )
        # The ranks whose gradients are averaged: with DiLoCo those of this replica.
        self.update_mesh = mesh if self.method.outer is None else without_replicas(mesh)
        self._agreement = UsedParameterAgreement(self.update_mesh, self._states, order)
        # None where no gradients cross the replicate axis.
        self._reducer: BucketQueue | None = None
        if self.method.make_reduction is not None:
            assert self.method.group is not None
            self._reducer = BucketQueue(
                self.method.group,
                mesh.device_type,
                self._states,
                int(config.bucket_mib * 2**20),
                self.method.make_reduction,
            )
        # The optimizer whose updates the method follows.
        self._optimizer: torch.optim.Optimizer | None = None
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
        """Lets ``hook`` reduce the buckets; see `parallel2d.register_sync_hook`. Raises
        `ConfigError` where replicas split the updates."""
        assert self._reducer is not None, "no gradients are reduced over replicas"
        if self.method.owners is not None:
            raise ConfigError(
                "strategy=hybrid_full takes no sync hook: gradients are reduced to the replica "
                "that updates them, and a hook reduces them on all; use strategy=hybrid"
            )
        self._reducer.register_hook(state, hook)

    # Updates

    def prepare(self) -> None:
        """Called once, when the parameters have their values."""
        if self.method.owners is not None:
            self.method.owners.make()
            register_masters(self._model, self.method.owners)
        if self.method.outer is not None:
            self.method.outer.make(parameters_by_name(self._model))
            register_masters(self._model, self.method.outer)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets the method follow the updates of ``optimizer``; see
        `parallel2d.attach_optimizer`."""
        if not self.method.follows_updates or optimizer is self._optimizer:
            return
        for parameter in parameters_by_name(self._model).values():
            _check_updated(parameter, optimizer)
        self._optimizer = optimizer
        optimizer.register_step_post_hook(self._after_step)
        if self.method.owners is not None:
            self._clear_with(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        # Only the optimizer that was attached last counts.
        if optimizer is self._optimizer:
            self.method.after_update()

    def _clear_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes ``optimizer.zero_grad()`` drop sums that are not reduced over the replicas too:
        they are in the sharded parameters, which the optimizer does not have."""
        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def clear(set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            clear_gradients(self.groups, set_to_none)

        optimizer.zero_grad = clear  # type: ignore[method-assign]

    def _check_attached(self) -> None:
        if self.method.follows_updates and self._optimizer is None:
            raise ConfigError(
                "no optimizer follows this model: with strategy=hybrid_full and with sync=diloco "
                "the replicas must be told of updates; build the optimizer with "
                "parallel2d.build_optimizer, or pass it to parallel2d.attach_optimizer(model, "
                "optimizer)"
            )

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
        self._check_attached()
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
        self.keys.step += 1
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

    @property
    def may_defer_agreement(self) -> bool:
        """Whether the agreement can wait: not where scalars have to be summed first, and not where
        each replica agrees on its own."""
        return not self._scalars and self.method.outer is None

    def defer_agreement(self) -> None:
        """Leaves the agreement to the caller, where `may_defer_agreement`: after each backward pass
        that ends a global batch, `vector` must be summed over all ranks and passed to
        `agree_on`."""
        self._deferred = True

    def never_agree(self) -> None:
        """Leaves the agreement out: tensors without storage have no values to agree on."""
        self._deferred = True

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
        parts = [vector, *map(_gradient_and_use, self._scalars)]
        device = "cpu" if has_cpu_backend() else self.mesh.device_type
        # One all-reduce for all: such small ones cost their latency.
        summed = sum_over_data_ranks(torch.cat(parts).to(device), self.update_mesh).cpu()
        count = len(vector)
        self.agree_on(summed[:count])
        ranks = mesh_shape(self.update_mesh).data_ranks
        for scalar, (total, used) in zip(self._scalars, summed[count:].view(-1, 2), strict=True):
            scalar.set_mean(total / ranks if used > 0 else None)
            scalar.rest()

    # Failure

    def abandon(self, error: ConfigError) -> BaseException:
        """Takes part in what the other ranks still do in this global batch, with zeros, so that
        none of them waits forever; returns the error that all ranks then raise."""
        # The trainer's agreement tells the others.
        if self._deferred:
            return error
        if self._reducer is not None:
            self._reducer.finish(with_zeros=True)
        self._agreement.fault = str(error)
        try:
            self._agree()
        except ConfigError as agreed:
            return agreed
        return error

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""
        self._clear(set_to_none)
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
            self._clear(set_to_none=True)
        self._pending = False
        self._agreed = True
        for state in self._states:
            state.reset()
        for scalar in self._scalars:
            scalar.discard()
            scalar.rest()

    def _clear(self, set_to_none: bool) -> None:
        clear_gradients(self.groups, set_to_none)
        if self.method.owners is not None:
            self.method.owners.clear_gradients(set_to_none)


def reducers_in(model: nn.Module) -> list[ReplicaReducer]:
    """The engines of this kind of ``model`` and of modules below it."""
    return [engine for engine in engines_in(model) if isinstance(engine, ReplicaReducer)]


def _check_updated(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Raises `ConfigError` when ``optimizer`` has ``parameter`` although replicas own parts of
    it."""
    if updated_as(parameter) is parameter:
        return
    for group in optimizer.param_groups:
        if any(each is parameter for each in group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__} was built on model.parameters(): with "
                "strategy=hybrid_full each replica updates its own part of them; build it with "
                "parallel2d.build_optimizer, or on parallel2d.updated_parameters(model)"
            )


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

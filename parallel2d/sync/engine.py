"""Sums the sharded gradients of a model over the replicate axis, by parameter, once per global
batch.

[Note: owning the replicate axis] `fully_shard` reduces over the shard axis alone. Each group's
sharded gradients are then averaged over the replicas here: a parameter that a replica did not use
counts as zero, and so does a whole group that its last micro-batch skipped. That is right for any
routing of data through the model, which torch's own second axis is not: its partial sums forget
which parameters they hold.

The reduction of a bucket starts as soon as its groups are final in the last backward pass, and in
one order on every replica, whatever order the groups end in: those that autograd ends first come
first. All are awaited at the end of that pass, so that ``loss.backward()`` returns with the mean
over all data ranks in every ``.grad``. Averaging is idempotent: after a second backward pass the
sum is averaged again, and is the sum of both means.

[Note: unused parameters] Zeros stand in for missing gradients, also inside the shard axis, so that
all ranks reduce the same. An optimizer would take zeros for gradients, decay weights and move by
its momentum. So ranks agree on which parameters any of them has used, and the others have no
gradient afterwards, as in one process. In a loop of one's own that is one small all-reduce at the
end of the last backward pass; the trainer lets it ride on its agreement.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.errors import ConfigError
from parallel2d.exchange import all_gather
from parallel2d.mesh import has_cpu_backend, inherit_timeout, mesh_shape, sum_over_data_ranks
from parallel2d.sync.bucket import Bucket, keep_until_done
from parallel2d.sync.group import GroupParameter, ParameterGroup, clear_gradients
from parallel2d.sync.reduction import Hook, HookReduction, Reduction, Wait, reduction_for


class Engine(Protocol):
    """What the rest of the package asks of what reduces gradients."""

    @property
    def pending(self) -> bool:
        """Whether gradients were added that are not reduced over the replicas."""

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """That on which gradients cross the replicate axis; None where this package does not reduce
        them."""

    def finish(self) -> None:
        """Reduces what is left of a global batch. Collective."""

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind."""


# an attribute of the model, which the engine holds too: both go together
_ENGINE = "_parallel2d_engine"


def register_engine(model: nn.Module, engine: Engine) -> None:
    """Makes ``engine`` that of ``model``."""
    vars(model)[_ENGINE] = engine


class ScalarGradient(Protocol):
    """A parameter without dimensions; see `parallel2d.parallelize.scalars`."""

    @property
    def gradient(self) -> Tensor | None:
        """What this rank has added up."""

    def set_mean(self, mean: Tensor | None) -> None:
        """Adds the mean over the data ranks to the parameter's gradient; None: there is none."""

    def discard(self) -> None:
        """Drops what this rank has added up."""

    def rest(self) -> None:
        """Puts the parameter that the optimizer has in its place."""


class IssueOrder(Protocol):
    """The order of the collectives of this rank's shard group; see
    `parallel2d.parallelize.collective_order`."""

    def end_backward(self) -> None:
        """Says that this rank's backward pass has ended. Raises OutOfOrder."""

    def acknowledge(self) -> None:
        """Goes on after another rank raised OutOfOrder."""

    def digest(self) -> int:
        """Of what was issued since the last call; 0 where it was compared already."""

    def differing_on_other_hosts(self) -> str:
        """The message when digests differ. Collective over the shard group."""


@dataclass
class _GroupState:
    """Where a group stands in the current backward pass."""

    group: ParameterGroup
    forwards: int = 0  # that autograd recorded and no backward pass has ended since
    repeats: bool = False  # it has run more than once before a backward pass, and may again
    final: bool = False  # its gradients will not change any more in this backward pass
    fired: bool = False  # its reduction over the shard axis has begun in this backward pass
    averaged: bool = False  # what its gradients hold is the mean over all data ranks already
    earlier: list[tuple[GroupParameter, Tensor]] = field(default_factory=list)  # see `_set_aside`
    hooks: list[tuple[GroupParameter, list[Callable[[Tensor], object]]]] = field(
        default_factory=list
    )


class GradientSync:
    """The engine of one model; made by `parallel2d.parallelize`.

    ``groups``: in the order in which backward ends them. ``final_dtype``: of gradients once they
    are reduced, if not that in which they are added. ``scalars``: parameters that are whole on
    every rank.
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
        self.mesh, self._final_dtype = mesh, final_dtype
        self._scalars, self._order = list(scalars), order
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._owns_replicas = mesh_shape(mesh).replicate > 1
        self._states = [_GroupState(group) for group in groups]
        # By group and parameter, frozen ones included: whether this rank holds a gradient of it
        self._used = [[False] * len(group.parameters) for group in groups]
        self._buckets: list[Bucket] = []
        self._reductions: dict[tuple[torch.dtype, torch.dtype], Reduction] = {}
        self._hook: tuple[Any, Hook] | None = None
        self._group: dist.ProcessGroup | None = None
        self._stream: torch.Stream | None = None
        self._next = 0
        self._in_flight: list[tuple[Bucket, Wait]] = []
        self._pending = False  # gradients were added that are not reduced over the replicas
        self._agreed = True  # on what gradients hold
        self._deferred = False  # the trainer agrees on used parameters
        self._fault = ""  # why this rank cannot go on: all ranks are told when they agree
        if self._owns_replicas:
            self._group = _own_group(mesh)
            if mesh.device_type != "cpu":
                self._stream = torch.Stream(mesh.device_type)
        for state, used in zip(self._states, self._used, strict=True):
            before, after = (
                functools.partial(self._before, state, used),
                functools.partial(self._after, state),
            )
            state.group.around_backward(before, after)
            state.group.on_forward(functools.partial(self._count_forward, state))
        register_engine(model, self)

    # What hooks of the sharding engine call

    def _count_forward(self, state: _GroupState) -> None:
        state.forwards = min(state.forwards + 1, 2)
        state.repeats = state.repeats or state.forwards > 1

    def _before(self, state: _GroupState, used: list[bool]) -> None:
        """Autograd has the group's gradients of this pass; they are about to be reduced."""
        group = state.group
        any_gradient = any(parameter.has_whole_gradient for parameter in group.trained)
        _refuse_second_derivatives(group)
        if state.final and any_gradient:
            raise RuntimeError(
                f"{group.called} got gradients twice in one backward pass, and the first "
                "were on their way to other replicas: call the module, not parts of it, or use "
                "sync.engine=torch"
            )
        state.repeats = state.repeats or state.fired
        state.fired = self._pending = True
        self._agreed = False
        _note_use(group, used)
        if not group.reduces_gradients:
            return
        if self._final_dtype is not None:
            _widen(group.trained)
        if not group.crosses_replicas:
            state.averaged = False
        elif self._owns_replicas:
            self._set_aside(state)
        # All ranks of a shard group run the same groups, so one that did not run here ran nowhere.
        group.fill_unused(any_gradient or state.forwards > 0)
        _make_uniform(group.trained)
        state.hooks = [
            (parameter, hooks) for parameter in group.trained if (hooks := parameter.take_hooks())
        ]

    def _set_aside(self, state: _GroupState) -> None:
        """Takes gradients out that are averaged already, where sending them once more would round
        them once more; `_await_oldest` adds them again."""
        averaged, state.averaged = state.averaged, False
        if not averaged or state.group.wire.itemsize >= 4:
            return
        for parameter in state.group.trained:
            local = parameter.local_gradient
            if local is not None:
                state.earlier.append((parameter, local))
                parameter.set_gradient(None)

    def _after(self, state: _GroupState) -> None:
        """The group's sharded gradients have been accumulated."""
        for parameter, _ in state.hooks:
            parameter.give_hooks_back()
        if not self._owns_replicas or not state.group.crosses_replicas:
            return
        # One that ran twice fires twice: it waits for the end.
        state.final = state.forwards == 1 and not state.repeats
        self._launch(everything=False)

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        crosses = any(state.group.crosses_replicas for state in self._states)
        for state in self._states:
            state.forwards = max(state.forwards - state.fired, 0)
            state.fired = False
        if crosses:
            self.finish()

    # Reduction

    def finish(self) -> None:
        """Reduces what is left, waits for all, and agrees on used parameters.

        Collective over the data ranks. Raises `ConfigError` on every rank when ranks of a shard
        group did not run the same groups, and when a gradient hook could not be called.
        """
        self._fault = self._hook_never_called()
        if self._order is not None:
            try:
                self._order.end_backward()
            except ConfigError as error:
                raise self.abandon(error) from None
        for state in self._states:  # none of them where a backward pass was the last
            if any(parameter.has_whole_gradient for parameter in state.group.trained):
                state.group.reduce_late()
                state.fired = False
        self._launch(everything=True)
        while self._in_flight:
            self._await_oldest()
        self._join_stream()
        for state in self._states:
            self._complete(state)
        self._next, self._buckets = 0, []  # filled anew: parameters may be frozen in between
        self._pending = False
        if not self._deferred:
            self._agree()

    def _launch(self, everything: bool) -> None:
        """Starts buckets in their order, up to the first that is not final yet."""
        if not self._owns_replicas:
            return
        if not self._buckets:
            self._buckets = self._fill_buckets()
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not everything and not all(self._state_of(group).final for group in bucket.groups):
                return
            self._start(bucket, bucket.gather)
            self._next += 1

    def _start(self, bucket: Bucket, fill: Callable[[], None]) -> None:
        reduction = self._reduction_of(bucket)
        while (
            reduction.most_in_flight is not None
            and len(self._in_flight) >= reduction.most_in_flight
        ):
            self._await_oldest()
        with self._on_stream():
            for group in bucket.groups:
                if self._stream is not None:
                    group.wait_for_gradients(self._stream)
                self._set_aside(self._state_of(group))
            fill()
            with torch.profiler.record_function(f"replicate: bucket {bucket.index()}"):
                self._in_flight.append((bucket, reduction.start(bucket)))

    def _await_oldest(self) -> None:
        bucket, wait = self._in_flight.pop(0)
        with self._on_stream(), torch.profiler.record_function(f"replicate: wait {bucket.index()}"):
            wait()
            for state in map(self._state_of, bucket.groups):
                for parameter, earlier in state.earlier:
                    local = parameter.local_gradient
                    if local is not None:  # not where the global batch was abandoned
                        local.add_(earlier)
                        keep_until_done(earlier)
                state.earlier = []

    def _complete(self, state: _GroupState) -> None:
        """The group's gradients are those of all data ranks: casts them to the dtype they are kept
        in."""
        if self._final_dtype is not None:
            for parameter in state.group.trained:
                local = parameter.local_gradient
                if local is not None and local.dtype != self._final_dtype:
                    parameter.set_gradient(local.to(self._final_dtype))
        state.final, state.averaged = False, True

    def _reduction_of(self, bucket: Bucket) -> Reduction:
        dtypes = bucket.wire, bucket.trained[0].gradient_dtype
        if dtypes not in self._reductions:
            assert self._group is not None
            if self._hook is not None:
                state, hook = self._hook
                self._reductions[dtypes] = HookReduction(
                    self._group if state is None else state, hook
                )
            else:
                self._reductions[dtypes] = reduction_for(self._group, *dtypes)
        return self._reductions[dtypes]

    def _fill_buckets(self) -> list[Bucket]:
        """Neighbouring groups of equal dtypes together, until a bucket is large enough."""
        filled: list[list[ParameterGroup]] = []
        held, dtypes = 0, None
        for state in self._states:
            trained = state.group.trained
            if not trained:
                continue
            size = sum(p.local_size.numel() * p.gradient_dtype.itemsize for p in trained)
            own = state.group.wire, trained[0].gradient_dtype
            if not filled or own != dtypes or held + size > self._bucket_bytes:
                filled.append([])
                held, dtypes = 0, own
            filled[-1].append(state.group)
            held += size
        return [Bucket(n, groups, last=n == len(filled) - 1) for n, groups in enumerate(filled)]

    def _state_of(self, group: ParameterGroup) -> _GroupState:
        return next(state for state in self._states if state.group is group)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            yield

    def _join_stream(self) -> None:
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
        elif self.mesh.device_type != "cpu":
            for state in self._states:
                state.group.wait_for_gradients(torch.accelerator.current_stream())

    def register_hook(self, state: Any, hook: Hook) -> None:
        """Lets ``hook`` reduce the buckets; see `parallel2d.register_sync_hook`."""
        self._hook = state, hook
        self._reductions.clear()

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The process group of the replicate axis on which gradients travel; None without replicas,
        and when torch's engine reduces over them."""
        return self._group

    # Agreement; see [Note: unused parameters]

    def defer_agreement(self) -> bool:
        """Leaves agreeing to the caller: after each backward pass that ends a global batch,
        `vector` must be summed over all ranks and given to `agree_on`. Returns whether it is left;
        not where scalars have to travel first."""
        self._deferred = not self._scalars
        return self._deferred

    def vector(self) -> Tensor:
        """fp64, on CPU: whether this rank cannot go on, per parameter whether it used it, then what
        must be equal on the ranks of a shard group."""
        return torch.cat(
            [torch.tensor([float(bool(self._fault))]).double(), self._flags(), self._digests()]
        )

    def agree_on(self, summed: Tensor) -> None:
        """Takes away the gradients of parameters that no rank used. Raises `ConfigError` when a
        rank cannot go on, and when ranks of a shard group differ."""
        if summed[0] > 0:
            raise self._told_by_all(self._fault)
        count = 1 + sum(map(len, self._used))
        self._check_digests(summed[count:])
        anywhere = iter((summed[1:count] > 0).tolist())
        for state, used in zip(self._states, self._used, strict=True):
            for number, parameter in enumerate(state.group.parameters):
                used[number] = next(anywhere)
                if not used[number]:
                    parameter.sharded.grad = None
            for parameter, hooks in state.hooks:
                for hook in hooks if parameter.sharded.grad is not None else ():
                    hook(parameter.sharded)
            state.hooks = []
        self._agreed = True

    def _hook_never_called(self) -> str:
        """The message for a hook that sits where autograd never comes by; empty when there is
        none."""
        for state in self._states:
            for parameter in state.group.trained:
                if parameter.sharded._backward_hooks:
                    return (
                        f"register_hook was called on a parameter of {state.group.called} of "
                        f"shape {tuple(parameter.sharded.shape)}: autograd computes gradients of "
                        "gathered "
                        "parameters and would never call it; use register_post_accumulate_grad_hook"
                    )
        return ""

    def _flags(self) -> Tensor:
        return torch.tensor([flag for used in self._used for flag in used], dtype=torch.float64)

    def _digests(self) -> Tensor:
        """One, a hash and its square, in the place of this replica. The hashes of a shard group are
        equal if the sum of squares is that of equal numbers."""
        digests = torch.zeros(mesh_shape(self.mesh).replicate, 3, dtype=torch.float64)
        if self._order is not None:
            value = self._order.digest() % 2**20
            replica = self.mesh.get_local_rank("replicate")
            digests[replica] = torch.tensor([1, value, value**2], dtype=torch.float64)
        return digests.flatten()

    def _check_digests(self, summed: Tensor) -> None:
        ranks, total, squares = summed.view(-1, 3).unbind(1)
        different = squares * ranks != total**2
        if not different.any():
            return
        text = ""
        if self._order is not None and different[self.mesh.get_local_rank("replicate")]:
            text = self._order.differing_on_other_hosts()
        raise self._told_by_all(text)

    def _agree(self) -> None:
        """Sums `vector` and the gradients of scalars over the data ranks, and does what they
        say."""
        parts = [self.vector()]
        for scalar in self._scalars:
            gradient = scalar.gradient
            value = torch.zeros(2, dtype=torch.float64)
            if gradient is not None:
                value[0], value[1] = gradient.double().cpu(), 1.0
            parts.append(value)
        on = "cpu" if has_cpu_backend() else self.mesh.device_type
        summed = sum_over_data_ranks(torch.cat(parts).to(on), self.mesh).cpu()
        count = len(parts[0])
        self.agree_on(summed[:count])
        ranks = mesh_shape(self.mesh).data_ranks
        for scalar, (total, used) in zip(self._scalars, summed[count:].view(-1, 2), strict=True):
            scalar.set_mean(total / ranks if used > 0 else None)
            scalar.rest()

    # Failure

    def abandon(self, error: ConfigError) -> BaseException:
        """Does this rank's part of what is left of the global batch, with zeros, so that no other
        rank waits in vain; returns the error that all ranks then raise."""
        if self._deferred:
            return error
        if self._owns_replicas:
            self._buckets = self._buckets or self._fill_buckets()
            for bucket in self._buckets[self._next :]:
                self._start(bucket, bucket.zeros)
            while self._in_flight:
                self._await_oldest()
        self._fault = str(error)
        try:
            self._agree()
        except ConfigError as told:
            return told
        return error

    def _told_by_all(self, message: str) -> ConfigError:
        """The message of a rank that has one. Collective over the data ranks."""
        for axis in ("shard", "replicate"):
            group = self.mesh.get_group(axis)
            message = next((text for text in all_gather(message, group) if text), "")
        if self._order is not None:
            self._order.acknowledge()
        self.reset()
        return ConfigError(message)

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""
        clear_gradients([state.group for state in self._states], set_to_none)
        self.reset()

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind: sums that are not reduced over all
        data ranks."""
        while self._in_flight:
            self._await_oldest()
        self._join_stream()
        if not self._agreed:
            for state in self._states:
                for parameter in state.group.trained:
                    parameter.sharded.grad = None
        self._next, self._pending, self._agreed, self._buckets = 0, False, True, []
        for state in self._states:
            state.final, state.fired, state.earlier = False, False, []
            for parameter, _ in state.hooks:
                parameter.give_hooks_back()
            state.hooks = []
            state.group.discard()
        for scalar in self._scalars:
            scalar.discard()
            scalar.rest()

    @property
    def pending(self) -> bool:
        """Whether gradients were added that are not reduced over the replicas."""
        return self._pending


def engines_in(model: nn.Module) -> list[Engine]:
    """Those of ``model`` and of modules below it."""
    return [vars(module)[_ENGINE] for module in model.modules() if _ENGINE in vars(module)]


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model from `parallel2d.parallelize`. Raises `ConfigError` for another."""
    found: Engine | None = vars(model).get(_ENGINE)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} did not come from parallel2d.parallelize; give the model "
            "that it returned, not a module of it"
        )
    return found


def register_sync_hook(model: nn.Module, hook: Hook, state: Any = None) -> None:
    """Lets ``hook`` reduce the gradients of ``model`` over the replicate axis, in its own way.

    Args:
        hook: ``hook(state, bucket)`` gets the gradients of this replica, averaged over its shard
            group, as ``bucket.buffer()``, a flat tensor in the dtype of gradients; `Bucket` has the
            methods of torch's ``GradBucket``. It returns a future of their mean over the replicas,
            or the mean itself, or None if it has changed the buffer in place. It runs on every
            replica for the same buckets in the same order, one after the other.
        state: handed to the hook; default: the process group of the replicate axis.

    The hooks of `torch.distributed.algorithms.ddp_comm_hooks` work, among them
    ``default_hooks.bf16_compress_hook`` and ``powerSGD_hook``, whose state takes the group that
    ``replicate_group(model)`` returns. Raises `ConfigError` where no replicate axis is reduced by
    this package: one replica, or ``sync.engine=torch``.
    """
    _with_replicas(model).register_hook(state, hook)


def replicate_group(model: nn.Module) -> dist.ProcessGroup:
    """The process group on which the gradients of ``model`` cross the replicate axis. Raises
    `ConfigError` as `register_sync_hook` does."""
    group = _with_replicas(model).replicate_group
    assert group is not None
    return group


def _with_replicas(model: nn.Module) -> GradientSync:
    engine = engine_of(model)
    if not isinstance(engine, GradientSync) or engine.replicate_group is None:
        raise ConfigError(
            "no gradients cross a replicate axis here: the mesh has one replica, or "
            "sync.engine=torch reduces over it"
        )
    return engine


def _refuse_second_derivatives(group: ParameterGroup) -> None:
    """Raises RuntimeError in a backward pass that is recorded itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backward(create_graph=True) reached {group.called}: second derivatives "
            "are not possible here, because its parameters are released after the first; the "
            "difference of two forward passes, (model(x + e) - model(x)) / |e|, gives such "
            "penalties"
        )


def _note_use(group: ParameterGroup, used: list[bool]) -> None:
    """Brings ``used``, by parameter, up to date with this pass."""
    for number, parameter in enumerate(group.parameters):
        if parameter.has_whole_gradient:
            used[number] = True
        elif parameter.sharded.grad is None:
            used[number] = False


def _make_uniform(parameters: Sequence[GroupParameter]) -> None:
    """Gives a group's gradients one dtype: sums of micro-batches are wide, and a module may cast
    its own weights."""
    dtypes = {parameter.whole_gradient_dtype for parameter in parameters} - {None}
    if len(dtypes) > 1 or any(parameter.is_accumulated for parameter in parameters):
        for parameter in parameters:
            parameter.accumulate()
    else:
        _sum_parts(parameters)


def _widen(parameters: Sequence[GroupParameter]) -> None:
    """Casts gradients of earlier backward passes back to the dtype in which they are added."""
    for parameter in parameters:
        local = parameter.local_gradient
        if local is not None and local.dtype != parameter.gradient_dtype:
            parameter.set_gradient(local.to(parameter.gradient_dtype))


@torch.no_grad()
def _sum_parts(parameters: Sequence[GroupParameter]) -> None:
    """Adds the parts of gradients over the tensor axis in fp32 and keeps the sums there, all of the
    group's gradients with them.

    The sharding engine would add them in the dtype that computes (pytorch issue 190626).
    """
    parts = [(parameter, parameter.part) for parameter in parameters]
    narrow = [
        (parameter, part)
        for parameter, part in parts
        if part is not None and part.dtype.itemsize < 4
    ]
    if not narrow:
        return
    flat = torch.cat([part.flatten().float() for _, part in narrow])
    dist.all_reduce(flat, group=narrow[0][0].tensor_group)
    begin = 0
    for parameter, part in narrow:
        parameter.set_sum_of_parts(flat[begin : begin + part.numel()].view(part.shape))
        begin += part.numel()
    for parameter in parameters:
        parameter.accumulate()


def _own_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A process group over the replicas for this engine alone: what else travels over the axis
    during a backward pass must not come between its collectives, which run asynchronously.

    That of the mesh where the mesh is not the whole world, since all ranks have to make groups.
    """
    if mesh.size() != dist.get_world_size():
        return mesh.get_group("replicate")
    names = mesh.mesh_dim_names or ()
    ranks = mesh.mesh.movedim(names.index("replicate"), -1).reshape(-1, mesh_shape(mesh).replicate)
    own = None
    for replicas in ranks.tolist():
        group = dist.new_group(replicas, group_desc=GROUP_NAME)
        if dist.get_rank() in replicas:
            own = group
    assert own is not None
    inherit_timeout(own, mesh.device_type)
    return own


GROUP_NAME = "gradients over replicas"

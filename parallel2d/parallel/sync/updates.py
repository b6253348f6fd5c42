"""Functions for custom training loops: synchronization of the replicas.

The functions attach an optimizer, which ``strategy=hybrid_full`` and ``sync=diloco`` need, compare
replicas, and register a custom communication hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import among
from parallel2d.base.metering import control_traffic
from parallel2d.base.replicas import ranks_with_state
from parallel2d.parallel.mesh import has_cpu_backend, part_group, sharding_mesh
from parallel2d.parallel.model_structure import stays_replicated, updated_as
from parallel2d.parallel.sync.comparison import ReplicaComparison
from parallel2d.parallel.sync.ema import ema_of
from parallel2d.parallel.sync.engine.buckets import Bucket, BucketQueue, Wait
from parallel2d.parallel.sync.engine.replica_reducer import engine_of, engines_in
from parallel2d.parallel.sync.methods.diloco import OuterSync
from parallel2d.parallel.sync.methods.method import UpdateFollower
from parallel2d.parallel.weights.named_tensors import parameters_by_name, reshard

Hook = Callable[[Any, Any], Any]


def updated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters from which to build an optimizer.

    With ``strategy=hybrid_full`` these are the rows of parameters that this replica updates,
    otherwise the parameters of ``model``.
    """
    return list(map(updated_as, model.parameters()))


def attach_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run the model's synchronization after each step of ``optimizer``.

    Steps are collective if replicas must exchange updates. `parallel2d.build_optimizer` calls this
    function. If there are several optimizers, attach the optimizer that steps last. Raises
    `ConfigError` for a model that did not come from `parallel2d.parallelize`, and, with
    ``strategy=hybrid_full``, for an optimizer of ``model.parameters()``.
    """
    engine_of(model).updates.attach(optimizer)


def outer_sync(model: nn.Module) -> OuterSync | None:
    """Return the state of ``sync=diloco`` for ``model``; None with ``sync=every_step``."""
    for engine in engines_in(model):
        if isinstance(engine.updates, OuterSync):
            return engine.updates
    return None


def error_feedback_of(model: nn.Module) -> UpdateFollower:
    """Return the `UpdateFollower` with the error feedback of ``model``, or one without any."""
    for engine in engines_in(model):
        if engine.updates.residual_name:
            return engine.updates
    return UpdateFollower()


def set_step(model: nn.Module, step: int, loss_scale: float = 1.0) -> None:
    """Set the number of the next global batch and the loss scale of ``model``.

    Without this call ``model`` counts the global batches from the start of this process.

    Args:
        model: the parallelized model.
        step: number of the next global batch, from 1; seeds stochastic rounding.
        loss_scale: factor of the loss before backward.
    """
    for engine in engines_in(model):
        engine.keys.step = step
        engine.used_parameters.reductions = step - 1
        engine.updates.loss_scale = loss_scale


@contextmanager
def outer_parameters(model: nn.Module) -> Iterator[None]:
    """Use the outer parameters or the EMA weights in ``model`` inside of this context.

    For validation and export. With ``sync=diloco`` the parameters of ``model`` are replaced by the
    outer parameters. With ``train.ema`` they are replaced by the EMA weights. Otherwise nothing
    changes.
    """
    outer, average = outer_sync(model), ema_of(model)
    if outer is None and average is None:
        yield
        return
    # Reshard, because the modules may hold unsharded parameters after a forward.
    reshard(model)
    shared = nullcontext() if outer is None else outer.outer_parameters()
    with shared, nullcontext() if average is None else average.shown():
        try:
            yield
        finally:
            reshard(model)


def replicated_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that must be equal on all replicas, by group and name.

    The tensors are the parameters, or with ``sync=diloco`` the outer parameters.
    """
    shared: dict[str, Tensor] = {}
    found: dict[str, dict[str, Tensor]] = {}
    for engine in engines_in(model):
        shared |= engine.updates.shared_values()
        for group in engine.groups:
            # Frozen parameters have no outer parameters.
            values = {}
            for each in group.parameters:
                values[each.name] = shared.get(each.name, each.sharded)
            found[group.called] = values
    # Parameters without dims belong to no FSDP group.
    alone: dict[str, Tensor] = {}
    for name, parameter in parameters_by_name(model).items():
        if stays_replicated(parameter):
            alone[name] = shared.get(name, parameter)
    if alone and found:
        found["parameters without dimensions"] = alone
    return found


@control_traffic()
def compare_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise `ConfigError` if the replicas' parameters differ in a single bit.

    The message names the parameter and the ranks. With ``sync=diloco`` the outer parameters are
    compared. Collective over the mesh; see ``sync.compare_every``.
    """
    comparison = ReplicaComparison(sharding_mesh(mesh), replicated_tensors(model))
    vector = comparison.vector()
    if not has_cpu_backend():
        vector = vector.to(mesh.device_type)
    part = part_group(mesh)
    dist.all_reduce(vector, group=part)
    with among(part):
        complete = ranks_with_state() if part is None else None
        comparison.check(vector.cpu(), mesh.size() if complete is None else len(complete))


def finish_updates(model: nn.Module) -> None:
    """Call this at the end of training. With ``sync=diloco`` it runs the last outer step.

    Collective.
    """
    outer = outer_sync(model)
    if outer is not None:
        reshard(model)
        outer.finish()


def register_sync_hook(model: nn.Module, hook: Hook, state: Any = None) -> None:
    """Reduce the gradients of ``model`` over the replicate axis by ``hook``.

    The hooks of `torch.distributed.algorithms.ddp_comm_hooks` work, for example
    ``default_hooks.bf16_compress_hook`` and ``powerSGD_hook`` with the group
    ``replicate_group(model)`` in its state.

    Args:
        model: the parallelized model.
        hook: called as ``hook(state, bucket)``. ``bucket.buffer()`` is a flat tensor in the
            accumulation dtype, with the gradients of this replica, averaged over its shard group.
            `Bucket` has the methods of torch's ``GradBucket``. The hook returns a future of the
            mean over the replicas, or the mean, or None if it has changed the buffer in place. All
            replicas call the hook for the same buckets in the same order, one bucket at a time.
        state: passed to the hook; default: the process group of the replicate axis.

    Raises:
        ConfigError: the mesh has one replica, or the strategy is ``hybrid_full``.
    """
    buckets = _buckets_of(model)
    if engine_of(model).method.splits_updates:
        raise ConfigError(
            "strategy=hybrid_full takes no sync hook: gradients are reduced to the replica that "
            "updates them, and a hook reduces them on all; use strategy=hybrid"
        )
    reduction = HookReduction(buckets.group if state is None else state, hook)
    buckets.reduction_for = lambda _: reduction


def replicate_group(model: nn.Module) -> dist.ProcessGroup:
    """Return the process group over the replicas. Raise `ConfigError` for a single replica."""
    return _buckets_of(model).group


def _buckets_of(model: nn.Module) -> BucketQueue:
    buckets = engine_of(model).buckets
    if buckets is None:
        raise ConfigError("no gradients cross a replicate axis here: the mesh has one replica")
    return buckets


@dataclass
class HookReduction:
    """Reduction by a user's hook; see `parallel2d.register_sync_hook`."""

    state: Any
    hook: Hook
    # One reduction at a time: all replicas must start collectives in the same order, and a hook may
    # start several. With two hooks in flight, the order of their collectives could differ between
    # replicas.
    most_in_flight: int | None = 1

    def start(self, bucket: Bucket) -> list[Wait]:
        flat = bucket.buffer()
        answer = self.hook(self.state, bucket)

        def wait() -> None:
            result = answer.wait() if isinstance(answer, torch._C.Future) else answer
            # The result of some futures is a list of one tensor.
            if isinstance(result, list | tuple):
                (result,) = result
            if result is None:
                return
            if not isinstance(result, Tensor):
                raise TypeError(
                    f"a sync hook returns a future of a tensor, a tensor or None, not {result!r}"
                )
            # An in-place hook may return the buffer.
            if result.data_ptr() != flat.data_ptr():
                flat.copy_(result.view(-1))

        return [wait]

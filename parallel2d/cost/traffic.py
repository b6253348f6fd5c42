"""Bytes that each mesh axis must move per step, known before the first one.

`predict_communication` computes those of the shard and replicate axes from a sharded model;
`count_tensor_axis` counts those of the tensor axis in a step without storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d import fsdp_internals
from parallel2d.cost.collectives import sent_bytes
from parallel2d.cost.replica_sync import gradient_bytes, outer_bytes, split_bytes
from parallel2d.cost.tensor_twin import on_fake_tensors
from parallel2d.mesh import MeshShape, mesh_shape
from parallel2d.sync import GradientSync
from parallel2d.sync.gradient_sync import gradient_syncs

log = logging.getLogger(__name__)


class CollectiveCounter(Protocol):
    """Counts collectives by mesh axis instead of running them
    (`parallel2d.metrics.communication.CommunicationMeter` with ``dry=True``)."""

    def install(self) -> object: ...

    def remove(self) -> None: ...

    def start(self) -> None: ...

    def sent_over(self, axis: str) -> float: ...


def predict_communication(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    accumulation: int,
    during_accumulation: str = "reduce_scatter_only",
) -> dict[str, float]:
    """Bytes that a rank sends per step over the ``replicate`` and ``shard`` axes, as
    ``{"comm/AXIS/bytes": bytes}``.

    ``model``: after `parallelize`. Per group of parameters (Rajbhandari et al. 2020, ZeRO; Zhao et
    al. 2023, FSDP): an all-gather per micro-batch for forward, another one for backward where
    parameters are freed in between; a reduce-scatter of the gradients per micro-batch, or once with
    ``none``; over the replicas what the sync method sends (`parallel2d.cost.replica_sync`), once or
    per micro-batch with ``full``.
    Parameters count as they travel: padded to the shard axis, in the dtype they are gathered or
    reduced in. Gradients in fewer than 32 bits are exchanged all to all instead, over the shard
    axis and, with an all-gather of the means, over the replicas. The ``tensor`` axis moves
    activations, which depend on the model's plan: `count_tensor_axis`.
    """
    shape, device = mesh_shape(mesh), mesh.device_type
    # Torch's own engine adds narrow gradients in a reduce-scatter, ours exchanges them.
    engine = next(iter(gradient_syncs(model)), None)
    scatters = 1 if during_accumulation == "none" else accumulation
    reductions = accumulation if during_accumulation == "full" else 1
    replicate = shard = 0.0
    for traffic in fsdp_internals.traffic_by_group(model):
        # Once for forward, and once more for backward where it frees parameters in between.
        gathers = accumulation * (2 if traffic.frees_after_forward else 1)
        gathered = traffic.gathered_bytes * shape.shard
        shard += gathers * sent_bytes("all_gather", gathered, shape.shard, device)
        reduced = traffic.reduced_bytes * shape.shard
        is_exchanged = engine is not None and traffic.reduced_itemsize < 4
        collective = "all_to_all" if is_exchanged else "reduce_scatter"
        shard += scatters * sent_bytes(collective, reduced, shape.shard, device)
        replicate += _between_replicas(engine, traffic, shape.replicate, device, reductions)
    return _by_key(shape, replicate, shard)


def exact_bytes(model: nn.Module, mesh: DeviceMesh) -> float:
    """Bytes that a rank would send per step over the ``replicate`` axis if gradients were reduced
    there in fp32, once per step. ``model``: after `parallelize`."""
    numel = sum(traffic.reduced_numel for traffic in fsdp_internals.traffic_by_group(model))
    return sent_bytes("all_reduce", 4 * numel, mesh_shape(mesh).replicate, mesh.device_type)


def _between_replicas(
    engine: GradientSync | None,
    traffic: fsdp_internals.GroupTraffic,
    replicas: int,
    device: str,
    reductions: int,
) -> float:
    """Bytes per step over the replicate axis. ``reductions``: of gradients, per step."""
    if engine is None:
        return reductions * sent_bytes("all_reduce", traffic.reduced_bytes, replicas, device)
    sync = engine.config
    if sync.name == "diloco":
        return outer_bytes(traffic, sync, replicas, device)
    if engine.method.owners is not None:
        return split_bytes(traffic, sync.wire, replicas, device)
    return reductions * gradient_bytes(traffic, sync.wire, replicas, device)


def _by_key(shape: MeshShape, replicate: float, shard: float) -> dict[str, float]:
    predicted = {"comm/replicate/bytes": replicate, "comm/shard/bytes": shard}
    if shape.tensor == 1:
        predicted["comm/tensor/bytes"] = 0.0
    return predicted


def count_tensor_axis(
    twin: nn.Module,
    mesh: DeviceMesh,
    loss: Callable[[Any, Tensor], Tensor],
    example: Callable[[str], tuple[Tensor, Tensor]],
    counter: CollectiveCounter,
    *,
    accumulation: int,
    during_accumulation: str = "reduce_scatter_only",
    reduce_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """Bytes that a rank sends per step over the ``tensor`` axis, as
    ``{"comm/tensor/bytes": bytes}``.

    ``twin``: from `parallel2d.cost.tensor_twin.tensor_twin`; ``example(device)``: inputs and
    targets of one micro-batch. It runs forward and backward on tensors without storage, on every
    rank alike; its collectives are counted by ``counter`` instead of run. Then come those that
    sharding adds before it reduces: the gradients of weights that stayed whole while their inputs
    were split are summed over the axis, in every backward, or once with ``none``, in
    ``reduce_dtype`` (default: their own). Empty, and the reason logged, for a model that such
    tensors cannot run.
    """
    problem: Exception | None = None
    # Meta tensors are twice as fast, and some models only run on tensors with a real device.
    for device_type in ("meta", mesh.device_type):
        counter.install()
        try:
            passes, sums = _count(twin, loss, example, device_type, counter, reduce_dtype)
        # A model may look at values, which neither kind of tensor has.
        except Exception as error:
            problem = error
        else:
            summed = 1 if during_accumulation == "none" else accumulation
            return {"comm/tensor/bytes": accumulation * passes + summed * sums}
        finally:
            counter.remove()
    reason = str(problem).split("\n")[0]
    kind = type(problem).__name__
    log.info("bytes over the tensor axis are not predicted: %s: %s", kind, reason)
    return {}


def _count(
    twin: nn.Module,
    loss: Callable[[Any, Tensor], Tensor],
    example: Callable[[str], tuple[Tensor, Tensor]],
    device_type: str,
    counter: CollectiveCounter,
    reduce_dtype: torch.dtype | None,
) -> tuple[float, float]:
    """Bytes over the tensor axis of one forward and backward, and of the sums of gradients."""
    devices = range(torch.cuda.device_count())
    pretend = nullcontext() if device_type == "meta" else on_fake_tensors(twin, device_type)
    with pretend, torch.random.fork_rng(devices):
        inputs, targets = example(device_type)
        counter.start()
        loss(twin(inputs), targets).backward()
        passes = counter.sent_over("tensor")
        counter.start()
        _make_gradients_whole(twin, reduce_dtype)
        return passes, counter.sent_over("tensor")


def _make_gradients_whole(model: nn.Module, dtype: torch.dtype | None) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements == parameter.placements:
            continue
        sent = torch.promote_types(gradient.dtype, dtype or gradient.dtype)
        wide: Any = gradient.to(sent)
        # The counter sees the collective that this takes; its result is not needed.
        wide.redistribute(placements=parameter.placements)

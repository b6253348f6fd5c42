"""Bytes that each mesh axis must move per step, known before the first one.

`predict_communication` computes those of the shard and replicate axes from a sharded model,
`predict_layout` the same from shapes alone;
`count_tensor_axis` counts those of the tensor axis in a step without storage.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d import fsdp_internals
from parallel2d.config import OptimizerConfig, ParallelConfig, SyncConfig
from parallel2d.cost.collectives import sent_bytes
from parallel2d.cost.model_shapes import ModelShapes
from parallel2d.cost.replica_sync import gradient_bytes, outer_bytes, split_bytes
from parallel2d.cost.state_memory import splits_updates
from parallel2d.cost.tensor_twin import on_fake_tensors
from parallel2d.cost.update_traffic import predict_updates
from parallel2d.loss import loss_chunks
from parallel2d.mesh import MeshShape, mesh_shape
from parallel2d.sync.gradient_sync import gradient_syncs

_ALL_AT_ONCE = 2**62  # logits

log = logging.getLogger(__name__)

# How often the collectives of a step go round a ring of the tensor axis, beside its bytes
RING_PASSES = "comm/tensor/ring_passes"


class CollectiveCounter(Protocol):
    """Counts collectives by mesh axis instead of running them
    (`parallel2d.metrics.communication.CommunicationMeter` with ``dry=True``)."""

    def install(self) -> object: ...

    def remove(self) -> None: ...

    def start(self) -> None: ...

    def sent_over(self, axis: str) -> float: ...

    def ring_passes_over(self, axis: str) -> int: ...


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
    engine = next(iter(gradient_syncs(model)), None)
    sync = SyncConfig(engine="torch")
    if engine is not None:
        sync = engine.config
    groups = [(traffic, 1) for traffic in fsdp_internals.traffic_by_group(model)]
    return _bytes_of_groups(
        groups,
        mesh_shape(mesh),
        mesh.device_type,
        dataclasses.replace(sync, during_accumulation=during_accumulation),
        splits=engine is not None and engine.method.owners is not None,
        accumulation=accumulation,
    )


def predict_layout(
    shapes: ModelShapes,
    shape: MeshShape,
    config: ParallelConfig,
    optimizer: OptimizerConfig,
    *,
    accumulation: int,
    device_type: str,
    activations: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """As `predict_communication`, from the shapes of a model that was not parallelized
    (`collect_shapes`), and with what the optimizer sends. ``activations``: from
    `count_tensor_axis`; without them the bytes of a tensor axis are not known, and its key is
    missing."""
    predicted = dict(activations or {})
    predicted |= _bytes_of_groups(
        shapes.traffic(shape.shard, frees_after_forward=config.strategy.reshard_after_forward),
        shape,
        device_type,
        config.sync,
        splits=splits_updates(config, shape.replicate),
        accumulation=accumulation,
    )
    updates = predict_updates(shapes, shape, config, optimizer, device_type)
    for axis, sent in updates.items():
        key = f"comm/{axis}/bytes"
        if key in predicted:
            predicted[key] += sent
    return predicted


def _bytes_of_groups(
    groups: Iterable[tuple[fsdp_internals.GroupTraffic, int]],
    shape: MeshShape,
    device: str,
    sync: SyncConfig,
    *,
    splits: bool,
    accumulation: int,
) -> dict[str, float]:
    """``groups``: each with the number of groups that are equal to it. ``splits``: whether replicas
    split the updates."""
    # Torch's own engine adds narrow gradients in a reduce-scatter, ours exchanges them.
    exchanges_narrow = sync.engine == "parallel2d"
    scatters = 1 if sync.during_accumulation == "none" else accumulation
    reductions = accumulation if sync.during_accumulation == "full" else 1
    replicate = shard = 0.0
    for traffic, count in groups:
        # Once for forward, and once more for backward where it frees parameters in between.
        gathers = accumulation * (2 if traffic.frees_after_forward else 1)
        gathered = traffic.gathered_bytes * shape.shard
        moved = gathers * sent_bytes("all_gather", gathered, shape.shard, device)
        reduced = traffic.reduced_bytes * shape.shard
        is_exchanged = exchanges_narrow and traffic.reduced_itemsize < 4
        collective = "all_to_all" if is_exchanged else "reduce_scatter"
        moved += scatters * sent_bytes(collective, reduced, shape.shard, device)
        shard += count * moved
        between = _between_replicas(sync, splits, traffic, shape.replicate, device, reductions)
        replicate += count * between
    return _by_key(shape, replicate, shard)


def exact_bytes(model: nn.Module, mesh: DeviceMesh) -> float:
    """Bytes that a rank would send per step over the ``replicate`` axis if gradients were reduced
    there in fp32, once per step. ``model``: after `parallelize`."""
    numel = sum(traffic.reduced_numel for traffic in fsdp_internals.traffic_by_group(model))
    return sent_bytes("all_reduce", 4 * numel, mesh_shape(mesh).replicate, mesh.device_type)


def _between_replicas(
    sync: SyncConfig,
    splits: bool,
    traffic: fsdp_internals.GroupTraffic,
    replicas: int,
    device: str,
    reductions: int,
) -> float:
    """Bytes per step over the replicate axis. ``reductions``: of gradients, per step."""
    if sync.engine == "torch":
        return reductions * sent_bytes("all_reduce", traffic.reduced_bytes, replicas, device)
    if sync.name == "diloco":
        return outer_bytes(traffic, sync, replicas, device)
    if splits:
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
    """Bytes that a rank sends per step over the ``tensor`` axis, and how often its collectives go
    round a ring, as ``{"comm/tensor/bytes": bytes, "comm/tensor/ring_passes": passes}``.

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
            return {
                "comm/tensor/bytes": accumulation * passes.bytes + summed * sums.bytes,
                RING_PASSES: accumulation * passes.ring_passes + summed * sums.ring_passes,
            }
        finally:
            counter.remove()
    reason = str(problem).split("\n")[0]
    kind = type(problem).__name__
    log.info("bytes over the tensor axis are not predicted: %s: %s", kind, reason)
    return {}


class _Counted(NamedTuple):
    """What went over the tensor axis."""

    bytes: float
    ring_passes: int

    @classmethod
    def by(cls, counter: CollectiveCounter) -> _Counted:
        return cls(counter.sent_over("tensor"), counter.ring_passes_over("tensor"))


def _count(
    twin: nn.Module,
    loss: Callable[[Any, Tensor], Tensor],
    example: Callable[[str], tuple[Tensor, Tensor]],
    device_type: str,
    counter: CollectiveCounter,
    reduce_dtype: torch.dtype | None,
) -> tuple[_Counted, _Counted]:
    """Over the tensor axis: of one forward and backward, and of the sums of gradients."""
    devices = range(torch.cuda.device_count())
    pretend = nullcontext() if device_type == "meta" else on_fake_tensors(twin, device_type)
    with pretend, loss_chunks(_ALL_AT_ONCE), torch.random.fork_rng(devices):
        inputs, targets = example(device_type)
        counter.start()
        loss(twin(inputs), targets).backward()
        passes = _Counted.by(counter)
        counter.start()
        _make_gradients_whole(twin, reduce_dtype)
        return passes, _Counted.by(counter)


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

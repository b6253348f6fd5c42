"""How long a step of a job would take on a cluster: `estimate_step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import nn

from parallel2d.config import ParallelConfig, TrainConfig
from parallel2d.cost.collective_time import GroupPlacement, collective_seconds
from parallel2d.cost.collectives import sent_bytes
from parallel2d.cost.efficiency import compute_efficiency
from parallel2d.cost.model_shapes import ModelShapes
from parallel2d.cost.replica_sync import (
    gradient_bytes,
    outer_bytes,
    owned_gradient_bytes,
    updated_parameter_bytes,
)
from parallel2d.cost.saving_interval import SavingPlan, best_interval
from parallel2d.cost.state_memory import StateBytes, splits_updates
from parallel2d.cost.step_time import (
    GroupSeconds,
    StepSchedule,
    StepSeconds,
    exchange_seconds,
    step_seconds,
)
from parallel2d.cost.traffic import RING_PASSES
from parallel2d.fsdp_internals import GroupTraffic
from parallel2d.mesh import MeshShape
from parallel2d.model_structure import find_blocks
from parallel2d.parallelize.float8 import float8_layers
from parallel2d.sync.bucket import fill_buckets

_HOUR_S = 3600.0


@dataclass(frozen=True)
class StepEstimate:
    """``samples_per_s``: of the whole job. ``mfu``: model FLOPs per second over the peak of the
    dtype that computes. ``saving``: with ``plan.save_s`` and known failures."""

    seconds: StepSeconds
    samples_per_s: float
    mfu: float
    saving: SavingPlan | None


class MicroBatches(Protocol):
    """Of one rank and step: samples of a micro-batch, and how many there are."""

    @property
    def micro_batch_size(self) -> int: ...

    @property
    def accumulation(self) -> int: ...


class _NotKnownError(Exception):
    """What the estimate lacks, in words."""


class _Compute(NamedTuple):
    """Seconds of compute of one micro-batch on one rank, and model FLOP/s at the peak."""

    forward: float
    recomputed: float
    peak: float


def estimate_step(
    config: TrainConfig,
    shapes: ModelShapes,
    shape: MeshShape,
    places: Mapping[str, GroupPlacement],
    nodes: int,
    batches: MicroBatches,
    states: StateBytes,
    moved: Mapping[str, float],
    flops: int | None,
    device_type: str,
    float8_flops: int = 0,
) -> StepEstimate | str:
    """The estimate, or in words what is not known. ``places``: of the groups of each axis;
    ``moved``: bytes per step by ``comm/AXIS/bytes``; ``flops``: of one sample, ``float8_flops``
    those of them in 8-bit floats. See [Note: what overlaps what]."""
    try:
        links = _Links(config, places, device_type)
        compute = _compute_of(config, shape, batches, flops, float8_flops)
        groups, after_update = _groups_of(config, shapes, shape, links, compute)
        schedule = StepSchedule(
            accumulation=batches.accumulation,
            during_accumulation=config.sync.during_accumulation,
            shares_link=places["shard"].is_inside == places["replicate"].is_inside,
            # On a GPU the host runs ahead of the device.
            overlaps_gathers=device_type != "cpu" or config.prefetch.forward > 0,
            waits_for_scatters=device_type == "cpu",
            tensor=links.tensor(moved) / batches.accumulation,
        )
        update = _update_seconds(config, states)
        seconds = step_seconds(groups, schedule, update=update, between_steps=after_update)
        if config.sync.name == "diloco":
            seconds = _with_exchanges(config, shapes, shape, links, groups, schedule, seconds)
        samples = config.train.global_batch_size / seconds.total
        assert flops is not None
        return StepEstimate(
            seconds=seconds,
            samples_per_s=samples,
            mfu=samples * flops / (compute.peak * shape.world_size),
            saving=_saving(config, nodes),
        )
    except _NotKnownError as lacking:
        return str(lacking)


def describes_compute(config: TrainConfig) -> bool:
    """Whether ``cluster`` gives a step's compute and update a time, and links inside hosts too."""
    try:
        _reached(config, config.precision.param)
        if config.precision.float8 != "none":
            _reached(config, "fp8")
    except _NotKnownError:
        return False
    cluster = config.cluster
    return cluster.inside_node.up_gbit is not None and cluster.device.memory_gb_per_s is not None


def float8_flops(model: nn.Module, config: ParallelConfig, tokens: int) -> int:
    """FLOPs of a sample of ``tokens`` that run in 8-bit floats: two of forward and four of backward
    for each weight of a converted layer and each token. ``model``: before `parallelize`."""
    blocks = find_blocks(model, config.bucketing.blocks, config.bucketing.policy)
    layers = float8_layers(blocks, config.precision)
    return 6 * tokens * sum(layer.weight.numel() for layer in layers)


class _Links:
    """Seconds of the collectives of each axis."""

    def __init__(
        self, config: TrainConfig, places: Mapping[str, GroupPlacement], device_type: str
    ) -> None:
        self._cluster = config.cluster
        self._places = places
        self.device_type = device_type

    def seconds(self, collective: str, sent: float, axis: str) -> float:
        """Of one collective over ``axis``. Raises `_NotKnownError`."""
        if sent == 0 or self._places[axis].ranks == 1:
            return 0.0
        found = collective_seconds(
            collective, sent, self._places[axis], self._cluster, self.device_type
        )
        if found is None:
            key = "inside_node" if self._places[axis].is_inside else "between_nodes"
            raise _NotKnownError(f"cluster.{key} is not known")
        if self.device_type == "cpu":
            found += (self._cluster.device.wait_overhead_us or 0.0) / 1e6
        return found

    def tensor(self, moved: Mapping[str, float]) -> float:
        """Of what a step sends over the tensor axis, with the latencies of all its collectives,
        which wait for each other."""
        place = self._places["tensor"]
        if place.ranks == 1:
            return 0.0
        if "comm/tensor/bytes" not in moved:
            raise _NotKnownError("the bytes of the tensor axis are not known")
        once = self.seconds("all_to_all", moved["comm/tensor/bytes"], "tensor")
        # An exchange of nothing takes the latencies of one pass round the ring.
        latency = collective_seconds("all_to_all", 0.0, place, self._cluster)
        assert latency is not None
        return once + max(0.0, moved[RING_PASSES] - 1) * latency


def _compute_of(
    config: TrainConfig,
    shape: MeshShape,
    batches: MicroBatches,
    flops: int | None,
    float8_flops: int,
) -> _Compute:
    if flops is None:
        raise _NotKnownError("the model's FLOPs are not known")
    if config.cpu_offload:
        raise _NotKnownError(
            "copies to and from the memory of the host (cpu_offload) have no model"
        )
    dtype = config.precision.param
    if float8_flops == 0:
        per_sample = flops / _reached(config, dtype)
    else:
        # Attention, the head and all that is no Linear layer of a block stay in the other dtype.
        narrow = min(flops, float8_flops)
        per_sample = narrow / _reached(config, "fp8") + (flops - narrow) / _reached(config, dtype)
        dtype = "fp8"
    # A third of the FLOPs of a step is forward's, two thirds are backward's.
    forward = per_sample * batches.micro_batch_size / shape.tensor / 3
    recomputed = 0.0
    checkpointing = config.activation_checkpointing
    if checkpointing.name == "full":
        recomputed = forward / checkpointing.every
    return _Compute(forward, recomputed, _peak(config, dtype))


def _peak(config: TrainConfig, dtype: str) -> float:
    """FLOP/s."""
    peak: float | None = getattr(config.cluster.device.peak_tflops, dtype)
    if peak is None:
        raise _NotKnownError(f"cluster.device.peak_tflops.{dtype} is not known")
    return peak * 1e12


def _reached(config: TrainConfig, dtype: str) -> float:
    """FLOP/s that compute in ``dtype`` reaches."""
    peak = _peak(config, dtype)
    device = config.cluster.device.name
    compiled = config.compile.name != "none"
    known = compute_efficiency(device, dtype, compiled=compiled)
    efficiency = config.plan.efficiency or config.cluster.device.efficiency
    # What is given is that of the float8 layers, where there are any.
    is_the_rest = config.precision.float8 != "none" and dtype != "fp8"
    if efficiency is None or (is_the_rest and known is not None):
        efficiency = known
    if efficiency is None:
        raise _NotKnownError(
            f"what share of its peak {device} reaches in {dtype} is not known: give plan.efficiency"
        )
    return peak * efficiency


def _groups_of(
    config: TrainConfig, shapes: ModelShapes, shape: MeshShape, links: _Links, compute: _Compute
) -> tuple[list[GroupSeconds], float]:
    """The groups in the order of forward, the root first, and the seconds of what replicas gather
    after the update."""
    device = links.device_type
    frees = config.strategy.reshard_after_forward
    traffic = shapes.traffic(shape.shard, frees_after_forward=frees)
    whole = sum(count * group.gathered_bytes for group, count in traffic)
    splits = splits_updates(config.parallel(), shape.replicate)
    # Forward has one of three calls of the engine for a group, backward two.
    overhead = 0.0
    if device == "cpu":
        overhead = (config.cluster.device.group_overhead_us or 0.0) / 1e6
    found: list[GroupSeconds] = []
    in_order: list[GroupTraffic] = []
    after_update = 0.0
    # The root's group comes last, and runs first.
    for group, count in [*traffic[-1:], *traffic[:-1]]:
        share = group.gathered_bytes / whole
        gathered = sent_bytes("all_gather", group.gathered_bytes * shape.shard, shape.shard, device)
        sends, reduced = _scatter_of(config, group, shape, device)
        seconds = GroupSeconds(
            forward=share * compute.forward + overhead / 3,
            backward=share * (2 * compute.forward + compute.recomputed) + overhead * 2 / 3,
            gather=links.seconds("all_gather", gathered, "shard"),
            scatter=links.seconds(sends, reduced, "shard"),
            reduce=0.0,
            frees=frees,
        )
        found += [seconds] * count
        in_order += [group] * count
        if splits:
            sent = updated_parameter_bytes(group, config.sync.wire, shape.replicate, device)
            after_update += count * links.seconds("all_gather", sent, "replicate")
    _reduce_buckets(found, in_order, config, shape, links, splits)
    return found, after_update


def _reduce_buckets(
    seconds: list[GroupSeconds],
    groups: Sequence[GroupTraffic],
    config: TrainConfig,
    shape: MeshShape,
    links: _Links,
    splits: bool,
) -> None:
    """Adds to ``seconds`` what crosses the replicate axis, at the group that completes each
    bucket. ``groups``: in the order of forward, as ``seconds``."""
    if shape.replicate == 1 or config.sync.name == "diloco":
        return
    # Backward ends the last group first.
    order = [index for index in reversed(range(len(groups))) if groups[index].reduced_numel > 0]
    sizes = [groups[index].reduced_numel * groups[index].sum_itemsize for index in order]
    kinds = [(groups[index].reduced_itemsize, groups[index].sum_itemsize) for index in order]
    # Torch's engine reduces each group on its own.
    most = int(config.sync.bucket_mib * 2**20) if config.sync.engine == "parallel2d" else 0
    for bucket in fill_buckets(sizes, kinds, most):
        members = [groups[order[each]] for each in bucket]
        sent = 0.0
        for group in members:
            kind, between = _between_replicas(config, group, shape, links.device_type, splits)
            sent += between
        numel = sum(group.reduced_numel for group in members)
        coding = _coding_seconds(config, _sent_as(config, members[0]), numel)
        last = order[bucket[-1]]
        seconds[last] = seconds[last]._replace(
            reduce=links.seconds(kind, sent, "replicate"), encode=coding / 2, decode=coding / 2
        )


def _sent_as(config: TrainConfig, group: GroupTraffic) -> str:
    """The form in which gradients of ``group`` cross the replicate axis."""
    wire = config.sync.wire
    if wire == "auto":
        wire = "bf16" if group.reduced_itemsize < 4 else "fp32"
    return wire


def _coding_seconds(config: TrainConfig, wire: str, numel: int) -> float:
    """Of the processor, for writing ``numel`` values in ``wire`` and reading what replicas have
    sent of them."""
    speed: float | None = getattr(config.cluster.device.coding_gb_per_s, wire, None)
    if speed is None or config.sync.engine == "torch":
        return 0.0
    return 4 * numel / (speed * 1e9)


def _scatter_of(
    config: TrainConfig, group: GroupTraffic, shape: MeshShape, device: str
) -> tuple[str, float]:
    """How gradients are reduced over the shard axis, and the bytes a rank sends."""
    is_exchanged = config.sync.engine == "parallel2d" and group.reduced_itemsize < 4
    collective = "all_to_all" if is_exchanged else "reduce_scatter"
    sent = sent_bytes(collective, group.reduced_bytes * shape.shard, shape.shard, device)
    return collective, sent


def _between_replicas(
    config: TrainConfig, group: GroupTraffic, shape: MeshShape, device: str, splits: bool
) -> tuple[str, float]:
    """As `_scatter_of`, over the replicate axis, for the gradients of one reduction."""
    sync = config.sync
    if sync.name == "diloco":
        return "all_reduce", 0.0
    if sync.engine == "torch":
        sent = sent_bytes("all_reduce", group.reduced_bytes, shape.replicate, device)
        return "all_reduce", sent
    if splits:
        return "all_to_all", owned_gradient_bytes(group, sync.wire, shape.replicate, device)
    return "all_reduce", gradient_bytes(group, sync.wire, shape.replicate, device)


def _update_seconds(config: TrainConfig, states: StateBytes) -> float:
    """The optimizer reads and writes parameters and its state, and reads gradients. Parameters take
    as many bytes as their gradients."""
    speed = config.cluster.device.memory_gb_per_s
    if speed is None:
        raise _NotKnownError("cluster.device.memory_gb_per_s is not known")
    return (3 * states.gradients + 2 * states.optimizer) / (speed * 1e9)


def _with_exchanges(
    config: TrainConfig,
    shapes: ModelShapes,
    shape: MeshShape,
    links: _Links,
    groups: list[GroupSeconds],
    schedule: StepSchedule,
    alone: StepSeconds,
) -> StepSeconds:
    """The step with its part of the exchanges of ``sync=diloco``."""
    sync = config.sync
    exchange = coding = 0.0
    frees = config.strategy.reshard_after_forward
    for group, count in shapes.traffic(shape.shard, frees_after_forward=frees):
        per_step = outer_bytes(group, sync, shape.replicate, links.device_type)
        exchange += sync.every * count * per_step
        coding += count * _coding_seconds(config, sync.wire, group.reduced_numel)
    # Each fragment is one collective.
    exchange = sync.fragments * links.seconds("all_reduce", exchange / sync.fragments, "replicate")
    added = exchange_seconds(exchange, alone.total, sync.every, sync.fragments, sync.delay)
    added += coding / sync.every
    return step_seconds(groups, schedule, update=alone.update, between_steps=added)


def _saving(config: TrainConfig, nodes: int) -> SavingPlan | None:
    hours = config.cluster.node_mtbf_hours
    if hours is None or config.plan.save_s is None:
        return None
    mtbf = hours * _HOUR_S / nodes
    return best_interval(config.plan.save_s, config.plan.restart_s, mtbf)

"""Seconds of a step of a layout on a cluster: `estimate_step`.

[Note: overlap of compute and links] In forward a group is all-gathered while the previous group
computes. In backward the next group is all-gathered while a group computes, and the gradients of
the previous group are reduce-scattered on the same link. The reduction of a bucket over replicas
starts after the last group of the bucket is reduced over the shard axis. This reduction uses a
separate link if one axis is inside hosts and the other axis crosses hosts. Backward ends when
compute and all collectives have ended. Communication time that is not overlapped by compute is
called exposed. On CPU forward and backward wait for each all-gather, and backward waits for each
reduce-scatter, because torch calls these collectives without ``async_op`` and CPU has no streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel2d.base.config import ClusterConfig
from parallel2d.parallel.cost.collectives import GroupPlacement, collective_seconds
from parallel2d.parallel.cost.state_memory import state_bytes
from parallel2d.parallel.cost.traffic import AxisTraffic
from parallel2d.parallel.parallelize.layout import Layout
from parallel2d.parallel.sync.engine.buckets import fill_buckets
from parallel2d.parallel.sync.methods.method import GroupTraffic

# (part of the device name, True if blocks are compiled) -> fraction of the peak FLOP/s that compute
# reaches. Fitted to published bf16 throughput by ``python -m tools.bench.published_steps``. The
# H200 has the values of the H100, because both have the same peak.
EFFICIENCIES = {
    ("H100", False): 0.335,
    ("H100", True): 0.366,
    ("H200", False): 0.335,
    ("H200", True): 0.366,
    ("A100", True): 0.53,
}
# Assumed fraction of the peak for fp32 and fp64, for which there is no fit
ASSUMED_EFFICIENCY = 0.5


class GroupSeconds(NamedTuple):
    """Seconds of one FSDP group in one micro-batch."""

    forward: float  # compute
    backward: float  # compute, including recomputation
    gather: float  # one all-gather over the shard axis
    scatter: float  # the reduction of gradients over the shard axis
    reduce: float  # the reduction over replicas of the bucket that this group completes
    frees: bool  # True if parameters are freed after forward and gathered again for backward


@dataclass(frozen=True)
class StepSchedule:
    """The schedule of a step."""

    accumulation: int  # number of micro-batches
    during_accumulation: str  # see `SyncConfig`
    shares_link: bool  # True if the shard and the replicate axis use the same link
    overlaps: bool  # True if collectives of the shard axis run while the device computes
    tensor: float = 0.0  # exposed seconds of a micro-batch over the tensor axis
    context: float = 0.0  # exposed seconds of a micro-batch over the context axis


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step. ``shard`` and ``replicate`` are only the exposed seconds."""

    compute: float
    tensor: float
    shard: float
    replicate: float
    update: float
    total: float
    context: float = 0.0

    @property
    def exposed_share(self) -> float:
        """Fraction of the step during which the device waits for communication."""
        return (self.tensor + self.context + self.shard + self.replicate) / self.total


@dataclass(frozen=True)
class StepEstimate:
    """Estimate of a step."""

    seconds: StepSeconds
    samples_per_s: float  # of the whole job
    mfu: float  # model FLOPs divided by the peak of the devices
    assumed: str = ""  # note about an assumed fraction of the peak; empty: given or fitted


class _NotKnownError(Exception):
    """An input of the estimate is missing; the message names it."""


def estimate_step(
    layout: Layout,
    cluster: ClusterConfig,
    places: Mapping[str, GroupPlacement],
    inside: Mapping[str, tuple[float, float]],
    flops: int | None,
) -> StepEstimate | str:
    """Return the estimate of a step, or as text the reason why there is none.

    See [Note: overlap of compute and links].

    Args:
        layout: the layout.
        cluster: devices and links.
        places: placement of the groups of each axis.
        inside: bytes and ring passes over the tensor and context axes; see
            `TensorTraffic.of_step`.
        flops: FLOPs of one sample; None: unknown.
    """
    try:
        return _Estimate(layout, cluster, places).of_step(inside, flops)
    except _NotKnownError as lacking:
        return str(lacking)


class _Estimate:
    def __init__(
        self, layout: Layout, cluster: ClusterConfig, places: Mapping[str, GroupPlacement]
    ) -> None:
        self._layout = layout
        self._traffic = AxisTraffic(layout)
        self._sync = layout.config.sync
        self._cluster = cluster
        self._places = places

    def of_step(self, inside: Mapping[str, tuple[float, float]], flops: int | None) -> StepEstimate:
        layout, accumulation = self._layout, self._layout.workload.accumulation
        if flops is None:
            raise _NotKnownError("the model's FLOPs are not known")
        forward, recomputed, assumed = self._compute(flops)
        groups, after_update = self._groups(forward, recomputed)
        schedule = StepSchedule(
            accumulation=accumulation,
            during_accumulation=self._sync.during_accumulation,
            shares_link=self._places["shard"].is_inside == self._places["replicate"].is_inside,
            # On a GPU collectives run on separate streams.
            overlaps=layout.workload.device_type != "cpu",
            tensor=self._inside("tensor", inside) / accumulation,
            context=self._inside("context", inside) / accumulation,
        )
        update = self._update()
        seconds = step_seconds(groups, schedule, update=update, between_steps=after_update)
        if not layout.method.replicas_equal:
            # Each fragment of ``sync=diloco`` is one collective.
            sync, sent = self._sync, 0.0
            for group, count in self._traffic.groups:
                sent += count * self._traffic.updated(group)
            once = self._collective("all_reduce", sent / sync.fragments, "replicate")
            exchange = sync.fragments * once
            added = exchange_seconds(
                exchange, seconds.total, sync.every, sync.fragments, sync.delay
            )
            seconds = step_seconds(groups, schedule, update=update, between_steps=added)
        samples_per_s = layout.global_batch_size / seconds.total
        mfu = samples_per_s * flops / (self._peak() * layout.shape.world_size)
        return StepEstimate(seconds, samples_per_s, mfu, assumed)

    def _compute(self, flops: int) -> tuple[float, float, str]:
        """Return seconds of one micro-batch on one rank for forward and for recomputation.

        The third value is ``assumed`` of `StepEstimate`.
        """
        layout = self._layout
        if layout.config.cpu_offload:
            raise _NotKnownError(
                "copies to and from the memory of the host (cpu_offload) have no model"
            )
        if layout.config.activation_checkpointing.offloads:
            raise _NotKnownError(
                "copies to and from the memory of the host (activation offload) have no model"
            )
        if layout.config.precision.float8 != "none":
            raise _NotKnownError("compute in 8-bit floats (precision.float8) has no model")
        peak = self._peak()
        share, assumed = self._efficiency(peak)
        per_sample = flops / (peak * share)
        # A third of the FLOPs of a step belongs to forward, two thirds to backward.
        ranks = layout.shape.tensor * layout.shape.context
        forward = per_sample * layout.workload.micro_batch_size / ranks / 3
        checkpointing = layout.config.activation_checkpointing
        if checkpointing.name == "full":
            return forward, forward / checkpointing.every, assumed
        return forward, 0.0, assumed

    def _peak(self) -> float:
        """Return the peak of a device in FLOP/s."""
        dtype = self._layout.config.precision.param
        peak: float | None = getattr(self._cluster.device.peak_tflops, dtype)
        if peak is None:
            raise _NotKnownError(f"cluster.device.peak_tflops.{dtype} is not known")
        return peak * 1e12

    def _efficiency(self, peak: float) -> tuple[float, str]:
        device, config = self._cluster.device, self._layout.config
        dtype = config.precision.param
        if device.efficiency is not None:
            return device.efficiency, ""
        if dtype in ("fp32", "fp64"):
            return ASSUMED_EFFICIENCY, (
                f"{ASSUMED_EFFICIENCY:.0%} of the {dtype} peak of {peak / 1e12:g} TFLOP/s is "
                "assumed; cluster.device.efficiency=SHARE sets it"
            )
        is_compiled = config.compile.name != "none"
        for (part, compiled), share in EFFICIENCIES.items():
            if part in device.name and compiled == is_compiled and dtype == "bf16":
                return share, ""
        raise _NotKnownError(
            f"the share of its peak that {device.name} reaches in {dtype} is not known: give "
            "cluster.device.efficiency"
        )

    def _collective(self, collective: str, sent: float, axis: str) -> float:
        place = self._places[axis]
        if sent == 0 or place.ranks == 1:
            return 0.0
        device_type = self._layout.workload.device_type
        found = collective_seconds(collective, sent, place, self._cluster, device_type)
        if found is None:
            key = "inside_node" if place.is_inside else "between_nodes"
            raise _NotKnownError(f"cluster.{key} is not known")
        return found

    def _inside(self, axis: str, inside: Mapping[str, tuple[float, float]]) -> float:
        """Return the seconds of the communication over ``axis`` in a step, without overlap."""
        place = self._places[axis]
        if place.ranks == 1:
            return 0.0
        if axis not in inside:
            raise _NotKnownError(f"the bytes of the {axis} axis are not known")
        sent, passes = inside[axis]
        once = self._collective("all_to_all", sent, axis)
        # An all-to-all of 0 bytes costs the latencies of one pass around the ring.
        latency = collective_seconds("all_to_all", 0.0, place, self._cluster)
        assert latency is not None
        return once + max(0.0, passes - 1) * latency

    def _groups(self, forward: float, recomputed: float) -> tuple[list[GroupSeconds], float]:
        """Return the groups in forward order (the root first), and the seconds of all-gathers of
        updated parameters."""
        layout, traffic = self._layout, self._traffic
        whole = sum(count * group.gathered_bytes for group, count in traffic.groups)
        frees = layout.config.strategy.placement.reshard_after_forward
        found: list[GroupSeconds] = []
        in_order: list[GroupTraffic] = []
        after_update = 0.0
        # The root's group is the last in the layout, and runs first.
        for group, count in [*traffic.groups[-1:], *traffic.groups[:-1]]:
            share = group.gathered_bytes / whole
            collective, scattered = traffic.scattered(group)
            seconds = GroupSeconds(
                forward=share * forward,
                backward=share * (2 * forward + recomputed),
                gather=self._collective("all_gather", traffic.gathered(group), "shard"),
                scatter=self._collective(collective, scattered, "shard"),
                reduce=0.0,
                frees=frees and not group.stays_unsharded,
            )
            found += [seconds] * count
            in_order += [group] * count
            if layout.method.splits_updates:
                updated = self._collective("all_gather", traffic.updated(group), "replicate")
                after_update += count * updated
        if layout.method.reductions(layout.workload.accumulation):
            self._reduce_buckets(found, in_order)
        return found, after_update

    def _reduce_buckets(self, seconds: list[GroupSeconds], groups: Sequence[GroupTraffic]) -> None:
        """Add each reduction over replicas to the ``seconds`` of the group that completes a bucket.

        ``groups`` and ``seconds`` are in forward order.
        """
        # Backward completes the groups in reverse order.
        order = []
        for index in reversed(range(len(groups))):
            if groups[index].reduced_numel:
                order.append(index)
        sizes, kinds = [], []
        for index in order:
            sizes.append(groups[index].reduced_numel * groups[index].sum_itemsize)
            kinds.append((groups[index].reduced_itemsize, groups[index].sum_itemsize))
        for bucket in fill_buckets(sizes, kinds, self._sync.bucket_bytes):
            reductions = []
            for each in bucket:
                reductions.append(self._traffic.reduced(groups[order[each]]))
            collective = reductions[0][0]
            sent = sum(size for _, size in reductions)
            last = order[bucket[-1]]
            reduce = self._collective(collective, sent, "replicate")
            seconds[last] = seconds[last]._replace(reduce=reduce)

    def _update(self) -> float:
        """Return the seconds of the optimizer, from the bytes that it reads and writes.

        The optimizer reads and writes parameters and optimizer state, and reads gradients.
        Parameters are assumed to have as many bytes as gradients.
        """
        speed = self._cluster.device.memory_gb_per_s
        if speed is None:
            raise _NotKnownError("cluster.device.memory_gb_per_s is not known")
        states = state_bytes(self._layout)
        return (3 * states.gradients + 2 * states.optimizer) / (speed * 1e9)


def step_seconds(
    groups: Sequence[GroupSeconds],
    schedule: StepSchedule,
    *,
    update: float,
    between_steps: float = 0.0,
) -> StepSeconds:
    """Return the seconds of a step; see [Note: overlap of compute and links].

    Args:
        groups: in the order of forward.
        schedule: the schedule of the step.
        update: seconds of the optimizer.
        between_steps: exposed seconds per step of communication between replicas other than
            gradients.
    """
    moving = _all_micro_batches(groups, schedule)
    alone = _all_micro_batches([group._replace(reduce=0.0) for group in groups], schedule)
    compute = schedule.accumulation * sum(group.forward + group.backward for group in groups)
    tensor = schedule.accumulation * schedule.tensor
    context = schedule.accumulation * schedule.context
    return StepSeconds(
        compute=compute,
        tensor=tensor,
        shard=alone - compute,
        replicate=moving - alone + between_steps,
        update=update,
        total=moving + tensor + context + between_steps + update,
        context=context,
    )


def exchange_seconds(exchange: float, step: float, every: int, fragments: int, delay: int) -> float:
    """Return the exposed seconds per step that ``sync=diloco`` adds.

    Args:
        exchange: seconds of the communication of all fragments.
        step: seconds of a step without the exchange.
        every: number of steps between two exchanges of a fragment.
        fragments: number of fragments.
        delay: number of steps that overlap with an exchange.
    """
    exposed = max(0.0, exchange / fragments - delay * step)
    return fragments * exposed / every


def _all_micro_batches(groups: Sequence[GroupSeconds], schedule: StepSchedule) -> float:
    last = _micro_batch(groups, schedule)
    if schedule.accumulation == 1:
        return last
    # All micro-batches except the last are equal.
    others = list(groups)
    if schedule.during_accumulation == "none":
        others = [group._replace(scatter=0.0) for group in others]
    if schedule.during_accumulation != "full":
        others = [group._replace(reduce=0.0) for group in others]
    return (schedule.accumulation - 1) * _micro_batch(others, schedule) + last


def _micro_batch(groups: Sequence[GroupSeconds], schedule: StepSchedule) -> float:
    return _forward(groups, schedule.overlaps) + _backward(groups, schedule)


def _forward(groups: Sequence[GroupSeconds], overlaps: bool) -> float:
    link = computed = started = 0.0
    for group in groups:
        # With overlap an all-gather starts when the previous group starts to compute.
        begin = max(link, started) if overlaps else computed
        link = begin + group.gather
        started = max(computed, link)
        computed = started + group.forward
    return computed


def _backward(groups: Sequence[GroupSeconds], schedule: StepSchedule) -> float:
    order = list(reversed(groups))
    computed = shard_link = replica_link = 0.0
    ready = 0.0
    if order and order[0].frees:
        shard_link = ready = order[0].gather
    for number, group in enumerate(order):
        started = max(computed, ready)
        following = order[number + 1] if number + 1 < len(order) else None
        if following is not None and following.frees:
            # The next group is prefetched while this group computes.
            shard_link = max(shard_link, started) + following.gather
            ready = shard_link
            if not schedule.overlaps:
                started = ready
        computed = started + group.backward
        shard_link = max(shard_link, computed) + group.scatter
        if not schedule.overlaps:
            computed = shard_link
        if schedule.shares_link:
            shard_link = max(shard_link, computed) + group.reduce
        elif group.reduce > 0:
            replica_link = max(replica_link, shard_link, computed) + group.reduce
    return max(computed, shard_link, replica_link)

"""How long a step of a layout would take on a cluster: `estimate_step`.

[Note: what overlaps what] Forward gathers a group while the one before it computes. Backward
gathers the next group while one computes, and reduces gradients of the last one on the same link.
The replicas' reductions follow, each when the last group of its bucket has been reduced over the
shard axis, on their own link if the two axes do not use the same. The step goes on when all of that
has ended: what did not fit behind compute is exposed. On CPU forward and backward wait for each
gather, and backward for each reduction over the shard axis: torch calls them without ``async_op``,
and there is no stream that they could run on.
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

# The share of the peak that training reaches while nothing waits for a link, by a part of the
# device's name and whether blocks are compiled: fitted on published throughput in bf16 by
# ``python -m tools.bench.published_steps``. H200 and H100 compute alike.
EFFICIENCIES = {
    ("H100", False): 0.335,
    ("H100", True): 0.366,
    ("H200", False): 0.335,
    ("H200", True): 0.366,
    ("A100", True): 0.53,
}
# In fp32 and fp64 nothing is fitted, for any device: half of what its data sheet says.
ASSUMED_EFFICIENCY = 0.5


class GroupSeconds(NamedTuple):
    """Seconds of one group of parameters in one micro-batch."""

    forward: float  # compute
    backward: float  # compute, with what is computed again
    gather: float  # one all-gather over the shard axis
    scatter: float  # the reduction of gradients over the shard axis
    reduce: float  # the reduction over the replicas of the bucket that this group completes
    frees: bool  # parameters are freed after forward, and gathered once more for backward


@dataclass(frozen=True)
class StepSchedule:
    """The order of a step."""

    accumulation: int  # micro-batches
    during_accumulation: str  # as of `SyncConfig`
    shares_link: bool  # the shard and the replicate axis use the same link
    overlaps: bool  # collectives of the shard axis run while the device computes
    tensor: float = 0.0  # seconds of a micro-batch over this axis, which nothing hides
    context: float = 0.0  # the same over the context axis


@dataclass(frozen=True)
class StepSeconds:
    """Parts of ``total``. ``shard`` and ``replicate``: exposed, that is, not hidden by compute."""

    compute: float
    tensor: float
    shard: float
    replicate: float
    update: float
    total: float
    context: float = 0.0

    @property
    def exposed_share(self) -> float:
        """The share of the step in which the device waits for a link."""
        return (self.tensor + self.context + self.shard + self.replicate) / self.total


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of a step."""

    seconds: StepSeconds
    samples_per_s: float  # of the whole job
    mfu: float  # model FLOPs over the peak of the devices
    assumed: str = ""  # the share of the peak in words, if it is neither given nor fitted


class _NotKnownError(Exception):
    """What the estimate lacks, in words."""


def estimate_step(
    layout: Layout,
    cluster: ClusterConfig,
    places: Mapping[str, GroupPlacement],
    inside: Mapping[str, tuple[float, float]],
    flops: int | None,
) -> StepEstimate | str:
    """The estimate, or in words what is not known. ``places``: of the groups of each axis;
    ``inside``: as of `TensorTraffic.of_step`; ``flops``: of one sample. See [Note: what overlaps
    what]."""
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
            # On a GPU the host runs ahead of the device.
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
        """Seconds of forward of one micro-batch on one rank, and of computing it again; ``assumed``
        of `StepEstimate`."""
        layout = self._layout
        if layout.config.cpu_offload:
            raise _NotKnownError(
                "copies to and from the memory of the host (cpu_offload) have no model"
            )
        if layout.config.precision.float8 != "none":
            raise _NotKnownError("compute in 8-bit floats (precision.float8) has no model")
        peak = self._peak()
        share, assumed = self._efficiency(peak)
        per_sample = flops / (peak * share)
        # A third of the FLOPs of a step is forward's, two thirds are backward's.
        ranks = layout.shape.tensor * layout.shape.context
        forward = per_sample * layout.workload.micro_batch_size / ranks / 3
        checkpointing = layout.config.activation_checkpointing
        if checkpointing.name == "full":
            return forward, forward / checkpointing.every, assumed
        return forward, 0.0, assumed

    def _peak(self) -> float:
        """FLOP/s."""
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
            f"what share of its peak {device.name} reaches in {dtype} is not known: give "
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
        """Seconds of what blocks send over ``axis`` in a step, one collective after the other."""
        place = self._places[axis]
        if place.ranks == 1:
            return 0.0
        if axis not in inside:
            raise _NotKnownError(f"the bytes of the {axis} axis are not known")
        sent, passes = inside[axis]
        once = self._collective("all_to_all", sent, axis)
        # An exchange of nothing takes the latencies of one pass round the ring.
        latency = collective_seconds("all_to_all", 0.0, place, self._cluster)
        assert latency is not None
        return once + max(0.0, passes - 1) * latency

    def _groups(self, forward: float, recomputed: float) -> tuple[list[GroupSeconds], float]:
        """The groups as forward runs them, the root first; seconds of gathers after the update."""
        layout, traffic = self._layout, self._traffic
        whole = sum(count * group.gathered_bytes for group, count in traffic.groups)
        frees = layout.config.strategy.placement.reshard_after_forward
        found: list[GroupSeconds] = []
        in_order: list[GroupTraffic] = []
        after_update = 0.0
        # The root's group comes last, and runs first.
        for group, count in [*traffic.groups[-1:], *traffic.groups[:-1]]:
            share = group.gathered_bytes / whole
            collective, scattered = traffic.scattered(group)
            seconds = GroupSeconds(
                forward=share * forward,
                backward=share * (2 * forward + recomputed),
                gather=self._collective("all_gather", traffic.gathered(group), "shard"),
                scatter=self._collective(collective, scattered, "shard"),
                reduce=0.0,
                frees=frees,
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
        """Adds to ``seconds`` what crosses the replicate axis, at the group that completes each
        bucket. ``groups``: in the order of forward, as ``seconds``."""
        # Backward ends the last group first.
        order = [index for index in reversed(range(len(groups))) if groups[index].reduced_numel]
        sizes = [groups[index].reduced_numel * groups[index].sum_itemsize for index in order]
        kinds = [(groups[index].reduced_itemsize, groups[index].sum_itemsize) for index in order]
        for bucket in fill_buckets(sizes, kinds, int(self._sync.bucket_mib * 2**20)):
            reductions = [self._traffic.reduced(groups[order[each]]) for each in bucket]
            collective = reductions[0][0]
            sent = sum(size for _, size in reductions)
            last = order[bucket[-1]]
            reduce = self._collective(collective, sent, "replicate")
            seconds[last] = seconds[last]._replace(reduce=reduce)

    def _update(self) -> float:
        """Seconds of the optimizer: it reads and writes parameters and its state, and reads
        gradients. Parameters take as many bytes as their gradients."""
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
    """``groups``: in the order in which forward runs them. ``update``: seconds of the optimizer.
    ``between_steps``: seconds per step that replicas exchange beside gradients, and that nothing
    hides; see [Note: what overlaps what]."""
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
    """Seconds per step that ``sync=diloco`` adds.

    ``exchange``: seconds of sending all fragments; ``step``: of a step without. Each of
    ``fragments`` is sent once in ``every`` steps, and ``delay`` steps go on meanwhile.
    """
    exposed = max(0.0, exchange / fragments - delay * step)
    return fragments * exposed / every


def _all_micro_batches(groups: Sequence[GroupSeconds], schedule: StepSchedule) -> float:
    last = _micro_batch(groups, schedule)
    if schedule.accumulation == 1:
        return last
    # All but the last are alike.
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
        # With overlap a gather begins when the group before begins to compute.
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
            # Prefetched while this group computes.
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

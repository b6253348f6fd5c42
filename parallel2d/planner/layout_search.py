"""Searches the layout that trains fastest and fits: `search`.

All layouts are ranked by their step time and have a predicted peak, both by arithmetic. The fastest
one whose peak fits is chosen, and with ``plan.verify=true`` traced first.

[Note: variants] Bucketing changes what a step waits for, and nothing else of its time. So it is
varied only where a layout that fits waits, and would be the fastest without. A variant has to gain
a percent: the model of step time is not exact enough for less. One group for the whole model is
tried only where its parameters fit beside each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel2d.config import AXES, BucketingConfig, MeshConfig, TrainConfig
from parallel2d.config.checks import validated
from parallel2d.config.parallel import STRATEGIES, StrategyConfig
from parallel2d.cost.step_estimate import StepEstimate
from parallel2d.errors import ConfigError
from parallel2d.planner.layout_cost import NOT_COMPUTED, JobCosts, LayoutCost
from parallel2d.planner.machines import usable_gib

_GIB = 2**30
RECOMPUTED = ("none", "selective", "full")  # the one that needs most memory first
_MOST_TRACED = 40
_LEAST_ITEMSIZE = 2  # of a gathered parameter
_LEAST_GAIN = 0.01  # of a variant; see [Note: variants]
# Whole groups for each module, for each block, and one for the model.
_BUCKETINGS: tuple[Mapping[str, Any], ...] = (
    {"name": "layer"},
    {"name": "block"},
    {"name": "size", "size_mib": math.inf},
)


@dataclass(frozen=True)
class RankedLayout:
    """One layout. ``reason``: why it is not the chosen one; empty for the chosen one."""

    config: TrainConfig
    words: tuple[str, ...]
    cost: LayoutCost
    seconds: float  # of a step
    reason: str = ""


@dataclass(frozen=True)
class SearchResult:
    """``ranked``: the fastest first, `chosen` among them. ``refused``: how many layouts cannot run
    at all. ``traced``: how many peaks were traced. ``refusals``: the words of those that cannot
    run, and why."""

    chosen: RankedLayout
    ranked: tuple[RankedLayout, ...]
    refused: int
    traced: int
    refusals: tuple[tuple[tuple[str, ...], str], ...] = ()


def search(config: TrainConfig, fixed: Collection[str]) -> SearchResult:
    """The layouts of ``config`` that differ in strategy, mesh, recomputation, micro-batch and
    bucketing, but for keys that are ``fixed``: ``strategy``, ``mesh.AXIS``,
    ``activation_checkpointing``, ``train.micro_batch_size``, ``bucketing``.

    Raises `ConfigError` where none can run or fit, where step times are not known, and with a cost
    that cannot be traced.
    """
    candidates = _Candidates(config, JobCosts(config))
    candidates.costs.scales_tensor_axis = True
    for layout in layouts_of(config, candidates.costs, fixed):
        candidates.add(layout)
    if not candidates.ranked:
        _, problem = candidates.refusals[0]
        raise ConfigError(f"no layout can run; the first one: {problem}")
    if not any(key in fixed for key in _BUCKETING_KEYS):
        candidates.vary()
    ranked = sorted(candidates.ranked, key=_order)
    return _first_that_fits(config, candidates, ranked)


def _order(layout: RankedLayout) -> tuple[float, int]:
    """Of equally fast ones the one with fewer and larger micro-batches comes first, then the one
    that is listed first: the plainest."""
    return float(f"{layout.seconds:.6g}"), layout.cost.accumulation


_BUCKETING_KEYS = (
    "bucketing",
    "bucketing.size_mib",
    "bucketing.blocks",
    "bucketing.policy",
)


class _Candidates:
    """Layouts with their costs, and those that cannot run."""

    def __init__(self, given: TrainConfig, costs: JobCosts) -> None:
        self.given = given
        self.costs = costs
        self.ranked: list[RankedLayout] = []
        self.refusals: list[tuple[tuple[str, ...], str]] = []

    def add(self, layout: TrainConfig, base: RankedLayout | None = None) -> None:
        """``base``: of which it is a variant."""
        words = words_of(layout, self.given)
        try:
            validated(layout)
            # The activations of other groups are measured for those that might be chosen alone.
            predicts = layout.bucketing == self.given.bucketing
            cost = self.costs.cost(layout, predicts=predicts)
        except ConfigError as error:
            self.refusals.append((words, str(error)))
            return
        if not isinstance(cost.time, StepEstimate):
            raise ConfigError(
                f"layouts cannot be ranked: {cost.time}; plan.dry_run=true plans the one that is "
                "given"
            )
        seconds = cost.time.seconds.total
        reason = ""
        if base is not None and seconds > (1 - _LEAST_GAIN) * base.seconds:
            reason = f"gains less than 1% over {' '.join(base.words)}"
        self.ranked.append(RankedLayout(layout, words, cost, seconds, reason))

    def vary(self) -> None:
        """Adds layouts with other groups for those that wait; see [Note: variants]."""
        best = min((each.seconds for each in self.ranked if self._fits(each)), default=math.inf)
        for base in list(self.ranked):
            time = base.cost.time
            assert isinstance(time, StepEstimate)
            waits = time.seconds.shard + time.seconds.replicate
            if waits <= _LEAST_GAIN * base.seconds or base.seconds - waits >= best:
                continue
            # A variant needs about as much memory.
            if not self._fits(base):
                continue
            for layout in self._with_bucketings(base.config):
                self.add(layout, base)

    def _with_bucketings(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """``config`` with other groups; see [Note: variants]."""
        memory = usable_gib(self.given)
        whole = self.costs.parameters * _LEAST_ITEMSIZE / int(config.mesh.tensor) / _GIB
        for settings in _BUCKETINGS:
            if settings["name"] == config.bucketing.name:
                continue
            if settings["name"] == "size" and memory is not None and whole > memory:
                continue
            # Only groups by size read a size.
            plain = {"size_mib": BucketingConfig().size_mib}
            bucketing = dataclasses.replace(config.bucketing, **{**plain, **settings})
            yield dataclasses.replace(config, bucketing=bucketing)

    def _fits(self, layout: RankedLayout) -> bool:
        return not layout.reason and not _size_reason(layout.cost, usable_gib(self.given))


def words_of(config: TrainConfig, given: TrainConfig) -> tuple[str, ...]:
    """The words of a command line that choose this layout, beside what is ``given``."""
    mesh = config.mesh
    others = []
    if config.bucketing.name != given.bucketing.name:
        others.append(f"bucketing={config.bucketing.name}")
    if config.bucketing.size_mib != given.bucketing.size_mib:
        others.append(f"bucketing.size_mib={config.bucketing.size_mib}")
    return (
        f"strategy={config.strategy.name}",
        f"mesh.replicate={mesh.replicate}",
        f"mesh.shard={mesh.shard}",
        f"mesh.tensor={mesh.tensor}",
        f"activation_checkpointing={config.activation_checkpointing.name}",
        f"train.micro_batch_size={config.train.micro_batch_size}",
        *others,
    )


def layouts_of(
    config: TrainConfig, costs: JobCosts, fixed: Collection[str]
) -> Iterator[TrainConfig]:
    """All that may be tried; some of them cannot run."""
    world = costs.topology.world_size
    on_host = max(map(len, costs.topology.ranks_by_host.values()))
    for tensor in _sizes(config, costs, fixed, on_host):
        if world % tensor:
            continue
        data_axes = list(_data_axes(config, fixed, world // tensor))
        micros: set[int] = set()
        for _, replicate, shard in data_axes:
            micros.update(_micro_batches(config, fixed, replicate * shard))
        costs.peaks.smallest, costs.peaks.largest = min(micros), max(micros)
        for strategy, replicate, shard in data_axes:
            mesh = MeshConfig(replicate, shard, tensor, config.mesh.allow_cross_node)
            for name in _choices("activation_checkpointing", fixed, RECOMPUTED):
                for micro in _micro_batches(config, fixed, replicate * shard):
                    yield _changed(config, strategy, mesh, name, micro)


def _changed(
    config: TrainConfig, strategy: str | None, mesh: MeshConfig, recomputed: str | None, micro: int
) -> TrainConfig:
    """``config`` in another layout; None: as it is."""
    chosen = config.strategy
    if strategy is not None:
        chosen = STRATEGIES[strategy]
    checkpointing = config.activation_checkpointing
    if recomputed is not None:
        # Other keys of the section, such as its blocks, stay as they are given.
        checkpointing = dataclasses.replace(checkpointing, name=recomputed)
    return dataclasses.replace(
        config,
        strategy=chosen,
        mesh=mesh,
        activation_checkpointing=checkpointing,
        train=dataclasses.replace(config.train, micro_batch_size=micro),
    )


def _choices(key: str, fixed: Collection[str], names: Sequence[str]) -> Sequence[str | None]:
    """``names``, or None alone where the key is fixed."""
    return (None,) if key in fixed else names


def _sizes(config: TrainConfig, costs: JobCosts, fixed: Collection[str], on_host: int) -> list[int]:
    """Of the tensor axis: those that fit into a host."""
    if "mesh.tensor" in fixed:
        return [1 if config.mesh.tensor == "auto" else int(config.mesh.tensor)]
    if costs.parts.tensor_plan is None:
        return [1]
    return _divisors(on_host)


def _data_axes(
    config: TrainConfig, fixed: Collection[str], ranks: int
) -> Iterator[tuple[str | None, int, int]]:
    """(strategy, replicate, shard) that fill ``ranks``; a strategy with one axis has no second."""
    for name in _choices("strategy", fixed, tuple(STRATEGIES)):
        strategy = STRATEGIES[name] if name else config.strategy
        for shard in _divisors(ranks):
            replicate = ranks // shard
            if not _has_axes(strategy, replicate, shard):
                continue
            # With one rank on an axis a hybrid is one of the others.
            is_hybrid = strategy.shards and strategy.replicates
            if name and is_hybrid and 1 in (shard, replicate):
                continue
            if _is_asked(config.mesh, fixed, replicate, shard):
                yield name, replicate, shard


def _has_axes(strategy: StrategyConfig, replicate: int, shard: int) -> bool:
    """Whether ``strategy`` uses each axis that has more than one rank."""
    if shard > 1 and not strategy.shards:
        return False
    return replicate == 1 or strategy.replicates


def _is_asked(mesh: MeshConfig, fixed: Collection[str], replicate: int, shard: int) -> bool:
    """Whether both sizes are those that are given, where they are."""
    for axis, size in zip(AXES, (replicate, shard), strict=False):
        given = getattr(mesh, axis)
        if f"mesh.{axis}" in fixed and given not in ("auto", size):
            return False
    return True


def _micro_batches(config: TrainConfig, fixed: Collection[str], data_ranks: int) -> list[int]:
    """Sizes that divide a rank's share: powers of two, and the whole share. What does not divide is
    left to be refused."""
    given = config.train.micro_batch_size
    if "train.micro_batch_size" in fixed and given != "auto":
        return [int(given)]
    share = max(1, config.train.global_batch_size // data_ranks)
    return [size for size in _divisors(share) if size & (size - 1) == 0 or size == share]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _first_that_fits(
    config: TrainConfig, candidates: _Candidates, ranked: list[RankedLayout]
) -> SearchResult:
    costs = candidates.costs
    memory = usable_gib(config)
    checked: list[RankedLayout] = []
    traced = 0
    for number, layout in enumerate(ranked):
        # A variant that gains too little is not worth another look.
        if not layout.reason:
            layout = _with_size(layout, costs, memory)
        if not layout.reason and config.plan.verify:
            if traced == _MOST_TRACED:
                raise ConfigError(
                    f"none of the {traced} fastest layouts fits by its peak; fix more of the "
                    "layout, such as activation_checkpointing=full"
                )
            traced += 1
            cost = costs.traced(layout.config, layout.cost)
            layout = dataclasses.replace(layout, cost=cost, reason=_size_reason(cost, memory))
        if not layout.reason:
            slower = [_as_slower(layout, other, costs, memory) for other in ranked[number + 1 :]]
            return SearchResult(
                layout,
                (*checked, layout, *slower),
                len(candidates.refusals),
                traced,
                tuple(candidates.refusals),
            )
        checked.append(layout)
    least = min(checked, key=lambda layout: layout.cost.needed)
    raise ConfigError(
        f"no layout fits: the smallest of {len(checked)}, {' '.join(least.words)}, {least.reason}; "
        "take more nodes"
    )


def _with_size(layout: RankedLayout, costs: JobCosts, memory_gib: float | None) -> RankedLayout:
    """``layout`` with its peak, and the reason if it does not fit."""
    reason = _size_reason(layout.cost, memory_gib)
    cost = layout.cost
    if not reason and cost.predicted == NOT_COMPUTED:
        cost = costs.with_peak(layout.config, cost)
        reason = _size_reason(cost, memory_gib)
    return dataclasses.replace(layout, cost=cost, reason=reason)


def of_device(size: int, memory_gib: float) -> str:
    """Bytes of those that a layout may fill, in GiB, or in MiB where they are less than one."""
    if memory_gib < 1:
        return f"{size / 2**20:.2f} of {memory_gib * 1024:.2f} MiB"
    return f"{size / _GIB:.1f} of {memory_gib:.1f} GiB"


def _size_reason(cost: LayoutCost, memory_gib: float | None) -> str:
    """Empty where nothing is known against it."""
    if memory_gib is None or cost.needed <= memory_gib * _GIB:
        return ""
    reason = f"does not fit: {of_device(cost.needed, memory_gib)}"
    return reason if cost.has_peak else f"{reason} without activations"


def _as_slower(
    chosen: RankedLayout, other: RankedLayout, costs: JobCosts, memory_gib: float | None
) -> RankedLayout:
    reason = other.reason or _size_reason(other.cost, memory_gib)
    if reason:
        return dataclasses.replace(other, reason=reason)
    time = other.cost.time
    assert isinstance(time, StepEstimate)
    seconds = time.seconds
    reason = f"{other.seconds / chosen.seconds:.2f} times as long"
    waits = {"tensor": seconds.tensor, "shard": seconds.shard, "replicate": seconds.replicate}
    axis = max(waits, key=lambda name: waits[name])
    if waits[axis] > 0.05 * seconds.total:
        where = "inside" if costs.is_inside(other.cost, axis) else "between"
        share = waits[axis] / seconds.total
        reason += f": {where}-node bound, {share:.0%} exposed on the {axis} axis"
    elif other.config.activation_checkpointing.name == "full":
        reason += ": computes forward again"
    return dataclasses.replace(other, reason=reason)

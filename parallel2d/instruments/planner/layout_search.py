"""Searches the layout that trains fastest and fits: `search`.

All layouts are ranked by their step time, and the fastest one whose predicted peak fits is chosen;
with ``plan.verify=true`` its peak is traced too.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from parallel2d.base.config import AXES, MeshConfig, TrainConfig
from parallel2d.base.config.checks import validated
from parallel2d.base.config.parallel import (
    STRATEGIES,
    ActivationCheckpointingConfig,
    StrategyConfig,
)
from parallel2d.base.errors import ConfigError
from parallel2d.instruments.planner.layout_cost import JobCosts, LayoutCost, excess
from parallel2d.parallel.cost.step_time import StepEstimate

_RECOMPUTED = ("none", "selective", "full")  # the one that needs most memory first


class NoLayoutError(ConfigError):
    """No layout can run or fits."""


@dataclass(frozen=True)
class RankedLayout:
    """One layout. ``reason``: why it is not the chosen one; empty for the chosen one."""

    config: TrainConfig
    words: tuple[str, ...]
    cost: LayoutCost
    time: StepEstimate
    reason: str = ""


@dataclass(frozen=True)
class SearchResult:
    """``ranked``: the fastest first, `chosen` among them. ``refusals``: the words of those that
    cannot run, and why."""

    chosen: RankedLayout
    ranked: tuple[RankedLayout, ...]
    refusals: tuple[tuple[tuple[str, ...], str], ...]


def search(
    config: TrainConfig, fixed: Collection[str], costs: JobCosts | None = None
) -> SearchResult:
    """The layouts of ``config`` that differ in strategy, mesh, recomputation and micro-batch, but
    for keys that are ``fixed``: ``strategy``, ``mesh.AXIS``, ``activation_checkpointing``,
    ``train.micro_batch_size``. ``costs``: of the same job, with what was computed already.

    Raises `ConfigError` where none can run or fit, where step times are not known, and with a cost
    that cannot be traced.
    """
    costs = costs or JobCosts(config)
    ranked: list[RankedLayout] = []
    refusals: list[tuple[tuple[str, ...], str]] = []
    for layout in _layouts_of(config, costs, fixed):
        try:
            cost = costs.cost(validated(layout))
        except ConfigError as error:
            refusals.append((words_of(layout), str(error)))
            continue
        if isinstance(cost.time, str):
            raise ConfigError(
                f"layouts cannot be ranked: {cost.time}; plan.dry_run=true plans the one that is "
                "given"
            )
        ranked.append(RankedLayout(layout, words_of(layout), cost, cost.time))
    if not ranked:
        raise NoLayoutError(f"no layout can run; the first one: {refusals[0][1]}")
    ranked.sort(key=_order)
    too_large: list[RankedLayout] = []
    for number, candidate in enumerate(ranked):
        candidate = _with_peak(candidate, costs)
        if not candidate.reason:
            slower = [_as_slower(candidate, other, costs) for other in ranked[number + 1 :]]
            return SearchResult(candidate, (*too_large, candidate, *slower), tuple(refusals))
        too_large.append(candidate)
    least = min(too_large, key=lambda layout: layout.cost.needed)
    raise NoLayoutError(
        f"no layout fits: the smallest of {len(ranked)}, {' '.join(least.words)}, {least.reason}; "
        "take more nodes"
    )


def _order(layout: RankedLayout) -> tuple[float, int]:
    """Of equally fast ones the one with fewer and larger micro-batches comes first, then the one
    that is listed first: the plainest."""
    return float(f"{layout.time.seconds.total:.6g}"), layout.cost.layout.workload.accumulation


def _with_peak(layout: RankedLayout, costs: JobCosts) -> RankedLayout:
    """``layout`` with its peak, and the reason if it does not fit."""
    config, cost = layout.config, layout.cost
    # What is too large without activations needs no peak.
    if excess(config, cost) is None:
        cost = costs.with_peak(config, cost)
        if excess(config, cost) is None and config.plan.verify:
            cost = costs.traced(config, cost)
    return dataclasses.replace(layout, cost=cost, reason=_size_reason(config, cost))


def _size_reason(config: TrainConfig, cost: LayoutCost) -> str:
    """Empty where nothing is known against it."""
    much = excess(config, cost)
    if much is None:
        return ""
    return f"does not fit: {much}" if cost.has_peak else f"does not fit: {much} without activations"


def _as_slower(chosen: RankedLayout, other: RankedLayout, costs: JobCosts) -> RankedLayout:
    cost = costs.with_peak(other.config, other.cost, measures=False)
    reason = _size_reason(other.config, cost)
    if not reason:
        seconds = other.time.seconds
        reason = f"{seconds.total / chosen.time.seconds.total:.2f} times as long"
        axis = max(AXES, key=lambda name: getattr(seconds, name))
        share = getattr(seconds, axis) / seconds.total
        if share > 0.05:
            where = "inside" if other.cost.places[axis].is_inside else "between"
            reason += f": {where}-node bound, {share:.0%} exposed on the {axis} axis"
        elif other.config.activation_checkpointing.name == "full":
            reason += ": computes forward again"
    return dataclasses.replace(other, cost=cost, reason=reason)


# What is tried


def _layouts_of(
    config: TrainConfig, costs: JobCosts, fixed: Collection[str]
) -> Iterator[TrainConfig]:
    """All that may be tried; some of them cannot run."""
    world = costs.topology.world_size
    for tensor in _tensor_sizes(config, costs, fixed):
        if world % tensor:
            continue
        for strategy, replicate, shard in _data_axes(config, fixed, world // tensor):
            mesh = MeshConfig(replicate, shard, tensor, config.mesh.allow_cross_node)
            for checkpointing in _recomputations(config, fixed):
                for micro in _micro_batches(config, fixed, replicate * shard):
                    yield dataclasses.replace(
                        config,
                        strategy=strategy,
                        mesh=mesh,
                        activation_checkpointing=checkpointing,
                        train=dataclasses.replace(config.train, micro_batch_size=micro),
                    )


def _tensor_sizes(config: TrainConfig, costs: JobCosts, fixed: Collection[str]) -> list[int]:
    """Those that fit into a host."""
    if "mesh.tensor" in fixed:
        return [1 if config.mesh.tensor == "auto" else int(config.mesh.tensor)]
    if costs.parts.tensor_plan is None:
        return [1]
    return _divisors(max(map(len, costs.topology.ranks_by_host.values())))


def _data_axes(
    config: TrainConfig, fixed: Collection[str], ranks: int
) -> Iterator[tuple[StrategyConfig, int, int]]:
    """(strategy, replicate, shard) that fill ``ranks``; a strategy with one axis has no second."""
    strategies = [config.strategy] if "strategy" in fixed else STRATEGIES.values()
    for strategy in strategies:
        for shard in _divisors(ranks):
            replicate = ranks // shard
            # With one rank on an axis a hybrid that nobody asked for is one of the others.
            is_hybrid = strategy.shards and strategy.replicates
            if is_hybrid and "strategy" not in fixed and 1 in (shard, replicate):
                continue
            if not _has_axes(strategy, replicate, shard):
                continue
            if _is_asked(config.mesh, fixed, replicate, shard):
                yield strategy, replicate, shard


def _has_axes(strategy: StrategyConfig, replicate: int, shard: int) -> bool:
    """Whether ``strategy`` uses each axis that has more than one rank."""
    if shard > 1 and not strategy.shards:
        return False
    return replicate == 1 or strategy.replicates


def _is_asked(mesh: MeshConfig, fixed: Collection[str], replicate: int, shard: int) -> bool:
    """Whether both sizes are those that are given, where they are."""
    for axis, size in (("replicate", replicate), ("shard", shard)):
        if f"mesh.{axis}" in fixed and getattr(mesh, axis) not in ("auto", size):
            return False
    return True


def _recomputations(
    config: TrainConfig, fixed: Collection[str]
) -> Iterator[ActivationCheckpointingConfig]:
    given = config.activation_checkpointing
    if "activation_checkpointing" in fixed:
        yield given
        return
    # Other keys of the section, such as its blocks, stay as they are given.
    for name in _RECOMPUTED:
        yield dataclasses.replace(given, name=name)


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


# Words of a command line


def words_of(config: TrainConfig) -> tuple[str, ...]:
    """The words of a command line that choose this layout, beside what is given."""
    return (
        f"strategy={config.strategy.name}",
        *(f"mesh.{axis}={getattr(config.mesh, axis)}" for axis in AXES),
        f"activation_checkpointing={config.activation_checkpointing.name}",
        f"train.micro_batch_size={config.train.micro_batch_size}",
    )


def command_line(given: Sequence[str], chosen: RankedLayout) -> str:
    """The train command with the words that were given and the chosen layout."""
    replaced = set(map(_key_of, chosen.words))
    kept = []
    for word in given:
        key = _key_of(word)
        if key not in replaced and not key.startswith("plan."):
            kept.append(word)
    return shlex.join(["python", "-m", "parallel2d.train", *kept, *chosen.words])


def _key_of(word: str) -> str:
    """The key that a word of a command line sets; ``strategy.name`` is ``strategy``."""
    return word.lstrip("+").partition("=")[0].removesuffix(".name")


def fixed_keys(given: Sequence[str]) -> set[str]:
    """The keys that the search leaves as they are: those that are given, and not as ``auto``."""
    return {_key_of(word) for word in given if word.partition("=")[2] != "auto"}

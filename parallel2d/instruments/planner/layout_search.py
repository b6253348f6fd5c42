"""Searches for the fastest layout that fits into memory: `search`.

All layouts are sorted by their step time. The search chooses the fastest layout whose predicted
peak fits into memory. With ``plan.verify=true`` the traced peak of this layout must fit too.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from parallel2d.base.config import AXES, MeshConfig, TrainConfig
from parallel2d.base.config.checks import validated
from parallel2d.base.config.parallel import STRATEGIES, StrategyConfig
from parallel2d.base.errors import ConfigError
from parallel2d.instruments.planner.layout_cost import JobCosts, LayoutCost, excess
from parallel2d.parallel.cost.step_time import StepEstimate

_RECOMPUTED = ("none", "selective", "full")  # in decreasing order of memory


class NoLayoutError(ConfigError):
    """No layout can run, or none fits."""


@dataclass(frozen=True)
class RankedLayout:
    """One layout. ``reason``: why it was not chosen; empty for the chosen layout."""

    config: TrainConfig
    words: tuple[str, ...]
    cost: LayoutCost
    time: StepEstimate
    reason: str = ""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: ``ranked`` has the layouts, fastest first, and ``refusals`` the overrides
    and reasons of layouts that cannot run."""

    chosen: RankedLayout
    ranked: tuple[RankedLayout, ...]
    refusals: tuple[tuple[tuple[str, ...], str], ...]


def search(
    config: TrainConfig, fixed: Collection[str], costs: JobCosts | None = None
) -> SearchResult:
    """Search the strategies, meshes, recomputations and micro-batches for the job ``config``.

    Args:
        config: the job.
        fixed: keys that keep their values: ``strategy``, ``mesh.AXIS``,
            ``activation_checkpointing``, ``train.micro_batch_size``.
        costs: the `JobCosts` of the same job, with cached results.

    Raises:
        ConfigError: if no layout can run or fit, and if step times or peaks are not known.
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
    # Among equally fast layouts, those with fewer, larger micro-batches come first. If these are
    # equal too, the order of the candidates decides, in which simpler layouts come first.
    ranked.sort(key=lambda each: each.cost.layout.workload.accumulation)
    ranked.sort(key=lambda each: float(f"{each.time.seconds.total:.6g}"))
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


def _with_peak(layout: RankedLayout, costs: JobCosts, *, measures: bool = True) -> RankedLayout:
    """Return ``layout`` with its peak. If it does not fit, the result also has the reason.
    ``measures``: see `JobCosts.with_peak`; False also disables tracing."""
    config, cost = layout.config, layout.cost
    # If the states do not fit, the layout does not fit, and its peak is not computed.
    if not measures or excess(config, cost) is None:
        cost = costs.with_peak(config, cost, measures=measures)
    if measures and config.plan.verify and excess(config, cost) is None:
        cost = costs.traced(config, cost)
    much, reason = excess(config, cost), ""
    if much is not None:
        reason = f"does not fit: {much}"
        if not cost.has_peak:
            reason += " without activations"
    return dataclasses.replace(layout, cost=cost, reason=reason)


def _as_slower(chosen: RankedLayout, other: RankedLayout, costs: JobCosts) -> RankedLayout:
    other = _with_peak(other, costs, measures=False)
    if other.reason:
        return other
    seconds = other.time.seconds
    reason = f"{seconds.total / chosen.time.seconds.total:.2f} times as long"
    axis = max(AXES, key=lambda name: getattr(seconds, name))
    share = getattr(seconds, axis) / seconds.total
    if share > 0.05:
        where = "inside" if other.cost.places[axis].is_inside else "between"
        reason += f": {where}-node bound, {share:.0%} exposed on the {axis} axis"
    elif other.config.activation_checkpointing.name == "full":
        reason += ": computes forward again"
    return dataclasses.replace(other, reason=reason)


# Candidates


def _layouts_of(
    config: TrainConfig, costs: JobCosts, fixed: Collection[str]
) -> Iterator[TrainConfig]:
    """Yield all candidates; some of them cannot run."""
    recomputed = [config.activation_checkpointing]
    if "activation_checkpointing" not in fixed:
        # Other keys of the section, such as its blocks, keep their values.
        recomputed = [dataclasses.replace(recomputed[0], name=name) for name in _RECOMPUTED]
    for strategy, mesh in _meshes(config, costs, fixed):
        sizes = _micro_batches(config, fixed, int(mesh.replicate) * int(mesh.shard))
        for checkpointing, micro in itertools.product(recomputed, sizes):
            yield dataclasses.replace(
                config,
                strategy=strategy,
                mesh=mesh,
                activation_checkpointing=checkpointing,
                train=dataclasses.replace(config.train, micro_batch_size=micro),
            )


def _meshes(
    config: TrainConfig, costs: JobCosts, fixed: Collection[str]
) -> Iterator[tuple[StrategyConfig, MeshConfig]]:
    """Yield each pair of a strategy and a mesh that uses all ranks."""
    given, world = config.mesh, costs.topology.world_size
    # The sizes that the user has fixed
    asked = {}
    for axis in ("replicate", "shard"):
        if f"mesh.{axis}" in fixed and getattr(given, axis) != "auto":
            asked[axis] = getattr(given, axis)
    chosen = "strategy" in fixed
    strategies = [config.strategy] if chosen else list(STRATEGIES.values())
    context = 1 if given.context == "auto" else int(given.context)
    fitting = []
    for size in _tensor_sizes(given, costs, fixed):
        if world // context % size == 0:
            fitting.append(size)
    for tensor, strategy in itertools.product(fitting, strategies):
        ranks = world // (tensor * context)
        for shard in _divisors(ranks):
            mesh = MeshConfig(ranks // shard, shard, context, tensor, given.allow_cross_node)
            if asked.items() <= vars(mesh).items() and _suits(strategy, mesh, chosen):
                yield strategy, mesh


def _tensor_sizes(given: MeshConfig, costs: JobCosts, fixed: Collection[str]) -> list[int]:
    """Return the sizes of the tensor axis: the given size, or all sizes that fit into a host."""
    if "mesh.tensor" in fixed:
        return [1 if given.tensor == "auto" else int(given.tensor)]
    if costs.parts.tensor_plan is None:
        return [1]
    return _divisors(max(map(len, costs.topology.ranks_by_host.values())))


def _suits(strategy: StrategyConfig, mesh: MeshConfig, is_chosen: bool) -> bool:
    """True if ``strategy`` uses each axis with more than one rank. A hybrid strategy with one rank
    on an axis equals another strategy, and suits only if the user has chosen it."""
    if not strategy.placement.shards and mesh.context not in ("auto", 1):
        return False
    if strategy.placement.shards and strategy.placement.replicates:
        return is_chosen or 1 not in (mesh.shard, mesh.replicate)
    return (mesh.replicate if strategy.placement.shards else mesh.shard) == 1


def _micro_batches(config: TrainConfig, fixed: Collection[str], data_ranks: int) -> list[int]:
    """Return the candidates for the micro-batch size: the powers of two that divide the batch of a
    data rank, and the complete batch. A size that does not divide the batch would be refused."""
    given = config.train.micro_batch_size
    if "train.micro_batch_size" in fixed and given != "auto":
        return [int(given)]
    share = max(1, config.train.global_batch_size // data_ranks)
    # A power of two has one bit set.
    return [size for size in _divisors(share) if size.bit_count() == 1 or size == share]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


# Overrides of a command line


def words_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the overrides that select this layout if they are added to the user's overrides."""
    # The search does not choose the size of the context axis. This size is above 1 only if the user
    # has set it.
    axes = []
    for axis in AXES:
        if axis != "context" or config.mesh.context != 1:
            axes.append(axis)
    return (
        f"strategy={config.strategy.name}",
        *(f"mesh.{axis}={getattr(config.mesh, axis)}" for axis in axes),
        f"activation_checkpointing={config.activation_checkpointing.name}",
        f"train.micro_batch_size={config.train.micro_batch_size}",
    )


def command_line(given: Sequence[str], chosen: RankedLayout) -> str:
    """Return the train command with the given overrides and the chosen layout."""
    replaced = set(map(_key_of, chosen.words))
    kept = []
    for word in given:
        key = _key_of(word)
        if key not in replaced and not key.startswith("plan."):
            kept.append(word)
    return shlex.join(["python", "-m", "parallel2d.train", *kept, *chosen.words])


def _key_of(word: str) -> str:
    """Return the key that an override sets; ``strategy.name`` is ``strategy``."""
    return word.lstrip("+").partition("=")[0].removesuffix(".name")


def fixed_keys(given: Sequence[str]) -> set[str]:
    """Return the keys that the search does not change: the given keys, except for ``auto``."""
    return {_key_of(word) for word in given if not word.endswith("=auto")}

"""The best layout of several methods on more and more ranks: `scale`."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from parallel2d.config import AXES, SyncConfig, TrainConfig
from parallel2d.config.checks import validated
from parallel2d.config.parallel import STRATEGIES
from parallel2d.cost.step_estimate import StepEstimate
from parallel2d.errors import ConfigError
from parallel2d.mesh import crosses_hosts
from parallel2d.planner.layout_cost import JobCosts, LayoutCost
from parallel2d.planner.layout_search import RECOMPUTED, layouts_of, words_of
from parallel2d.planner.machines import usable_gib

FEWEST_RANKS, MOST_RANKS = 8, 16_384
_GIB = 2**30


@dataclass(frozen=True)
class ComparedMethod:
    """A strategy and a sync method. ``words``: that choose them on a command line."""

    name: str
    words: tuple[str, ...]
    strategy: str
    sync: SyncConfig


@dataclass(frozen=True)
class BestLayout:
    """The fastest layout of a method that fits. ``tokens_per_s``: of one rank, or images.
    ``between_hosts``: the share of the step that waits for links between hosts."""

    words: tuple[str, ...]
    cost: LayoutCost
    time: StepEstimate
    tokens_per_s: float
    between_hosts: float


@dataclass(frozen=True)
class ScalingPoint:
    """``best``: by the method's name; None where no layout of it can run or fits."""

    ranks: int
    nodes: int
    global_batch_size: int
    best: dict[str, BestLayout | None]


@dataclass(frozen=True)
class ScalingResult:
    """``points``: in the order of their ranks."""

    kind: str  # weak or strong
    methods: tuple[ComparedMethod, ...]
    points: tuple[ScalingPoint, ...]
    noun: str  # what a sample is counted in: tokens or images
    model: str
    parameters: int


def scale(config: TrainConfig, fixed: Collection[str]) -> ScalingResult:
    """Searches each method on 8 to 16,384 ranks, the nodes doubling. ``fixed``: as for `search`.

    Raises `ConfigError` for keys that belong to one number of ranks, for a batch that cannot grow
    with the ranks, where step times are not known, and where nothing can run at all.
    """
    _check_fixed(fixed)
    kind = config.plan.scaling
    assert kind is not None
    costs = JobCosts(config)
    costs.scales_tensor_axis = True
    methods = _methods(config)
    points = []
    for nodes in _numbers_of_nodes(costs):
        sized = _sized(config, costs, nodes)
        on_nodes = costs.on(sized)
        best = {}
        for method in methods:
            chosen = dataclasses.replace(
                sized, strategy=STRATEGIES[method.strategy], sync=method.sync
            )
            best[method.name] = _best(chosen, on_nodes, fixed)
        ranks = on_nodes.topology.world_size
        points.append(ScalingPoint(ranks, nodes, sized.train.global_batch_size, best))
    found = [best for point in points for best in point.best.values() if best is not None]
    if not found:
        raise ConfigError(
            f"plan.scaling={kind}: no layout can run and fit on {FEWEST_RANKS:,} to "
            f"{MOST_RANKS:,} ranks; plan.scaling=null says why for one number of ranks"
        )
    cost = found[0].cost
    return ScalingResult(
        kind,
        methods,
        tuple(points),
        cost.sample.noun,
        cost.model,
        cost.parameters,
    )


def _check_fixed(fixed: Collection[str]) -> None:
    problems = []
    for key, why in (
        ("strategy", "several strategies are compared"),
        ("mesh.replicate", "it differs with the number of ranks"),
        ("mesh.shard", "it differs with the number of ranks"),
    ):
        if key in fixed:
            problems.append(f"plan.scaling: omit {key}: {why}")
    if problems:
        raise ConfigError("\n".join(problems))


def _methods(config: TrainConfig) -> tuple[ComparedMethod, ...]:
    """Hybrid sharding, flat sharding and full copies with the sync method that is given, and hybrid
    sharding with two methods that send less."""
    found = []
    for strategy in ("hybrid", "zero3", "ddp"):
        found.append(ComparedMethod(strategy, (f"strategy={strategy}",), strategy, config.sync))
    for name, changes in (
        ("int8", {"name": "every_step", "wire": "int8"}),
        (
            "diloco int4",
            {"name": "diloco", "wire": "int4", "every": 30, "fragments": 6, "delay": 5},
        ),
    ):
        sync = dataclasses.replace(config.sync, **changes)
        validated(dataclasses.replace(config, strategy=STRATEGIES["hybrid"], sync=sync))
        words = ["strategy=hybrid"]
        for key, value in changes.items():
            words.append(f"sync={value}" if key == "name" else f"sync.{key}={value}")
        found.append(ComparedMethod(name, tuple(words), "hybrid", sync))
    return tuple(found)


def _numbers_of_nodes(costs: JobCosts) -> list[int]:
    per_node = costs.topology.world_size // len(costs.topology.ranks_by_host)
    nodes, found = 1, []
    while nodes * per_node <= MOST_RANKS:
        if nodes * per_node >= FEWEST_RANKS:
            found.append(nodes)
        nodes *= 2
    if not found:
        raise ConfigError(
            f"plan.scaling: cluster.ranks_per_node={per_node} is more than {MOST_RANKS:,} ranks"
        )
    return found


def _sized(config: TrainConfig, costs: JobCosts, nodes: int) -> TrainConfig:
    """``config`` on ``nodes``, with the global batch of that number."""
    cluster = dataclasses.replace(config.cluster, nodes=nodes)
    given = costs.topology.world_size
    ranks = given // len(costs.topology.ranks_by_host) * nodes
    batch = config.train.global_batch_size
    if config.plan.scaling == "weak":
        grown = Fraction(batch * ranks, given)
        if grown.denominator != 1:
            raise ConfigError(
                f"plan.scaling=weak: train.global_batch_size={batch} on {given:,} ranks is not a "
                f"whole number of samples on {ranks:,}; take a multiple of "
                f"{given // math.gcd(given, ranks)}"
            )
        batch = int(grown)
    train = dataclasses.replace(config.train, global_batch_size=batch)
    return dataclasses.replace(config, cluster=cluster, train=train)


class _Candidate(NamedTuple):
    config: TrainConfig
    cost: LayoutCost
    time: StepEstimate


def _candidates(
    config: TrainConfig, costs: JobCosts, fixed: Collection[str]
) -> Iterator[_Candidate]:
    """Each layout with the strategy and the recomputing of ``config``."""
    is_hybrid = config.strategy.shards and config.strategy.replicates
    for layout in layouts_of(config, costs, {*fixed, "strategy", "activation_checkpointing"}):
        # With one rank on an axis a hybrid is one of the others.
        if is_hybrid and 1 in (layout.mesh.replicate, layout.mesh.shard):
            continue
        candidate = _candidate(layout, costs)
        if candidate is not None:
            yield candidate


def _best(config: TrainConfig, costs: JobCosts, fixed: Collection[str]) -> BestLayout | None:
    gib = usable_gib(config)
    limit = math.inf if gib is None else gib * _GIB
    varies = "activation_checkpointing" not in fixed
    if varies:
        # What is recomputed makes no layout faster: more of it is tried where less does not fit.
        config = _recomputing(config, RECOMPUTED[0])
    # By seconds; the number tells equal ones apart.
    waiting: list[tuple[float, int, _Candidate]] = []
    count = 0
    for candidate in _candidates(config, costs, fixed):
        count += 1
        waiting.append((candidate.time.seconds.total, count, candidate))
    heapq.heapify(waiting)
    while waiting:
        _, _, candidate = heapq.heappop(waiting)
        if candidate.cost.needed <= limit:
            return _described(candidate, config)
        more = _recomputing_more(candidate.config) if varies else None
        other = _candidate(more, costs) if more is not None else None
        if other is not None:
            count += 1
            heapq.heappush(waiting, (other.time.seconds.total, count, other))
    return None


def _candidate(config: TrainConfig, costs: JobCosts) -> _Candidate | None:
    """None for a layout that cannot run."""
    try:
        cost = costs.cost(config)
    except ConfigError:
        return None
    if not isinstance(cost.time, StepEstimate):
        raise ConfigError(f"plan.scaling: step times are not known: {cost.time}")
    return _Candidate(config, cost, cost.time)


def _recomputing(config: TrainConfig, name: str) -> TrainConfig:
    # Other keys of the section stay as they are given.
    checkpointing = dataclasses.replace(config.activation_checkpointing, name=name)
    return dataclasses.replace(config, activation_checkpointing=checkpointing)


def _recomputing_more(config: TrainConfig) -> TrainConfig | None:
    place = RECOMPUTED.index(config.activation_checkpointing.name)
    if place + 1 == len(RECOMPUTED):
        return None
    return _recomputing(config, RECOMPUTED[place + 1])


def _described(candidate: _Candidate, given: TrainConfig) -> BestLayout:
    cost, time = candidate.cost, candidate.time
    ranks = cost.shape.place(cost.topology)
    waits = 0.0
    for dim, axis in enumerate(AXES):
        exposed = getattr(time.seconds, axis)
        if exposed and crosses_hosts(ranks, dim, cost.topology):
            waits += exposed
    rate = time.samples_per_s * cost.sample.targets_per_sample / cost.shape.world_size
    return BestLayout(
        words_of(candidate.config, given),
        cost,
        time,
        tokens_per_s=rate,
        between_hosts=waits / time.seconds.total,
    )

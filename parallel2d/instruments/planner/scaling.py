"""Best layouts of several strategies on an increasing number of ranks: `scale`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from parallel2d.base.config import AXES, TrainConfig
from parallel2d.base.config.parallel import STRATEGIES
from parallel2d.base.errors import ConfigError
from parallel2d.instruments.planner.layout_cost import JobCosts
from parallel2d.instruments.planner.layout_search import NoLayoutError, RankedLayout, search

FEWEST_RANKS, MOST_RANKS = 8, 16_384
COMPARED = ("hybrid", "zero3", "ddp")  # strategies


@dataclass(frozen=True)
class ScalingPoint:
    """One number of ranks. ``best``: strategy -> fastest layout that fits; None if no layout can
    run or fits."""

    ranks: int
    nodes: int
    global_batch_size: int
    best: dict[str, RankedLayout | None]


def samples_per_rank(layout: RankedLayout) -> float:
    """Return the throughput per rank: tokens or images per second."""
    per_sample = layout.cost.sample.targets_per_sample
    return layout.time.samples_per_s * per_sample / layout.cost.shape.world_size


def wait_between_hosts(layout: RankedLayout) -> float:
    """Return the share of the step that waits for links between hosts."""
    waits = 0.0
    for axis in AXES:
        if not layout.cost.places[axis].is_inside:
            waits += getattr(layout.time.seconds, axis)
    return waits / layout.time.seconds.total


def scale(config: TrainConfig, fixed: Collection[str]) -> list[ScalingPoint]:
    """Search the best layout of each strategy in `COMPARED` on 8 to 16,384 ranks; the number of
    nodes doubles. ``fixed``: see `search`. Raises `ConfigError` if a key is valid for only one
    number of ranks, if the batch cannot grow with the ranks, if step times are not known, or if no
    layout can run."""
    for key in ("strategy", "mesh.replicate", "mesh.shard"):
        if key in fixed:
            raise ConfigError(f"plan.scaling: omit {key}, which the table compares or varies")
    costs = JobCosts(config)
    points = []
    for nodes in _numbers_of_nodes(costs):
        sized = _sized(config, costs, nodes)
        on_nodes = costs.on(sized)
        best: dict[str, RankedLayout | None] = dict.fromkeys(COMPARED)
        for name in COMPARED:
            chosen = dataclasses.replace(sized, strategy=STRATEGIES[name])
            with contextlib.suppress(NoLayoutError):
                best[name] = search(chosen, {*fixed, "strategy"}, on_nodes).chosen
        ranks = on_nodes.topology.world_size
        points.append(ScalingPoint(ranks, nodes, sized.train.global_batch_size, best))
    if not any(layout for point in points for layout in point.best.values()):
        raise ConfigError(
            f"plan.scaling={config.plan.scaling}: no layout can run and fit on {FEWEST_RANKS:,} to "
            f"{MOST_RANKS:,} ranks; plan.scaling=null says why for one number of ranks"
        )
    return points


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
    cluster = dataclasses.replace(config.cluster, nodes=nodes)
    given = len(costs.topology.ranks_by_host)
    batch = Fraction(config.train.global_batch_size)
    if config.plan.scaling == "weak":
        batch *= Fraction(nodes, given)
        if batch.denominator != 1:
            raise ConfigError(
                f"plan.scaling=weak: train.global_batch_size={config.train.global_batch_size} on "
                f"{given} nodes is not a whole number of samples on {nodes}; take a multiple of "
                f"{given}"
            )
    train = dataclasses.replace(config.train, global_batch_size=int(batch))
    return dataclasses.replace(config, cluster=cluster, train=train)

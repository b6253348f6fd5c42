"""Sizes of the mesh axes and their placement on hosts, before a mesh exists.

`MeshSpec` has the requested sizes, `MeshShape` the resolved sizes. `check_placement` raises an
error if a shard, context or tensor group crosses hosts although it would fit inside one host.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from parallel2d.base.config.job import TrainConfig
from parallel2d.base.config.parallel import AXES, MeshConfig, StrategyConfig, named_strategy
from parallel2d.base.errors import ConfigError, counted
from parallel2d.base.files import is_count
from parallel2d.base.topology import Topology


@dataclass(frozen=True)
class MeshSpec:
    """Requested sizes of the axes. `resolve` replaces ``auto`` by numbers.

    For ``tensor`` and ``context``, ``auto`` is 1. The other ranks are divided over the data axes:
    ``ddp`` only replicates, ``zero2`` and ``zero3`` only shard. The hybrid strategies shard over
    the ranks of a host and replicate over hosts. If hosts have different numbers of ranks, the
    shard groups have their greatest common divisor. On a single host there are as few replicas as
    possible, but more than one.
    """

    replicate: int | str = "auto"
    shard: int | str = "auto"
    tensor: int | str = "auto"
    context: int | str = "auto"

    @classmethod
    def from_config(cls, config: MeshConfig) -> MeshSpec:
        return cls(**{axis: getattr(config, axis) for axis in AXES})

    def resolve(self, strategy: StrategyConfig | str, topology: Topology) -> MeshShape:
        """Return the sizes of all axes. Raises `ConfigError` for impossible sizes."""
        strategy = named_strategy(strategy)
        for axis in AXES:
            size = getattr(self, axis)
            if size != "auto" and (not is_count(size) or size == 0):
                raise ConfigError(
                    f"mesh.{axis}={size} must be a whole number of at least 1 or auto"
                )
        world = topology.world_size
        # Axes of ranks that share their data
        inner = MeshShape(1, 1, _size_or(self.tensor, 1), context=_size_or(self.context, 1))
        rest = world // inner.world_size
        if rest * inner.world_size != world:
            raise ConfigError(
                f"{inner.settings} does not divide {counted(world, 'rank')}; use sizes whose "
                f"product is {_divisors(world)}"
            )
        self.refuse_contradiction(strategy)
        replicate, shard, notes = self._resolve_data_axes(strategy, topology, inner)
        if replicate * shard != rest:
            pairs = []
            for n in range(1, rest + 1):
                if rest % n == 0:
                    pairs.append(f"{n} x {rest // n}")
            shown = MeshShape(replicate, shard, inner.tensor, context=inner.context).shown
            sizes = []
            for axis in shown:
                sizes.append(f"mesh.{axis}={getattr(self, axis)}")
            raise ConfigError(
                f"{' x '.join(sizes)} does not fill the {world} ranks: replicate x shard "
                f"must be {rest}, one of {', '.join(pairs)}"
            )
        return MeshShape(replicate, shard, inner.tensor, tuple(notes), inner.context)

    def resolve_elastic(
        self, strategy: StrategyConfig | str, topology: Topology, nodes: int
    ) -> MeshShape:
        """Resolve the sizes for an elastic job of at most ``nodes`` nodes.

        The requested sizes are for ``nodes`` nodes. With fewer nodes, a hybrid strategy has fewer
        shard groups of the same size, so that the model still fits.
        """
        strategy = named_strategy(strategy)
        sizes = list(map(len, topology.ranks_by_host.values()))
        # Assume that all nodes have the same number of ranks: the greatest common divisor.
        size = math.gcd(*sizes)
        if nodes * size == topology.world_size:
            return self.resolve(strategy, topology)
        expected = self.resolve(strategy, Topology.equal_hosts(nodes, size))
        is_hybrid = strategy.placement.replicates and strategy.placement.shards
        shard = expected.shard if is_hybrid else "auto"
        shape = replace(self, replicate="auto", shard=shard).resolve(strategy, topology)
        note = f"{len(sizes)} of {nodes} nodes are there: {shape}"
        return replace(shape, notes=(note,))

    def refuse_contradiction(self, strategy: StrategyConfig) -> None:
        """Raise `ConfigError` for an axis that ``strategy`` does not have."""
        for axis, size, has_axis, reason in (
            ("shard", self.shard, strategy.placement.shards, "keeps a full copy per rank"),
            ("replicate", self.replicate, strategy.placement.replicates, "shards over all ranks"),
        ):
            if not has_axis and size not in ("auto", 1):
                raise ConfigError(
                    f"strategy={strategy.name} {reason}, so mesh.{axis}={size} must be 1 or auto; "
                    "strategy=hybrid and hybrid_zero2 have both axes"
                )
        if not strategy.placement.shards and self.context not in ("auto", 1):
            raise ConfigError(
                f"strategy={strategy.name} keeps a full copy per rank, and mesh.context="
                f"{self.context} shards parameters over the ranks that share a sequence; choose "
                "strategy=zero3 or strategy=hybrid, or mesh.context=1"
            )

    def _resolve_data_axes(
        self, strategy: StrategyConfig, topology: Topology, inner: MeshShape
    ) -> tuple[int, int, list[str]]:
        """Return the sizes of replicate and shard, and notes on decisions.

        `resolve` checks their product.
        """
        rest = topology.world_size // inner.world_size
        if not strategy.placement.shards:
            return _size_or(self.replicate, rest), 1, []
        if not strategy.placement.replicates:
            return 1, _size_or(self.shard, rest), []
        if self.replicate == self.shard == "auto":
            return _sizes_from_hosts(topology, inner)
        shard = _size_or(self.shard, rest // _size_or(self.replicate, 1))
        return _size_or(self.replicate, rest // max(shard, 1)), shard, []


def resolve_mesh(config: TrainConfig, topology: Topology) -> MeshShape:
    """Return the sizes of the mesh axes for the ranks of ``topology``."""
    spec = MeshSpec.from_config(config.mesh)
    if config.launch.elastic:
        return spec.resolve_elastic(config.strategy, topology, config.launch.node_range[1])
    return spec.resolve(config.strategy, topology)


def _size_or(size: int | str, default: int) -> int:
    return default if size == "auto" else int(size)


def _sizes_from_hosts(topology: Topology, inner: MeshShape) -> tuple[int, int, list[str]]:
    """Shard inside hosts, replicate across; one host gets the fewest replicas above one."""
    rest = topology.world_size // inner.world_size
    sizes = list(map(len, topology.ranks_by_host.values()))
    if len(sizes) <= 1:
        # The smallest divisor above 1, excluding the number itself: a prime number has none.
        replicate = next((n for n in range(2, rest) if rest % n == 0), 1)
        shard = rest // replicate
        note = f"one host: its {rest} data ranks are split in {replicate} replicas of {shard}"
        if replicate == 1:
            note = f"one host with {counted(rest, 'data rank')}: a single replica"
        return replicate, shard, [note]
    # The largest group size that divides every host.
    inside = math.gcd(*sizes)
    if inside % inner.world_size:
        raise ConfigError(
            f"{inner.settings} does not divide the ranks of every host ({topology.describe()}); "
            "set mesh.shard and mesh.replicate yourself, or use sizes whose product is "
            f"{_divisors(inside)}"
        )
    shard = inside // inner.world_size
    notes = []
    if len(set(sizes)) > 1:
        notes.append(f"uneven hosts ({topology.describe()}): shard groups of {shard}")
    return rest // shard, shard, notes


@dataclass(frozen=True)
class MeshShape:
    """Resolved sizes of the axes. ``notes`` are decisions to log."""

    replicate: int
    shard: int
    tensor: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)
    context: int = 1

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int]) -> MeshShape:
        """Return the shape with these sizes by axis, 1 for an absent axis."""
        replicate, shard, context, tensor = (sizes.get(axis, 1) for axis in AXES)
        return cls(replicate, shard, tensor, context=context)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different data. Context and tensor ranks share their data."""
        return self.replicate * self.shard

    @property
    def sharding(self) -> MeshShape:
        """Shape of the mesh from `sharding_mesh`."""
        return MeshShape(self.replicate, self.shard * self.context, self.tensor, self.notes)

    @property
    def inner(self) -> MeshShape:
        """Shape of only the context and tensor axes, whose ranks share their data."""
        return MeshShape(1, 1, self.tensor, context=self.context)

    @property
    def shown(self) -> dict[str, int]:
        """`sizes` for records: without a context axis of one rank."""
        sizes = self.sizes
        if self.context == 1:
            del sizes["context"]
        return sizes

    def __str__(self) -> str:
        """Format as ``replicate 2 x shard 4 x tensor 1``."""
        return " x ".join(f"{axis} {size}" for axis, size in self.shown.items())

    @property
    def settings(self) -> str:
        """Settings of the axes with more than one rank, for messages."""
        return " x ".join(f"mesh.{axis}={size}" for axis, size in self.sizes.items() if size > 1)

    def place(self, topology: Topology) -> torch.Tensor:
        """Return the ranks as int64 [replicate, shard, context, tensor], host by host."""
        order = list(itertools.chain.from_iterable(topology.ranks_by_host.values()))
        return torch.tensor(order, dtype=torch.int64).reshape(tuple(self.sizes.values()))


def check_placement(ranks: torch.Tensor, topology: Topology, allow_cross_node: bool) -> list[str]:
    """Check that shard, context and tensor groups do not cross hosts if they fit inside one.

    Args:
        ranks: int64 [replicate, shard, context, tensor].
        topology: the host of each rank.
        allow_cross_node: True to warn instead of raising.

    Returns:
        Warnings for groups that are larger than any host, and for allowed crossings.

    Raises:
        ConfigError: a group crosses hosts although it fits inside one host.
    """
    sizes = list(map(len, topology.ranks_by_host.values()))
    largest = max(sizes)
    _, shard, context, tensor = ranks.shape
    warnings = []
    # ``needed`` includes the inner axes, which must be on the same host.
    for axis, size, needed in (
        ("tensor", tensor, tensor),
        ("context", context, context * tensor),
        ("shard", shard, shard * context * tensor),
    ):
        group = crossing_group(ranks, axis, topology)
        if group is None:
            continue
        hosts = Counter(topology.hosts[rank] for rank in group)
        where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        text = f"the {axis} group of ranks {group} crosses hosts ({where})"
        if needed <= largest and not allow_cross_node:
            raise ConfigError(
                f"mesh.{axis}={size}: {text}, although its {needed} ranks fit inside one host of "
                f"{largest} ({topology.describe()}). Every all-gather would use the slow link: "
                "expect up to 4 times the traffic between hosts. Choose mesh.shard x "
                f"{'mesh.context x ' * (context > 1)}mesh.tensor so that it divides the ranks of "
                f"every host ({_divisors(math.gcd(*sizes))}), or set mesh.allow_cross_node=true"
            )
        warnings.append(f"{text}: every all-gather uses the slow link")
    return warnings


def crossing_group(ranks: torch.Tensor, axis: str, topology: Topology) -> list[int] | None:
    """Return the ranks of the first group of ``axis`` on several hosts; None without such a group.

    ``ranks``: see `check_placement`.
    """
    for group in groups_along(ranks, axis).tolist():
        hosts = {topology.hosts[rank] for rank in group}
        if len(hosts) > 1:
            return list(group)
    return None


def groups_along(ranks: torch.Tensor, axis: str) -> torch.Tensor:
    """Return the groups of ``axis`` as int64 [groups, ranks of a group].

    Groups of ``shard`` include the context ranks, because parameters are sharded over both axes.
    ``ranks``: see `check_placement`.
    """
    if axis == "shard":
        return ranks.movedim(-1, 1).flatten(2).flatten(0, 1)
    dim = AXES.index(axis)
    return ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim])


def draw_mesh(ranks: torch.Tensor, topology: Topology) -> str:
    """Return the mesh as text: one line per replica, ranks grouped by tensor, hosts at the end.

    Long meshes are cut in the middle. ``ranks``: int64 [replicate, shard, context, tensor].
    """
    lines = []
    ranks = ranks.flatten(1, 2)
    # Ranks of one tensor group are in parentheses.
    form = "{}" if ranks.shape[-1] == 1 else "({})"
    for replica, row in enumerate(ranks.tolist()):
        groups = " ".join(form.format(" ".join(map(str, group))) for group in row)
        hosts = [topology.hosts[rank] for rank in itertools.chain.from_iterable(row)]
        # Each host once, in the order of the ranks, without its network namespace.
        names = dict.fromkeys(host.split("/")[0] for host in hosts)
        line = f"  replica {replica}  [{groups}]  on {', '.join(names)}"
        lines.append(line if len(line) <= 78 else f"{line[:75]}...")
    if len(lines) > 10:
        lines = [*lines[:5], f"  ... {len(lines) - 9} more replicas ...", *lines[-4:]]
    return "\n".join(lines)


def _divisors(number: int) -> str:
    """Return the divisors of ``number`` for messages: ``1, 2 or 4``."""
    *others, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(others)} or {last}" if others else last

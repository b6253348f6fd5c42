"""Builds the device mesh of a job: start at `build_mesh`.

`MeshSpec` holds the sizes that were asked for, `MeshShape` those that fit the ranks. A mesh that
puts a shard or tensor group on the slow link although it would fit inside a host is refused.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import math
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import AXES, MeshConfig, StrategyConfig, TrainConfig, named_strategy
from parallel2d.base.errors import ConfigError, counted
from parallel2d.base.files import is_count
from parallel2d.base.replicas import current
from parallel2d.base.runtime import release_groups
from parallel2d.base.topology import Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the axes; ``auto`` is resolved by `resolve` against a topology and a strategy.

    ``ddp``: replicate = all ranks / tensor. ``zero2``, ``zero3``: shard = all ranks / tensor.
    Hybrids: shard = the ranks of a node / tensor (the largest size that divides every host's, when
    hosts are uneven) and replicate = the rest; on a single host they split the ranks in two
    replicas, and where that is impossible (one rank, a prime number) replicate = 1.
    """

    replicate: int | str = "auto"
    shard: int | str = "auto"
    tensor: int | str = "auto"

    @classmethod
    def from_config(cls, config: MeshConfig) -> MeshSpec:
        return cls(config.replicate, config.shard, config.tensor)

    def resolve(self, strategy: StrategyConfig | str, topology: Topology) -> MeshShape:
        """All sizes, and notes on what was decided. Raises `ConfigError` for impossible ones."""
        strategy = named_strategy(strategy)
        for axis in AXES:
            size = getattr(self, axis)
            if size != "auto" and (not is_count(size) or size == 0):
                raise ConfigError(
                    f"mesh.{axis}={size} must be a whole number of at least 1 or auto"
                )
        world = topology.world_size
        tensor = _size_or(self.tensor, 1)
        if world % tensor:
            raise ConfigError(
                f"mesh.tensor={tensor} does not divide {counted(world, 'rank')}; use "
                f"{_divisors(world)}"
            )
        self.refuse_contradiction(strategy)
        rest = world // tensor
        replicate, shard, notes = self._resolve_data_axes(strategy, topology, tensor)
        if replicate * shard != rest:
            pairs = [f"{n} x {rest // n}" for n in range(1, rest + 1) if rest % n == 0]
            raise ConfigError(
                f"mesh.replicate={self.replicate} x mesh.shard={self.shard} x "
                f"mesh.tensor={self.tensor} does not fill the {world} ranks: replicate x shard "
                f"must be {rest}, one of {', '.join(pairs)}"
            )
        return MeshShape(replicate, shard, tensor, tuple(notes))

    def resolve_elastic(
        self, strategy: StrategyConfig | str, topology: Topology, nodes: int
    ) -> MeshShape:
        """As `resolve`, for a job whose nodes come and go, at most ``nodes``: given sizes are those
        with all nodes there. With fewer, the shard groups of a hybrid stay as large as they were,
        since a model that fits must go on fitting, and there are fewer of them.
        """
        strategy = named_strategy(strategy)
        sizes = [len(ranks) for ranks in topology.ranks_by_host.values()]
        # All nodes are taken to be of one size, which divides those of the nodes that are there.
        expected = self.resolve(strategy, Topology.equal_hosts(nodes, math.gcd(*sizes)))
        if expected.world_size == topology.world_size:
            return self.resolve(strategy, topology)
        is_hybrid = strategy.replicates and strategy.shards
        shard = expected.shard if is_hybrid else "auto"
        shape = MeshSpec("auto", shard, self.tensor).resolve(strategy, topology)
        note = (
            f"{len(sizes)} of {nodes} nodes are there: replicate {shape.replicate} x shard "
            f"{shape.shard} x tensor {shape.tensor}"
        )
        return replace(shape, notes=(note,))

    def refuse_contradiction(self, strategy: StrategyConfig) -> None:
        """Raises `ConfigError` for an axis that ``strategy`` does not have."""
        for axis, size, has_axis, reason in (
            ("shard", self.shard, strategy.shards, "keeps a full copy per rank"),
            ("replicate", self.replicate, strategy.replicates, "shards over all ranks"),
        ):
            if not has_axis and size not in ("auto", 1):
                raise ConfigError(
                    f"strategy={strategy.name} {reason}, so mesh.{axis}={size} must be 1 or auto; "
                    f"did you mean strategy={strategy.with_both_axes}?"
                )

    def _resolve_data_axes(
        self, strategy: StrategyConfig, topology: Topology, tensor: int
    ) -> tuple[int, int, list[str]]:
        """Sizes of replicate and shard, whose product may be wrong, and notes about decisions."""
        rest = topology.world_size // tensor
        if not strategy.shards:
            return _size_or(self.replicate, rest), 1, []
        if not strategy.replicates:
            return 1, _size_or(self.shard, rest), []
        sizes = {"replicate": self.replicate, "shard": self.shard}
        given = {axis: int(size) for axis, size in sizes.items() if size != "auto"}
        for axis, size in given.items():
            if rest % size:
                left = "" if tensor == 1 else f" that mesh.tensor={tensor} leaves"
                raise ConfigError(
                    f"mesh.{axis}={size} does not divide {counted(rest, 'rank')}{left}; use "
                    f"{_divisors(rest)}"
                )
        if not given:
            return _sizes_from_hosts(topology, tensor)
        # Two given sizes may contradict each other: `resolve` checks the product.
        shard = given.get("shard", rest // given.get("replicate", 1))
        return given.get("replicate", rest // shard), shard, []


def resolve_mesh(config: TrainConfig, topology: Topology) -> MeshShape:
    """The sizes of the mesh axes on the machines that are there."""
    spec = MeshSpec.from_config(config.mesh)
    if config.launch.elastic:
        return spec.resolve_elastic(config.strategy, topology, config.launch.node_range[1])
    return spec.resolve(config.strategy, topology)


def _size_or(size: int | str, default: int) -> int:
    return default if size == "auto" else int(size)


def _sizes_from_hosts(topology: Topology, tensor: int) -> tuple[int, int, list[str]]:
    """Shards inside hosts, replicates across; a single host has the fewest replicas above one."""
    rest = topology.world_size // tensor
    sizes = [len(ranks) for ranks in topology.ranks_by_host.values()]
    if len(sizes) <= 1:
        # The smallest divisor above 1; there is none for one rank and for a prime number of them.
        replicate = next((n for n in range(2, rest) if rest % n == 0), 1)
        shard = rest // replicate
        note = f"one host: its {rest} data ranks are split in {replicate} replicas of {shard}"
        if replicate == 1:
            note = f"one host with {counted(rest, 'data rank')}: a single replica"
        return replicate, shard, [note]
    # The largest group that fits a whole number of times into every host.
    inside = math.gcd(*sizes)
    if inside % tensor:
        raise ConfigError(
            f"mesh.tensor={tensor} does not divide the ranks of every host "
            f"({topology.describe()}); set mesh.shard and mesh.replicate yourself, or use "
            f"mesh.tensor={_divisors(inside)}"
        )
    shard = inside // tensor
    notes = []
    if len(set(sizes)) > 1:
        notes.append(f"uneven hosts ({topology.describe()}): shard groups of {shard}")
    return rest // shard, shard, notes


@dataclass(frozen=True)
class MeshShape:
    """Resolved axis sizes. ``notes``: decisions that the user should read in the log."""

    replicate: int
    shard: int
    tensor: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data: tensor ranks of one data rank see the same."""
        return self.replicate * self.shard

    def spec(self) -> MeshSpec:
        """The sizes as given ones."""
        return MeshSpec(self.replicate, self.shard, self.tensor)

    def place(self, topology: Topology) -> torch.Tensor:
        """int64 [replicate, shard, tensor] of ranks, hosts kept together whatever their order."""
        order = list(itertools.chain.from_iterable(topology.ranks_by_host.values()))
        sizes = (self.replicate, self.shard, self.tensor)
        return torch.tensor(order, dtype=torch.int64).reshape(sizes)


def check_placement(ranks: torch.Tensor, topology: Topology, allow_cross_node: bool) -> list[str]:
    """Refuses shard and tensor groups that cross hosts although they would fit inside one.

    ``ranks``: int64 [replicate, shard, tensor]. Returns warnings for groups that cross because they
    are larger than any host, and for those that were allowed to. Otherwise raises `ConfigError`.
    """
    sizes = [len(members) for members in topology.ranks_by_host.values()]
    largest = max(sizes)
    _, shard, tensor = ranks.shape
    warnings = []
    # A shard group fits inside a host only if the tensor groups of all its ranks do.
    for axis, dim, size, needed in (
        ("tensor", 2, tensor, tensor),
        ("shard", 1, shard, shard * tensor),
    ):
        group = _first_crossing(ranks, dim, topology)
        if group is None:
            continue
        hosts = Counter(topology.hosts[rank] for rank in group)
        where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        text = f"the {axis} group of ranks {group} crosses hosts ({where})"
        if needed <= largest and not allow_cross_node:
            raise ConfigError(
                f"mesh.{axis}={size}: {text}, although its {needed} ranks fit inside one host of "
                f"{largest} ({topology.describe()}). Every all-gather would use the slow link: "
                "expect up to 4 times the traffic between hosts. Choose mesh.shard x mesh.tensor "
                f"so that it divides the ranks of every host ({_divisors(math.gcd(*sizes))}), or "
                "set mesh.allow_cross_node=true"
            )
        warnings.append(f"{text}: every all-gather uses the slow link")
    return warnings


def _first_crossing(ranks: torch.Tensor, dim: int, topology: Topology) -> list[int] | None:
    """The ranks of the first group along ``dim`` that is on several hosts, or None."""
    groups = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim])
    for group in groups.tolist():
        hosts = {topology.hosts[rank] for rank in group}
        if len(hosts) > 1:
            return list(group)
    return None


def crosses_hosts(ranks: torch.Tensor, dim: int, topology: Topology) -> bool:
    """Whether a group along ``dim`` of ``ranks``, as in `check_placement`, is on several hosts."""
    return _first_crossing(ranks, dim, topology) is not None


def build_mesh(
    spec: MeshSpec | MeshConfig | None = None,
    strategy: StrategyConfig | str = "hybrid",
    *,
    topology: Topology | None = None,
    allow_cross_node: bool = False,
    device_type: str | None = None,
) -> DeviceMesh:
    """The job's `DeviceMesh`: axes ``replicate``, ``shard`` and, when larger than one, ``tensor``.

    Collective, after ``init_process_group``. Without ``topology`` the ranks are asked for it.

    Raises `ConfigError` for sizes that do not fill the world or that put a group on the slow link
    by accident, and for another strategy than those of `config.STRATEGIES`.
    """
    if not isinstance(spec, MeshSpec | MeshConfig | None):
        raise ConfigError(
            f"build_mesh({spec!r}, ...): the first argument is a MeshSpec, such as "
            "MeshSpec(replicate=2, shard=4)"
        )
    strategy = named_strategy(strategy)
    if isinstance(spec, MeshConfig):
        allow_cross_node = allow_cross_node or spec.allow_cross_node
        spec = MeshSpec.from_config(spec)
    spec = spec or MeshSpec()
    topology = topology or Topology.gather()
    shape = spec.resolve(strategy, topology)
    ranks = shape.place(topology)
    for line in [*shape.notes, *check_placement(ranks, topology, allow_cross_node)]:
        if dist.get_rank() == 0:
            log.info("%s", line)
    names: tuple[str, ...] = AXES
    if shape.tensor == 1:
        names = AXES[:2]
        ranks = ranks[..., 0]
    found = torch.accelerator.current_accelerator(check_available=True)
    device_type = device_type or (found.type if found else "cpu")
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    for axis in range(mesh.ndim):
        inherit_timeout(mesh.get_group(axis), mesh.device_type)
    _release_groups_at_exit()
    return mesh


@functools.cache
def _release_groups_at_exit() -> None:
    """A thread of gloo that frees a tensor while Python ends kills the process with SIGABRT, after
    all of its work. So groups that were destroyed end their threads before."""
    atexit.register(release_groups)


def inherit_timeout(group: dist.ProcessGroup, device_type: str) -> None:
    """Gives ``group`` the timeout of the world's group; torch gives new groups its own default."""
    if current() is not None:
        return  # all groups of that world have one
    default = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    # torch's fake backend has no options: it never waits.
    options = getattr(default, "options", None)
    if options is not None:
        dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def has_cpu_backend() -> bool:
    """Whether the default process group can send CPU tensors."""
    return torch.device("cpu") in dist.distributed_c10d._get_default_group()._device_types


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of the axes, outermost first; empty for a mesh that was made without names."""
    return mesh.mesh_dim_names or ()


def axis_positions(mesh: DeviceMesh) -> dict[str, int]:
    """This rank's position along each named axis, outermost first."""
    # torch gives None for a rank outside of the mesh.
    return dict(zip(axis_names(mesh), mesh.get_coordinate() or (), strict=True))


def mesh_shape(mesh: DeviceMesh) -> MeshShape:
    """The sizes of a mesh, 1 of an absent axis. Raises `ConfigError` for other names than ours."""
    names = axis_names(mesh)
    in_order = sorted(set(AXES).intersection(names), key=AXES.index)
    if not names or list(names) != in_order:
        raise ConfigError(
            f"the mesh must name its axes {', '.join(AXES)} in this order, got {names}"
        )
    # mesh[name].size() would make a mesh for every axis, a millisecond each.
    sizes = dict(zip(names, mesh.shape, strict=True))
    return MeshShape(sizes.get("replicate", 1), sizes.get("shard", 1), sizes.get("tensor", 1))


def sum_over_data_ranks(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sums ``value`` (floating point) in place over the replicate and shard axes. Collective.

    Tensor ranks hold copies, not parts. When the mesh is the whole world, as it nearly always is,
    one all-reduce does and the copies are divided out.
    """
    shape = mesh_shape(mesh)
    if mesh.size() == dist.get_world_size():
        dist.all_reduce(value)
        # Every data rank was counted once per tensor rank.
        return value.div_(shape.tensor)
    for axis in ("shard", "replicate"):
        if getattr(shape, axis) > 1:
            dist.all_reduce(value, group=mesh.get_group(axis))
    return value


def without_replicas(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of this rank's replica: ``shard``, and ``tensor`` where the mesh has it."""
    names = tuple(axis for axis in axis_names(mesh) if axis != "replicate")
    return mesh[names]


def ranks_of(mesh: DeviceMesh) -> torch.Tensor:
    """int64 [replicate, shard, tensor] of the ranks of ``mesh``."""
    shape = mesh_shape(mesh)
    return mesh.mesh.reshape(shape.replicate, shape.shard, shape.tensor)


def route_in_replica(mesh: DeviceMesh) -> list[tuple[int, dist.ProcessGroup]]:
    """(source, group) of the broadcasts by which the first rank of a replica reaches this one: over
    the shard axis, then over the tensor axis."""
    own = ranks_of(mesh)[axis_positions(mesh).get("replicate", 0)]
    shard, tensor = (own == dist.get_rank()).nonzero()[0].tolist()
    route = []
    if tensor == 0 and len(own) > 1:
        route.append((int(own[0, 0]), mesh.get_group("shard")))
    if own.shape[1] > 1:
        route.append((int(own[shard, 0]), mesh.get_group("tensor")))
    return route


def data_coordinate(mesh: DeviceMesh) -> int:
    """This rank's number among the data ranks, equal for all tensor ranks of one data rank."""
    shape = mesh_shape(mesh)
    at = axis_positions(mesh)
    return at.get("replicate", 0) * shape.shard + at.get("shard", 0)


def draw_mesh(ranks: torch.Tensor, topology: Topology) -> str:
    """The mesh as text: one line per replica, ranks grouped by tensor, the host at the end.

    ``ranks``: int64 [replicate, shard, tensor]. Long meshes are cut in the middle.
    """
    lines = []
    # Ranks of one tensor group stand in parentheses.
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
    """For messages: ``1, 2 or 4``."""
    *others, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(others)} or {last}" if others else last

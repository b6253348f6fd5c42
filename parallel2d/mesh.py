"""Which ranks form which axis: `MeshSpec`, the found topology, `build_mesh`.

Sizes (numbers or ``auto``) and the hosts of all ranks flow in; a `DeviceMesh` with named axes
``replicate``, ``shard`` and, where it is larger than one, ``tensor`` flows out. Which ranks share a
host is asked of the ranks, never assumed from their order. A mesh that puts a shard or tensor group
on the slow link although it would fit inside a host is refused. Nothing here knows about models.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.config import ConfigError, MeshConfig, ParallelConfig
from parallel2d.exchange import all_gather

log = logging.getLogger(__name__)

AXES = ("replicate", "shard", "tensor")


def host_identity(override: str | None = None) -> str:
    """What two ranks share exactly when traffic between them stays inside one machine.

    Host name plus network namespace: containers and namespaces on one kernel count as different
    hosts, as their traffic does. The boot id would not do: namespaces share it.
    """
    if override is not None:
        return override
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:  # not Linux: the name alone
        namespace = 0
    return f"{socket.gethostname()}/{namespace}"


@dataclass(frozen=True)
class Topology:
    """``hosts[rank]`` is the identity of the host that rank runs on."""

    hosts: tuple[str, ...]

    @classmethod
    def gather(cls, host_id: str | None = None) -> Topology:
        """Asks every rank of the default process group. Collective: all ranks must call it."""
        return cls(tuple(all_gather(host_identity(host_id))))

    @classmethod
    def single_host(cls, world_size: int, host: str = "this host") -> Topology:
        """All ranks on one machine: what a launcher knows before it starts them."""
        return cls((host,) * world_size)

    @classmethod
    def equal_hosts(cls, hosts: int, ranks: int) -> Topology:
        """``hosts`` machines with ``ranks`` each: what a launcher on one of several nodes
        expects."""
        return cls(tuple(f"host {host}" for host in range(hosts) for _ in range(ranks)))

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """Host -> its ranks in ascending order; hosts in the order of their first rank."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return found

    def describe(self) -> str:
        """For messages: ``2 hosts with 4 ranks each`` or ``2 hosts with 4, 2 ranks``."""
        sizes = [len(ranks) for ranks in self.ranks_by_host.values()]
        if len(sizes) == 1:
            return f"1 host with {sizes[0]} rank{'s' if sizes[0] > 1 else ''}"
        if len(set(sizes)) == 1:
            return f"{len(sizes)} hosts with {sizes[0]} rank{'s' if sizes[0] > 1 else ''} each"
        return f"{len(sizes)} hosts with {', '.join(map(str, sizes))} ranks"


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

    def resolve(self, strategy: str, topology: Topology) -> MeshShape:
        """Numbers for every axis, and what was decided on the way. Raises `ConfigError` for any
        impossible size."""
        world = topology.world_size
        for axis in AXES:
            size = getattr(self, axis)
            if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ConfigError(
                    f"mesh.{axis}={size} must be a whole number of at least 1 or auto"
                )
        tensor = 1 if self.tensor == "auto" else int(self.tensor)
        if world % tensor:
            raise ConfigError(
                f"mesh.tensor={tensor} does not divide the {world} ranks; it may be "
                f"{_divisors(world)}"
            )
        rest = world // tensor
        self.refuse_contradiction(strategy)
        notes: list[str] = []
        replicate, shard = self._resolve_pair(strategy, topology, tensor, rest, notes)
        if replicate * shard != rest:
            raise ConfigError(
                f"mesh.replicate={self.replicate} x mesh.shard={self.shard} x "
                f"mesh.tensor={self.tensor} does not fill the "
                f"{world} ranks: replicate x shard must be {rest}, one of {_factor_pairs(rest)}"
            )
        return MeshShape(replicate, shard, tensor, tuple(notes))

    def resolve_elastic(self, strategy: str, topology: Topology, nodes: int) -> MeshShape:
        """As `resolve`, for a job whose nodes come and go, at most ``nodes``: given sizes are those
        with all nodes there. With fewer, the shard groups of a hybrid stay as large as they were,
        since a model that fits must go on fitting, and there are fewer of them.
        """
        sizes = [len(ranks) for ranks in topology.ranks_by_host.values()]
        expected = self.resolve(strategy, Topology.equal_hosts(nodes, math.gcd(*sizes)))
        if expected.world_size == topology.world_size:
            return self.resolve(strategy, topology)
        shard = expected.shard if strategy.startswith("hybrid") else "auto"
        shape = MeshSpec("auto", shard, self.tensor).resolve(strategy, topology)
        note = (
            f"{len(sizes)} of {nodes} nodes are there: replicate {shape.replicate} x shard "
            f"{shape.shard} x tensor {shape.tensor}"
        )
        return replace(shape, notes=(note,))

    def refuse_contradiction(self, strategy: str) -> None:
        """Raises `ConfigError` for an axis that ``strategy`` does not have."""
        if strategy == "ddp" and self.shard not in ("auto", 1):
            raise ConfigError(
                "strategy=ddp keeps a full copy per rank, so "
                f"mesh.shard={self.shard} must be 1 or auto; "
                "did you mean strategy=hybrid_zero2?"
            )
        if strategy in ("zero2", "zero3") and self.replicate not in ("auto", 1):
            raise ConfigError(
                f"strategy={strategy} shards over all ranks, so "
                f"mesh.replicate={self.replicate} must be 1 or "
                "auto; did you mean "
                f"strategy={'hybrid' if strategy == 'zero3' else 'hybrid_zero2'}?"
            )

    def _resolve_pair(
        self, strategy: str, topology: Topology, tensor: int, rest: int, notes: list[str]
    ) -> tuple[int, int]:
        if strategy == "ddp":
            return (rest if self.replicate == "auto" else int(self.replicate)), 1
        if strategy in ("zero2", "zero3"):
            return 1, (rest if self.shard == "auto" else int(self.shard))
        for given, other in (("replicate", "shard"), ("shard", "replicate")):
            size = getattr(self, given)
            if size != "auto" and rest % size:
                raise ConfigError(
                    f"mesh.{given}={size} does not divide the {rest} ranks that tensor={tensor} "
                    "leaves of "
                    f"{topology.world_size}; it may be {_divisors(rest)}"
                )
            if size != "auto" and getattr(self, other) == "auto":
                pair = {given: size, other: rest // size}
                return pair["replicate"], pair["shard"]
        if self.replicate != "auto":
            return int(self.replicate), int(self.shard)
        sizes = [len(ranks) for ranks in topology.ranks_by_host.values()]
        if len(sizes) > 1:
            inside = math.gcd(*sizes)
            if inside % tensor:
                raise ConfigError(
                    f"mesh.tensor={tensor} does not divide the ranks of every host "
                    f"({topology.describe()}); set mesh.shard "
                    f"and mesh.replicate yourself, or let tensor be one of {_divisors(inside)}"
                )
            if len(set(sizes)) > 1:
                notes.append(
                    f"uneven hosts ({topology.describe()}): shard groups of {inside // tensor}"
                )
            return rest // (inside // tensor), inside // tensor
        replicate = next((n for n in range(2, rest) if rest % n == 0), 1)
        if replicate > 1:
            notes.append(
                f"one host: its {rest} data ranks are split in {replicate} replicas of "
                f"{rest // replicate}"
            )
        else:
            notes.append(
                f"one host with {rest} data rank{'s' if rest > 1 else ''}: a single replica"
            )
        return replicate, rest // replicate


@dataclass(frozen=True)
class MeshShape:
    """Resolved axis sizes. ``notes``: decisions a person should hear about."""

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
        """int64 [replicate, shard, tensor] of ranks, hosts kept together whatever the order of the
        ranks."""
        order = [rank for ranks in topology.ranks_by_host.values() for rank in ranks]
        return torch.tensor(order, dtype=torch.int64).reshape(
            self.replicate, self.shard, self.tensor
        )


def check_placement(ranks: torch.Tensor, topology: Topology, allow_cross_node: bool) -> list[str]:
    """Refuses shard and tensor groups that cross hosts although they would fit inside one.

    ``ranks``: int64 [replicate, shard, tensor]. Returns warnings for groups that cross because they
    are larger than any host, and for those that were allowed to. Raises `ConfigError` with the
    numbers.
    """
    largest = max(len(members) for members in topology.ranks_by_host.values())
    crossing: list[tuple[str, int, list[int]]] = []
    for axis, dim in (("tensor", 2), ("shard", 1)):
        size = ranks.shape[dim]
        for group in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            if len({topology.hosts[rank] for rank in group}) > 1:
                crossing.append((axis, size, group))
                break
    warnings = []
    inner = ranks.shape[1] * ranks.shape[2]
    for axis, size, group in crossing:
        needed = size if axis == "tensor" else inner
        hosts = Counter(topology.hosts[rank] for rank in group)
        where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        text = f"the {axis} group of ranks {group} crosses hosts ({where})"
        if needed <= largest and not allow_cross_node:
            raise ConfigError(
                f"mesh.{axis}={size}: {text}, although its {needed} ranks fit inside one host of "
                f"{largest} "
                f"({topology.describe()}). Every all-gather would use the slow link: expect up to "
                "4 times the traffic between "
                "hosts. Choose mesh.shard x mesh.tensor so that it divides the ranks of every "
                "host "
                f"({_divisors(math.gcd(*(len(r) for r in topology.ranks_by_host.values())))}), or "
                "set "
                "mesh.allow_cross_node=true"
            )
        warnings.append(f"{text}: every all-gather uses the slow link")
    return warnings


def build_mesh(
    spec: MeshSpec | MeshConfig | None = None,
    strategy: str = "hybrid",
    *,
    topology: Topology | None = None,
    allow_cross_node: bool = False,
    device_type: str | None = None,
) -> DeviceMesh:
    """The `DeviceMesh` of this job, its axes named ``replicate``, ``shard`` and, when larger than
    one, ``tensor``.

    Collective: every rank calls it after ``init_process_group``. ``topology`` defaults to the one
        found by asking the ranks.
    Raises `ConfigError` for sizes that do not fill the world or that put a group on the slow link
    by accident, and for another strategy than those of `parallel2d.config.STRATEGIES`.
    """
    strategy = ParallelConfig(strategy).resolved().strategy.name
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
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device_type = device_type or (accelerator.type if accelerator else "cpu")
    names = AXES if shape.tensor > 1 else AXES[:2]
    mesh = DeviceMesh(
        device_type, ranks if shape.tensor > 1 else ranks[..., 0], mesh_dim_names=names
    )
    for axis in range(mesh.ndim):
        inherit_timeout(mesh.get_group(axis), mesh.device_type)
    return mesh


def inherit_timeout(group: dist.ProcessGroup, device_type: str) -> None:
    """Lets collectives on ``group`` time out like those of the world; torch gives new groups its
    own default."""
    default = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    options = getattr(default, "options", None)
    if options is not None:  # the fake backend never waits
        dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def has_cpu_backend() -> bool:
    """Whether the default process group can send CPU tensors."""
    return torch.device("cpu") in dist.distributed_c10d._get_default_group()._device_types


def mesh_shape(mesh: DeviceMesh) -> MeshShape:
    """The sizes of a mesh with our axis names; an absent axis has size 1. Raises `ConfigError` for
    other names."""
    names = mesh.mesh_dim_names or ()
    if (
        not names
        or any(name not in AXES for name in names)
        or list(names) != sorted(names, key=AXES.index)
    ):
        raise ConfigError(
            f"the mesh must name its axes {', '.join(AXES)} in this order, got {names}"
        )
    # mesh[name] would make a mesh of its own, a millisecond each
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
        return value.div_(shape.tensor) if shape.tensor > 1 else value
    for axis in ("shard", "replicate"):
        if getattr(shape, axis) > 1:
            dist.all_reduce(value, group=mesh.get_group(axis))
    return value


def data_coordinate(mesh: DeviceMesh) -> int:
    """This rank's number among the data ranks: its place over replicate x shard, equal for all its
    tensor ranks."""
    shape = mesh_shape(mesh)
    coordinate = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    return coordinate.get("replicate", 0) * shape.shard + coordinate.get("shard", 0)


def draw_mesh(ranks: torch.Tensor, topology: Topology, width: int = 78) -> str:
    """The mesh as text: one line per replica, ``rank`` numbers grouped by tensor, the host at the
    end.

    ``ranks``: int64 [replicate, shard, tensor]. Long meshes are cut in the middle.
    """
    lines = []
    for replica, row in enumerate(ranks.tolist()):
        groups = " ".join(
            "(" + " ".join(map(str, group)) + ")" if len(group) > 1 else str(group[0])
            for group in row
        )
        hosts = list(
            dict.fromkeys(topology.hosts[rank].split("/")[0] for group in row for rank in group)
        )
        line = f"  replica {replica}  [{groups}]  on {', '.join(hosts)}"
        lines.append(line if len(line) <= width else line[: width - 3] + "...")
    if len(lines) > 10:
        lines = [*lines[:5], f"  ... {len(lines) - 9} more replicas ...", *lines[-4:]]
    return "\n".join(lines)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _factor_pairs(number: int) -> str:
    return ", ".join(f"{n} x {number // n}" for n in range(1, number + 1) if number % n == 0)

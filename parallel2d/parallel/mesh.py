"""The device mesh of a job: `build_mesh`. `mesh_sizes` resolves its sizes.

[Note: parameters and context ranks] Ranks of the ``context`` axis hold parts of the same sequences,
so they are not data ranks, and parameters are sharded over ``shard`` and ``context`` together. For
parameters the two axes are therefore one axis, ``shard``, of the mesh that `sharding_mesh` returns.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config.parallel import AXES, MeshConfig, StrategyConfig, named_strategy
from parallel2d.base.device import (
    accelerator_type,
    backend_for,
    bound_device,
    current_device,
)
from parallel2d.base.errors import ConfigError
from parallel2d.base.metering import control_traffic
from parallel2d.base.open_files import prepare_rank
from parallel2d.base.replicas import absent_ranks, current, init_plain_world
from parallel2d.base.runtime import release_groups
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh_sizes import MeshShape, MeshSpec, check_placement, groups_along

log = logging.getLogger(__name__)


def build_mesh(
    spec: MeshSpec | MeshConfig | None = None,
    strategy: StrategyConfig | str = "hybrid",
    *,
    topology: Topology | None = None,
    allow_cross_node: bool = False,
    device_type: str | None = None,
) -> DeviceMesh:
    """Build the job's `DeviceMesh`. Collective, after ``init_process_group``.

    The axes are ``replicate`` and ``shard`` and, if larger than one, ``context`` and ``tensor``.

    Args:
        spec: requested sizes of the axes; default: all ``auto``.
        strategy: name or configuration of the strategy, which resolves ``auto`` sizes.
        topology: the host of each rank. None: the ranks exchange their hosts.
        allow_cross_node: True to allow shard, context and tensor groups on the slow link.
        device_type: default: the machine's accelerator, or cpu.

    Raises:
        ConfigError: the sizes do not fill the world, they put a group on the slow link by accident,
            or the strategy is not one of `config.STRATEGIES`.
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
    return place_mesh(shape, topology, allow_cross_node, device_type)


def place_mesh(
    shape: MeshShape, topology: Topology, allow_cross_node: bool, device_type: str | None = None
) -> DeviceMesh:
    """Build the mesh of `build_mesh` from resolved sizes. Collective."""
    ranks = shape.place(topology)
    for line in [*shape.notes, *check_placement(ranks, topology, allow_cross_node)]:
        if dist.get_rank() == 0:
            log.info("%s", line)
    device_type = device_type or accelerator_type()
    replicas = current()
    # After this call each of these replicas may fail independently.
    if replicas is not None and shape.replicate > 1:
        prepare_rank(shape.world_size, replicas=shape.replicate)
        replicas.divide(ranks.reshape(shape.replicate, -1).tolist(), topology.hosts)
    elif replicas is not None:
        # torch then uses the world for groups of all ranks.
        bound = bound_device(current_device(device_type))
        init_plain_world(replicas, backend_for(device_type), bound)
    mesh = _mesh_of(device_type, ranks, shape)
    # New process groups are collective over the world. The groups are created here, where all ranks
    # take part, because ranks may first use them at different times or in different orders.
    if shape.context > 1:
        sharding_mesh(mesh)
        group_of(mesh, "context")
    _release_groups_at_exit()
    return mesh


def _mesh_of(device_type: str, ranks: torch.Tensor, shape: MeshShape) -> DeviceMesh:
    sizes = {axis: size for axis, size in shape.sizes.items() if size > 1 or axis in AXES[:2]}
    mesh = DeviceMesh(
        device_type,
        ranks.reshape(*sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=_backends_of(device_type, tuple(sizes)),
    )
    for axis in range(mesh.ndim):
        inherit_timeout(mesh.get_group(axis), mesh.device_type)
    return mesh


def _backends_of(
    device_type: str, axes: Sequence[str]
) -> tuple[tuple[str | None, None], ...] | None:
    """Return the backend and its options for each axis of `DeviceMesh`. If replicas may fail, the
    axes inside a replica get torch's backends, and the default group creates the groups of the
    replicate axis."""
    replicas = current()
    if replicas is None or not replicas.is_divided:
        return None
    inside = backend_for(device_type)
    return tuple((None if axis == "replicate" else inside, None) for axis in axes)


# Attribute of a mesh with a context axis
_SHARDING = "_parallel2d_sharding_mesh"


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of parameters. Collective on the first call. This is ``mesh``, or a mesh with
    ``shard`` and ``context`` as one axis, ``shard``; see [Note: parameters and context ranks]."""
    shape = mesh_shape(mesh)
    if shape.context == 1:
        return mesh
    if _SHARDING not in vars(mesh):
        vars(mesh)[_SHARDING] = _mesh_of(mesh.device_type, mesh.mesh, shape.sharding)
    return vars(mesh)[_SHARDING]


@functools.cache
def _release_groups_at_exit() -> None:
    """End the threads of destroyed gloo groups before Python exits.

    A gloo thread that frees a tensor while Python exits kills the process with SIGABRT.
    """
    atexit.register(release_groups)


# Attribute of a mesh with a context axis
_CONTEXT = "_parallel2d_context_group"


def group_of(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return the process group of ``axis``; for ``shard``, the ranks that share parameters.

    The group of ``context`` is always a separate group, because torch may use one group for axes of
    equal ranks. Its first call is collective over the world.
    """
    if axis != "context":
        return sharding_mesh(mesh).get_group(axis)
    if mesh.size() != dist.get_world_size():
        return mesh.get_group(axis)
    if _CONTEXT not in vars(mesh):
        rows = groups_along(ranks_of(mesh), axis).tolist()
        own, _ = dist.new_subgroups_by_enumeration(rows, group_desc="context")
        assert isinstance(own, dist.ProcessGroup)  # every rank is in one row
        inherit_timeout(own, mesh.device_type)
        vars(mesh)[_CONTEXT] = own
    return vars(mesh)[_CONTEXT]


_axis_groups: list[weakref.ref[dist.ProcessGroup]] = []


def axes_of_groups(mesh: DeviceMesh) -> dict[dist.ProcessGroup, str]:
    """Map process groups to the axes of ``mesh``.

    The result has the mesh's own groups, and all other groups of this package over the same ranks:
    an engine has separate groups, and `DTensor` uses the groups of an earlier mesh that is equal to
    this mesh.
    """
    found: dict[dist.ProcessGroup, str] = {}
    by_ranks: dict[tuple[int, ...], str] = {}
    for axis in axis_names(mesh):
        group = group_of(mesh, axis)
        found[group] = axis
        # If several axes have the same ranks, the first of these axes shards the parameters.
        by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), axis)
    for group in filter(None, [reference() for reference in _axis_groups]):
        with contextlib.suppress(KeyError):  # torch has destroyed the group, or its ranks differ
            found.setdefault(group, by_ranks[tuple(dist.get_process_group_ranks(group))])
    return found


def inherit_timeout(group: dist.ProcessGroup, device_type: str) -> None:
    """Set the timeout of the world's group on ``group``; torch would use its own default."""
    _axis_groups.append(weakref.ref(group, _axis_groups.remove))
    default = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    # torch's fake backend has no options: it never waits.
    options = getattr(default, "options", None)
    if options is not None:
        dist.set_timeout(options._timeout, group)


def has_cpu_backend() -> bool:
    """Return True if the default process group can send CPU tensors."""
    return torch.device("cpu") in dist.distributed_c10d._get_default_group()._device_types


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the axes, outermost first; empty for a mesh without names."""
    return mesh.mesh_dim_names or ()


def axis_positions(mesh: DeviceMesh) -> dict[str, int]:
    """Return this rank's position along each named axis, outermost first."""
    # torch returns None for a rank outside of the mesh.
    return dict(zip(axis_names(mesh), mesh.get_coordinate() or (), strict=True))


def mesh_shape(mesh: DeviceMesh) -> MeshShape:
    """Return the sizes of ``mesh``, 1 for an absent axis. Raise `ConfigError` for other names."""
    names = axis_names(mesh)
    in_order = sorted(set(AXES).intersection(names), key=AXES.index)
    if not names or list(names) != in_order:
        raise ConfigError(
            f"the mesh must name its axes {', '.join(AXES)} in this order, got {names}"
        )
    # mesh[name].size() would build a mesh for every axis, a millisecond each.
    return MeshShape.from_sizes(dict(zip(names, mesh.shape, strict=True)))


_part_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def part_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return a process group of the ranks of ``mesh``; None if these are all ranks, as in nearly
    all jobs. The first call is collective over the mesh."""
    if mesh.size() == dist.get_world_size():
        return None
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    known = _part_groups.get(ranks)
    # The groups of an earlier world are gone.
    if known is None or known not in dist.distributed_c10d._world.pg_map:
        # Ranks outside of the mesh do not call this function.
        new = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="mesh")
        assert isinstance(new, dist.ProcessGroup)  # this rank is a member
        inherit_timeout(new, mesh.device_type)
        known = _part_groups[ranks] = new
    return known


def is_first_of(mesh: DeviceMesh) -> bool:
    """Return True on the first rank of ``mesh``, which logs for all."""
    return dist.get_rank() == int(mesh.mesh.min())


def sum_over_data_ranks(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum ``value`` (floating point) in place over the replicate and shard axes. Collective.

    Context and tensor ranks hold equal values, not parts: the duplicates are divided out of one
    all-reduce over all ranks of the mesh.
    """
    shape = mesh_shape(mesh)
    with control_traffic():
        dist.all_reduce(value, group=part_group(mesh))
    # Every data rank was counted once per rank that shares its data.
    return value.div_(shape.context * shape.tensor)


def live_data_ranks(mesh: DeviceMesh) -> int:
    """Return the number of live data ranks: without the ranks of failed replicas."""
    shape = mesh_shape(mesh)
    return shape.data_ranks - absent_ranks() * shape.data_ranks // shape.world_size


def without_replicas(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of this rank's replica: ``shard``, and ``tensor`` if the mesh has it."""
    names = tuple(axis for axis in axis_names(mesh) if axis != "replicate")
    return mesh[names]


def ranks_of(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks of ``mesh`` as int64 [replicate, shard, context, tensor]."""
    return mesh.mesh.reshape(tuple(mesh_shape(mesh).sizes.values()))


def positions_in(mesh: DeviceMesh) -> torch.Tensor:
    """Return the position of each rank among the ranks of ``mesh``, in its shape: the ranks
    themselves if these are all ranks."""
    return mesh.mesh.flatten().argsort().argsort().reshape(mesh.mesh.shape)


def route_in_replica(mesh: DeviceMesh) -> list[tuple[int, dist.ProcessGroup]]:
    """Return the route of a broadcast from the first rank of a replica to this rank.

    (source, group) of the hop over the shard axis, then of the hop over the tensor axis. ``mesh``:
    a `sharding_mesh`.
    """
    own = ranks_of(mesh)[axis_positions(mesh).get("replicate", 0), :, 0]
    shard, tensor = (own == dist.get_rank()).nonzero()[0].tolist()
    route = []
    if tensor == 0 and len(own) > 1:
        route.append((int(own[0, 0]), mesh.get_group("shard")))
    if own.shape[1] > 1:
        route.append((int(own[shard, 0]), mesh.get_group("tensor")))
    return route


def data_coordinate(mesh: DeviceMesh) -> int:
    """Return this rank's number among the data ranks; context and tensor ranks share one."""
    shape = mesh_shape(mesh)
    at = axis_positions(mesh)
    return at.get("replicate", 0) * shape.shard + at.get("shard", 0)

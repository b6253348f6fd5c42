"""The device mesh of a job: `build_mesh`. `mesh_sizes` resolves its sizes.

[Note: parameters and context ranks] Ranks of the ``context`` axis compute parts of the same
sequences, so these ranks are not data ranks. Parameters are sharded over the ``shard`` and
``context`` axes together. Therefore `sharding_mesh` returns a mesh in which these two axes are one
axis, called ``shard``.
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
        allow_cross_node: True to allow shard, context and tensor groups that cross hosts although
            they fit inside one host.
        device_type: the device type; default: the accelerator of the machine, or cpu.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks, a group crosses hosts and
            ``allow_cross_node`` is False, or the strategy is unknown.
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
    # With fault tolerance: after `divide` each replica may fail independently.
    if replicas is not None and shape.replicate > 1:
        prepare_rank(shape.world_size, replicas=shape.replicate)
        replicas.divide(ranks.reshape(shape.replicate, -1).tolist(), topology.hosts)
    elif replicas is not None:
        # A single replica uses an ordinary default process group.
        bound = bound_device(current_device(device_type))
        init_plain_world(replicas, backend_for(device_type), bound)
    mesh = _mesh_of(device_type, ranks, shape)
    # `new_group` is collective over the world. Create these groups here, because ranks may first
    # use them at different times or in different orders.
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
    """Return (backend, options) for each axis of a `DeviceMesh`; None for torch's defaults.

    With fault tolerance, the axes inside a replica use torch's backends, and the replicate axis
    uses the backend of the default group.
    """
    replicas = current()
    if replicas is None or not replicas.is_divided:
        return None
    inside = backend_for(device_type)
    return tuple((None if axis == "replicate" else inside, None) for axis in axes)


# Attribute of a mesh with a context axis
_SHARDING = "_parallel2d_sharding_mesh"


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the parameters. The first call is collective.

    The result is ``mesh``, or with a context axis a mesh in which ``shard`` and ``context`` are one
    axis; see [Note: parameters and context ranks].
    """
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

    The group of ``context`` is a separate group, because torch may use the same group for two axes
    with the same ranks. The first call for ``context`` is collective over the world.
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

    The result contains the groups of the mesh, and all other groups of this package with the same
    ranks: an engine has separate groups, and `DTensor` may use the groups of an earlier, equal
    mesh.
    """
    found: dict[dist.ProcessGroup, str] = {}
    by_ranks: dict[tuple[int, ...], str] = {}
    for axis in axis_names(mesh):
        group = group_of(mesh, axis)
        found[group] = axis
        # If several axes have the same ranks, use the first.
        by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), axis)
    for group in filter(None, [reference() for reference in _axis_groups]):
        with contextlib.suppress(KeyError):  # torch has destroyed the group, or its ranks differ
            found.setdefault(group, by_ranks[tuple(dist.get_process_group_ranks(group))])
    return found


def inherit_timeout(group: dist.ProcessGroup, device_type: str) -> None:
    """Give ``group`` the timeout of the default group. torch would use its default timeout."""
    _axis_groups.append(weakref.ref(group, _axis_groups.remove))
    default = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    # torch's fake backend has no options.
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
    """Return the sizes of ``mesh``; 1 for an absent axis. Raises `ConfigError` for unknown
    names."""
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
    """Return a process group of the ranks of ``mesh``; None if these are all ranks of the world.

    The first call is collective over the mesh.
    """
    if mesh.size() == dist.get_world_size():
        return None
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    known = _part_groups.get(ranks)
    # A cached group may belong to an earlier default group, which was destroyed.
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

    Context and tensor ranks that share data must pass equal values. One all-reduce runs over all
    ranks of the mesh, and the sum is divided by the number of ranks that share data.
    """
    shape = mesh_shape(mesh)
    with control_traffic():
        dist.all_reduce(value, group=part_group(mesh))
    # Each value was added by all context and tensor ranks that share it.
    return value.div_(shape.context * shape.tensor)


def live_data_ranks(mesh: DeviceMesh) -> int:
    """Return the number of data ranks without the data ranks of failed replicas."""
    shape = mesh_shape(mesh)
    return shape.data_ranks - absent_ranks() * shape.data_ranks // shape.world_size


def without_replicas(mesh: DeviceMesh) -> DeviceMesh:
    """Return the submesh of this rank's replica: all axes of ``mesh`` except ``replicate``."""
    names = tuple(axis for axis in axis_names(mesh) if axis != "replicate")
    return mesh[names]


def ranks_of(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks of ``mesh`` as int64 [replicate, shard, context, tensor]."""
    return mesh.mesh.reshape(tuple(mesh_shape(mesh).sizes.values()))


def positions_in(mesh: DeviceMesh) -> torch.Tensor:
    """Return a tensor of the mesh's shape with the index of each rank in the sorted ranks.

    If the mesh contains all ranks of the world, these are the ranks themselves.
    """
    return mesh.mesh.flatten().argsort().argsort().reshape(mesh.mesh.shape)


def route_in_replica(mesh: DeviceMesh) -> list[tuple[int, dist.ProcessGroup]]:
    """Return the route of a broadcast from the first rank of a replica to this rank.

    The route is a list of (source rank, group): a broadcast over the shard axis, then one over the
    tensor axis. ``mesh`` is a `sharding_mesh`.
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
    """Return this rank's number among the data ranks.

    Context and tensor ranks that share data have the same number.
    """
    shape = mesh_shape(mesh)
    at = axis_positions(mesh)
    return at.get("replicate", 0) * shape.shard + at.get("shard", 0)

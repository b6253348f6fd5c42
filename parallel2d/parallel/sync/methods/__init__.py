"""What crosses the replicate axis of one model: `method_for` reads it from the configuration.

- every step, whole: gradients are reduced on all replicas.
- every step, split (``strategy=hybrid_full``): gradients are reduced to the replica that updates
  them, updated parameters are gathered.
- ``sync=diloco``: gradients stay on their replica, changes of parameters are averaged now and then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import SyncConfig
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.sync.engine.reductions import Reduction, reduction_for
from parallel2d.parallel.sync.engine.registry import own_replicate_group
from parallel2d.parallel.sync.group import ParameterGroup
from parallel2d.parallel.sync.methods.diloco import OuterSync
from parallel2d.parallel.sync.methods.split_updates import OwnedParameters, ScatterToOwners
from parallel2d.parallel.sync.wires.blocks import RoundingKeys

MakeReduction = Callable[[torch.dtype, torch.dtype], Reduction]


@dataclass
class SyncMethod:
    """How the replicas of one model become equal. ``group``: their process group; None where
    nothing crosses."""

    group: dist.ProcessGroup | None = None
    # How gradients are reduced, from the dtype that is sent and their own; None: they are not.
    make_reduction: MakeReduction | None = None
    # With split updates: which parts of the parameters this replica updates.
    owners: OwnedParameters | None = None
    # With DiLoCo: the parameters that the replicas share.
    outer: OuterSync | None = None

    @property
    def follows_updates(self) -> bool:
        """Whether something happens after each update of the parameters."""
        return self.owners is not None or self.outer is not None

    def after_update(self) -> None:
        """To be called after each update. Collective."""
        if self.owners is not None:
            self.owners.after_update()
        if self.outer is not None:
            self.outer.after_update()


def method_for(
    mesh: DeviceMesh,
    groups: Sequence[ParameterGroup],
    config: SyncConfig,
    keys: RoundingKeys,
    *,
    splits_updates: bool,
    gradient_dtype: torch.dtype | None,
) -> SyncMethod:
    """The method that ``config`` names. Collective over the world.

    ``groups``: of the model's parameters, in the order in which backward ends them.
    ``gradient_dtype``: of gradients once they are reduced; None: in which they are added.
    """
    if config.name == "diloco":
        group = own_replicate_group(mesh)
        units = []
        for each in reversed(groups):
            units.append([parameter.name for parameter in each.parameters])
        return SyncMethod(group, outer=OuterSync(config, group, units, keys.seed))
    if mesh_shape(mesh).replicate == 1:
        return SyncMethod()
    group = own_replicate_group(mesh)
    if splits_updates:
        wire = torch.bfloat16 if config.wire == "bf16" else None
        bucket_bytes = int(config.bucket_mib * 2**20)
        owners = OwnedParameters(mesh, group, groups, wire, bucket_bytes, gradient_dtype)
        scatter = ScatterToOwners(group, owners)
        return SyncMethod(group, make_reduction=lambda *_: scatter, owners=owners)
    return SyncMethod(group, make_reduction=functools.partial(reduction_for, group, keys))

"""The interface of what reduces the gradients of a model (`Engine`), and where a model's engine is
found. `ReplicaReducer` and `TorchReducer` implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh import axis_names, inherit_timeout, mesh_shape
from parallel2d.parallel.sync.engine.group_state import clear_gradients
from parallel2d.parallel.sync.group import ParameterGroup


class Engine(Protocol):
    """What reduces the gradients of one model."""

    @property
    def pending(self) -> bool:
        """Whether gradients were added that are not reduced over the replicas."""

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The process group on which gradients are reduced over the replicas; None where this
        package does not reduce them."""

    @property
    def update_mesh(self) -> DeviceMesh:
        """The ranks that make the same updates: all of them, with DiLoCo those of this replica."""

    def prepare(self) -> None:
        """Called once, when the parameters have their values. Collective."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets what follows updates of the parameters follow those of ``optimizer``."""

    def finish(self) -> None:
        """Reduces what is left of a global batch. Collective."""

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind."""


# An attribute of the model and no table beside it: the engine refers to the model's parameters, so
# that the garbage collector frees both together.
_ENGINE = "_parallel2d_engine"


def register_engine(model: nn.Module, engine: Engine) -> None:
    """Makes ``engine`` that of ``model``."""
    vars(model)[_ENGINE] = engine


def engines_in(model: nn.Module) -> list[Engine]:
    """The engines of ``model`` and of modules below it."""
    found = []
    for module in model.modules():
        engine = vars(module).get(_ENGINE)
        if engine is not None:
            found.append(engine)
    return found


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model from `parallel2d.parallelize`. Raises `ConfigError` for another."""
    found: Engine | None = vars(model).get(_ENGINE)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} did not come from parallel2d.parallelize; give the model that "
            "it returned, not a module of it"
        )
    return found


GROUP_NAME = "gradients over replicas"


def own_replicate_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A process group over the replicas for one engine alone. Collective over the world.

    Collectives of an engine run asynchronously during a backward pass. In the mesh's own group,
    others that are started meanwhile could come between them, in another order on each rank.
    Returns the mesh's group where the mesh is not the whole world, because all ranks of the world
    would have to make the new one.
    """
    if mesh.size() != dist.get_world_size():
        return mesh.get_group("replicate")
    axis = axis_names(mesh).index("replicate")
    # One row for each group: the ranks that differ in the replicate axis alone.
    rows = mesh.mesh.movedim(axis, -1).reshape(-1, mesh_shape(mesh).replicate)
    own = None
    # Each rank makes all groups, also those it is not in: torch requires that.
    for ranks in rows.tolist():
        group = dist.new_group(ranks, group_desc=GROUP_NAME)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    inherit_timeout(own, mesh.device_type)
    return own


class TorchReducer:
    """The engine of ``sync.engine=torch``: the second axis of `fully_shard` reduces over the
    replicas.

    It stays for comparison. Its partial sums do not record which parameters they hold, so
    parameters that ranks or micro-batches use differently may get each other's gradients; it adds
    in the dtype in which gradients are sent; and it takes no hooks.
    """

    # Torch has reduced everything when a backward pass ends, on process groups of its own.
    pending = False
    replicate_group = None

    def __init__(
        self, model: nn.Module, groups: Sequence[ParameterGroup], mesh: DeviceMesh
    ) -> None:
        self._groups = groups
        self.update_mesh = mesh
        register_engine(model, self)

    def prepare(self) -> None:
        """Does nothing."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing: nothing follows updates."""

    def finish(self) -> None:
        """Does nothing: backward has reduced everything."""

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""
        clear_gradients(self._groups, set_to_none)
        self.reset()

    def reset(self) -> None:
        """Drops partial sums that an interrupted global batch left behind."""
        for group in self._groups:
            group.discard()

"""The engine of a model, which reduces its gradients over the replicas: ours (`ReplicaReducer`) or
torch's (`TorchReducer`), and where it is found."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals import FSDPGroup
from parallel2d.parallel.sync.engine.global_batch import GlobalBatch
from parallel2d.parallel.sync.engine.group_state import GroupState
from parallel2d.parallel.sync.engine.replica_reducer import ReplicaReducer
from parallel2d.parallel.sync.methods.method import SyncMethod, UpdateFollower
from parallel2d.parallel.sync.wires import wire_of


class TorchReducer:
    """The engine of ``sync.engine=torch``: the second axis of `fully_shard` reduces over the
    replicas, on process groups of its own.

    It stays for comparison. Its partial sums do not record which parameters they hold, so
    parameters that ranks or micro-batches use differently may get each other's gradients; it adds
    in the dtype in which gradients are sent; and it takes no hooks.
    """

    replicate_group = None  # none of ours

    def __init__(self, mesh: DeviceMesh, groups: Sequence[FSDPGroup], method: SyncMethod) -> None:
        self.method = method
        # Nothing is ever pending: torch has reduced everything when a backward pass ends.
        states = [GroupState(group, wire_of(group.wire)) for group in groups]
        self.batch = GlobalBatch(mesh.device_type, states)
        self.update_mesh = mesh
        self.updates = UpdateFollower()

    def finish(self) -> None:
        """Does nothing: backward has reduced everything."""


Engine = ReplicaReducer | TorchReducer

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


def reducers_in(model: nn.Module) -> list[ReplicaReducer]:
    """Our engines of ``model`` and of modules below it."""
    return [engine for engine in engines_in(model) if isinstance(engine, ReplicaReducer)]


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model from `parallel2d.parallelize`. Raises `ConfigError` for another."""
    found: Engine | None = vars(model).get(_ENGINE)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} did not come from parallel2d.parallelize; give the model that "
            "it returned, not a module of it"
        )
    return found

"""A job as it is laid out: `Layout`, from which its memory, bytes and seconds are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from parallel2d.base.config import OptimizerConfig, ParallelConfig
from parallel2d.parallel.cost.model_shapes import ModelShapes, group_traffic
from parallel2d.parallel.cost.traffic import AxisTraffic
from parallel2d.parallel.fsdp_internals import GroupTraffic
from parallel2d.parallel.mesh import MeshShape
from parallel2d.parallel.sync.methods import method_of
from parallel2d.parallel.sync.methods.method import SyncMethod


@dataclass(frozen=True)
class Layout:
    """``shapes``: from `collect_shapes` with the same ``config``, ``optimizer`` and size of the
    tensor axis. ``device_type``: that will run it; decides which collectives there are."""

    config: ParallelConfig
    optimizer: OptimizerConfig
    shape: MeshShape
    shapes: ModelShapes
    micro_batch_size: int = 1
    accumulation: int = 1
    device_type: str = "cuda"

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.micro_batch_size * self.accumulation * self.shape.data_ranks

    @property
    def splits_updates(self) -> bool:
        """Whether each replica updates its own rows of the parameters."""
        return self.method.splits_updates

    @cached_property
    def method(self) -> SyncMethod:
        """What crosses the replicate axis."""
        return method_of(self.config.strategy, self.config.sync, self.shape.replicate)

    @property
    def traffic(self) -> AxisTraffic:
        """How a group crosses the axes."""
        return AxisTraffic(self.shape, self.device_type, self.method)

    @cached_property
    def groups(self) -> list[tuple[GroupTraffic, int]]:
        """What each group moves, on the first rank, and the number of equal groups."""
        frees = self.config.strategy.reshard_after_forward
        found = []
        for group, count in self.shapes.groups:
            found.append((group_traffic(group, self.shape.shard, frees), count))
        return found

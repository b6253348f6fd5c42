"""Bytes that the shard and the replicate axis must move per step, known before the first one:
`AxisTraffic`, from what each group of parameters moves. Those of the tensor axis:
`cost.tensor_twin.count_tensor_axis`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.parallel import fsdp_internals
from parallel2d.parallel.cost.collectives import sent_bytes
from parallel2d.parallel.fsdp_internals import GroupTraffic
from parallel2d.parallel.mesh import MeshShape, mesh_shape
from parallel2d.parallel.sync.engine.replica_reducer import engine_of
from parallel2d.parallel.sync.methods.method import SyncMethod


@dataclass(frozen=True)
class AxisTraffic:
    """How a group crosses both axes. Bytes are those that one rank sends in one collective, mean
    over the ranks of its group."""

    shape: MeshShape
    device_type: str
    method: SyncMethod

    def gathered(self, group: GroupTraffic) -> float:
        """By one all-gather of the parameters over the shard axis."""
        whole = group.gathered_bytes * self.shape.shard
        return sent_bytes("all_gather", whole, self.shape.shard, self.device_type)

    def scattered(self, group: GroupTraffic) -> tuple[str, float]:
        """By one reduction of the gradients over the shard axis, and its collective. Torch's own
        engine adds narrow gradients in a reduce-scatter, ours exchanges them."""
        is_exchanged = self.method.config.engine == "parallel2d" and group.reduced_itemsize < 4
        collective = "all_to_all" if is_exchanged else "reduce_scatter"
        whole = group.reduced_bytes * self.shape.shard
        return collective, sent_bytes(collective, whole, self.shape.shard, self.device_type)

    def reduced(self, group: GroupTraffic) -> tuple[str, float]:
        """By one reduction of the gradients between replicas, and its collective."""
        collective, whole = self.method.gradients(group)
        return collective, self._between(collective, whole)

    def updated(self, group: GroupTraffic) -> float:
        """By what crosses of its parameters between replicas, once in `method.update_period`
        updates."""
        return self._between(*self.method.parameters(group))

    def per_step(
        self, groups: Iterable[tuple[GroupTraffic, int]], accumulation: int
    ) -> dict[str, float]:
        """``{"comm/AXIS/bytes": bytes}`` of a step of ``accumulation`` micro-batches. ``groups``:
        each with the number of groups that are equal to it.

        Per group (Rajbhandari et al. 2020, ZeRO; Zhao et al. 2023, FSDP): an all-gather per
        micro-batch for forward, another one for backward where parameters are freed in between; a
        reduction of the gradients per micro-batch, or once with ``during_accumulation=none``; over
        the replicas what the sync method sends, once or per micro-batch with ``full``. Parameters
        count as they travel: padded to the shard axis, in the dtype they are gathered in.
        """
        scatters = 1 if self.method.config.during_accumulation == "none" else accumulation
        replicate = shard = 0.0
        for group, count in groups:
            gathers = accumulation * (2 if group.frees_after_forward else 1)
            _, scattered = self.scattered(group)
            shard += count * (gathers * self.gathered(group) + scatters * scattered)
            replicate += count * self._between_replicas(group, accumulation)
        predicted = {"comm/replicate/bytes": replicate, "comm/shard/bytes": shard}
        if self.shape.tensor == 1:
            predicted["comm/tensor/bytes"] = 0.0
        return predicted

    def _between_replicas(self, group: GroupTraffic, accumulation: int) -> float:
        _, reduced = self.reduced(group)
        reductions = self.method.reductions(accumulation)
        return reductions * reduced + self.updated(group) / self.method.update_period

    def _between(self, collective: str, whole: float) -> float:
        return sent_bytes(collective, whole, self.shape.replicate, self.device_type)


def predict_communication(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    accumulation: int,
    during_accumulation: str = "reduce_scatter_only",
) -> dict[str, float]:
    """Bytes that a rank sends per step over the ``replicate`` and ``shard`` axes, as
    ``{"comm/AXIS/bytes": bytes}``. ``model``: after `parallelize`."""
    method = engine_of(model).method
    config = dataclasses.replace(method.config, during_accumulation=during_accumulation)
    crossing = AxisTraffic(mesh_shape(mesh), mesh.device_type, type(method)(config))
    groups = [(group, 1) for group in fsdp_internals.traffic_by_group(model)]
    return crossing.per_step(groups, accumulation)


def exact_bytes(model: nn.Module, mesh: DeviceMesh) -> float:
    """Bytes that a rank would send per step over the ``replicate`` axis if gradients were reduced
    there in fp32, once per step. ``model``: after `parallelize`."""
    numel = sum(group.reduced_numel for group in fsdp_internals.traffic_by_group(model))
    return sent_bytes("all_reduce", 4 * numel, mesh_shape(mesh).replicate, mesh.device_type)

"""The facts of a run that are shown once, before the first step, as the header on the console and
as ``layout.json``: `RunFacts`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from parallel2d.config import AXES
from parallel2d.data.batch import SampleShape
from parallel2d.mesh import MeshShape, draw_mesh
from parallel2d.topology import Topology


@dataclass(frozen=True)
class RunFacts:
    """A run as a person would describe it. ``ranks``: int64 [replicate, shard, tensor]."""

    shape: MeshShape
    ranks: torch.Tensor
    topology: Topology
    notes: tuple[str, ...]
    strategy: str
    bucketing: str
    precision: str
    sync: str  # what crosses the replicate axis, in words
    model: str
    parameters: int
    local_parameters: int
    data: str
    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    sample: SampleShape
    flops_per_sequence: int | None  # of one sample: an image too
    device: torch.device
    run_dir: str
    # bytes a rank sends per step, by ``comm/AXIS/bytes``
    predicted: dict[str, float] = field(default_factory=dict)
    # of a step, by the keys of the rows that measure it; empty where ``cluster`` gives no times
    predicted_time: dict[str, float] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # of images, by class id
    trained_parameters: int | None = None  # None: all
    # that exact fp32 gradients would send over the replicate axis per step
    exact_bytes: float = 0.0
    loss: str | None = None  # how it is computed, in words; None: from whole logits

    def lines(self) -> list[str]:
        """The header, readable in 80 columns."""
        shape = self.shape
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return [
            f"parallel2d  {shape.world_size} x {name}, {self.topology.describe()}, torch "
            f"{torch.__version__}",
            f"mesh        replicate {shape.replicate} x shard {shape.shard} x tensor "
            f"{shape.tensor}; strategy {self.strategy}",
            draw_mesh(self.ranks, self.topology),
            *(f"            {note}" for note in self.notes),
            f"model       {self.model}: {self.parameters:,} parameters, {self.local_parameters:,} "
            "on this rank",
            *self._trained(),
            f"            precision {self.precision}, bucketing {self.bucketing}",
            *self._loss(),
            f"sync        {self.sync}",
            f"data        {self.data}",
            f"batch       {self.sample.describe(self.global_batch_size)} = {shape.data_ranks} data "
            f"ranks x {self.accumulation} micro-batches x {self.micro_batch_size}",
            f"run dir     {self.run_dir}",
        ]

    def _trained(self) -> list[str]:
        if self.trained_parameters in (None, self.parameters):
            return []
        return [f"            {self.trained_parameters:,} of them are trained, the others frozen"]

    def _loss(self) -> list[str]:
        return [] if self.loss is None else [f"loss        {self.loss}"]

    def hparams(self, lr: float) -> dict[str, str | float | bool]:
        """Settings by which runs are compared. Whole numbers are texts: TensorBoard shows any
        number with five digits, 2 as 2.0000 and 115008 as 1.1501e+5."""
        shape = self.shape
        whole = {
            "replicate": shape.replicate,
            "shard": shape.shard,
            "tensor": shape.tensor,
            "parameters": self.parameters,
            "global_batch_size": self.global_batch_size,
            "accumulation": self.accumulation,
            "seq_len": self.sample.targets_per_sample,
        }
        return {
            "strategy": self.strategy,
            "bucketing": self.bucketing,
            "precision": self.precision,
            "sync": self.sync,
            "model": self.model,
            **{name: str(value) for name, value in whole.items()},
            "lr": lr,
        }

    def used_axes(self) -> tuple[str, ...]:
        """Axes with more than one rank."""
        return tuple(axis for axis in AXES if getattr(self.shape, axis) > 1)

    def slow_axes(self) -> tuple[str, ...]:
        """Axes that have a group with ranks on several hosts."""
        found = []
        for dim, axis in enumerate(AXES):
            groups = self.ranks.movedim(dim, -1).reshape(-1, self.ranks.shape[dim]).tolist()
            if any(self._crosses_hosts(group) for group in groups):
                found.append(axis)
        return tuple(found)

    def _crosses_hosts(self, ranks: list[int]) -> bool:
        return len({self.topology.hosts[rank] for rank in ranks}) > 1

    def layout(self) -> dict[str, Any]:
        """The facts that programs read: in ``layout.json`` and in every checkpoint's manifest."""
        return {
            "parameters": self.parameters,
            "mesh": {axis: getattr(self.shape, axis) for axis in AXES},
            "ranks": self.ranks.tolist(),
            "hosts": list(self.topology.hosts),
            "strategy": self.strategy,
            "bucketing": self.bucketing,
            "precision": self.precision,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "accumulation": self.accumulation,
            "seq_len": self.sample.targets_per_sample,
            "flops_per_sequence": self.flops_per_sequence,
            "inputs": list(self.sample.inputs),
            **({"classes": list(self.classes)} if self.classes else {}),
            "torch": torch.__version__,
            "predicted": {**self.predicted, **self.predicted_time},
        }

"""The facts of a run that are shown once, before the first step, as the header on the console and
as ``layout.json``: `RunFacts`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from parallel2d.config import AXES
from parallel2d.data.batch import SampleShape
from parallel2d.mesh import MeshShape, crosses_hosts, draw_mesh
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
    predicted: dict[str, float]  # bytes a rank sends per step, by ``comm/AXIS/bytes``
    # of a step, by the keys of the rows that measure it; empty where ``cluster`` gives no times
    predicted_time: dict[str, float]
    classes: tuple[str, ...]  # of images, by class id
    trained_parameters: int
    exact_bytes: float  # that exact fp32 gradients would send over the replicate axis per step
    loss: str | None  # how it is computed, in words; None: from whole logits

    def lines(self) -> list[str]:
        """The header, readable in 80 columns."""
        shape = self.shape
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        lines = [
            f"parallel2d  {shape.world_size} x {name}, {self.topology.describe()}, torch "
            f"{torch.__version__}",
            f"mesh        replicate {shape.replicate} x shard {shape.shard} x tensor "
            f"{shape.tensor}; strategy {self.strategy}",
            draw_mesh(self.ranks, self.topology),
            *(f"            {note}" for note in self.notes),
            f"model       {self.model}: {self.parameters:,} parameters, {self.local_parameters:,} "
            "on this rank",
        ]
        if self.trained_parameters != self.parameters:
            lines.append(
                f"            {self.trained_parameters:,} of them are trained, the others frozen"
            )
        lines.append(f"            precision {self.precision}, bucketing {self.bucketing}")
        if self.loss is not None:
            lines.append(f"loss        {self.loss}")
        return [
            *lines,
            f"sync        {self.sync}",
            f"data        {self.data}",
            f"batch       {self.sample.describe(self.global_batch_size)} = {shape.data_ranks} data "
            f"ranks x {self.accumulation} micro-batches x {self.micro_batch_size}",
            f"run dir     {self.run_dir}",
        ]

    def _fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _mesh(self) -> dict[str, int]:
        return {axis: getattr(self.shape, axis) for axis in AXES}

    def hparams(self, lr: float) -> dict[str, str | float | bool]:
        """Settings by which runs are compared."""
        whole = {
            **self._mesh(),
            **self._fields("parameters", "global_batch_size", "accumulation"),
            "seq_len": self.sample.targets_per_sample,
        }
        return {
            **self._fields("strategy", "bucketing", "precision", "sync", "model"),
            # As texts: TensorBoard shows any number with five digits, 115008 as 1.1501e+5.
            **{name: str(value) for name, value in whole.items()},
            "lr": lr,
        }

    def used_axes(self) -> tuple[str, ...]:
        """Axes with more than one rank."""
        return tuple(axis for axis, size in self._mesh().items() if size > 1)

    def slow_axes(self) -> tuple[str, ...]:
        """Axes that have a group with ranks on several hosts."""
        crossing = (crosses_hosts(self.ranks, dim, self.topology) for dim in range(len(AXES)))
        return tuple(itertools.compress(AXES, crossing))

    def layout(self) -> dict[str, Any]:
        """The facts that programs read: in ``layout.json`` and in every checkpoint's manifest."""
        layout = {
            **self._fields("parameters", "strategy", "bucketing", "precision"),
            **self._fields("global_batch_size", "micro_batch_size", "accumulation"),
            "mesh": self._mesh(),
            "ranks": self.ranks.tolist(),
            "hosts": list(self.topology.hosts),
            "seq_len": self.sample.targets_per_sample,
            "flops_per_sequence": self.flops_per_sequence,
            "inputs": list(self.sample.inputs),
            "torch": torch.__version__,
            "predicted": {**self.predicted, **self.predicted_time},
        }
        if self.classes:
            layout["classes"] = list(self.classes)
        return layout

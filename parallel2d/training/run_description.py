"""What a run is, before its first step: `describe_run` gives the `RunFacts` that the header on the
console and ``layout.json`` show. And the recorder of its steps."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import AXES, Job, TrainConfig
from parallel2d.base.config.composition import to_yaml
from parallel2d.base.runtime import Runtime
from parallel2d.base.topology import Topology
from parallel2d.parallel.cost.flops import count_flops, peak_flops
from parallel2d.parallel.cost.tensor_twin import TensorTraffic, count_tensor_axis, tensor_twin
from parallel2d.parallel.cost.traffic import exact_bytes, predict_communication
from parallel2d.parallel.mesh import MeshShape, crosses_hosts, draw_mesh
from parallel2d.parallel.parallelize.precision import input_dtype
from parallel2d.parallel.sync.methods import method_of
from parallel2d.training.data.batch import SampleShape
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.data.opening import OpenData
from parallel2d.training.metrics.communication import CommunicationMeter
from parallel2d.training.metrics.console import ConsoleDisplay
from parallel2d.training.metrics.phases import StepProfiler
from parallel2d.training.metrics.recorder import Recorder
from parallel2d.training.metrics.writer import MetricsWriter
from parallel2d.training.model_families import ModelParts
from parallel2d.training.optimizer import update_bytes

log = logging.getLogger(__name__)


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
    replicas_equal: bool  # after every update
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

    def mesh_sizes(self) -> dict[str, Any]:
        """Ranks of each axis."""
        return {axis: getattr(self.shape, axis) for axis in AXES}

    def hparams(self, lr: float) -> dict[str, str | float | bool]:
        """Settings by which runs are compared."""
        whole = {
            **self.mesh_sizes(),
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
        return tuple(axis for axis, size in self.mesh_sizes().items() if size > 1)

    def slow_axes(self) -> tuple[str, ...]:
        """Axes that have a group with ranks on several hosts."""
        dims = [dim for dim in range(len(AXES)) if crosses_hosts(self.ranks, dim, self.topology)]
        return tuple(AXES[dim] for dim in dims)

    def layout(self) -> dict[str, Any]:
        """The facts that programs read: in ``layout.json`` and in every checkpoint's manifest."""
        layout = {
            **self._fields("parameters", "strategy", "bucketing", "precision"),
            **self._fields("global_batch_size", "micro_batch_size", "accumulation"),
            "mesh": self.mesh_sizes(),
            "ranks": self.ranks.tolist(),
            "hosts": list(self.topology.hosts),
            "seq_len": self.sample.targets_per_sample,
            "flops_per_sequence": self.flops_per_sequence,
            "inputs": list(self.sample.inputs),
            "torch": torch.__version__,
            "predicted": self.predicted,
        }
        if self.classes:
            layout["classes"] = list(self.classes)
        return layout


def describe_run(
    job: Job,
    runtime: Runtime,
    shape: MeshShape,
    mesh: DeviceMesh,
    plan: BatchPlan,
    data: OpenData,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    flops: int | None,
    activations: TensorTraffic | None,
    head: str | None = None,
) -> RunFacts:
    """The facts of a run, with the bytes that each axis will move per step.

    ``flops``: of one sequence, from `flops_per_sequence`; ``activations``: from
    `predict_activations`; both must be asked for before the model is parallelized. ``head``: the
    layer with which the loss is computed in chunks.
    """
    config = job.config
    during = config.sync.during_accumulation
    predicted = predict_communication(
        model, mesh, accumulation=plan.accumulation, during_accumulation=during
    )
    if activations is not None:
        predicted["comm/tensor/bytes"], _ = activations.of_step(plan.accumulation, during)
    for axis, updates in update_bytes(optimizer).items():
        key = f"comm/{axis}/bytes"
        if key in predicted:
            predicted[key] += updates
    chunk, loss = config.train.loss_chunk, None
    if chunk is not None and head is not None:
        loss = f"in chunks of {chunk:,} tokens, with the layer {head}"
    ranks = mesh.mesh.reshape(shape.replicate, shape.shard, shape.tensor)
    parameters = list(model.parameters())
    method = method_of(config.strategy, config.sync, shape.replicate)
    return RunFacts(
        shape=shape,
        ranks=ranks,
        topology=runtime.topology,
        notes=shape.notes,
        strategy=config.strategy.name,
        bucketing=config.bucketing.name,
        precision=config.precision.name,
        sync=method.description,
        replicas_equal=method.replicas_equal,
        model=type(model).__name__.removeprefix("FSDP"),
        parameters=sum(p.numel() for p in parameters),
        local_parameters=sum(p.to_local().numel() for p in parameters),  # type: ignore[attr-defined]
        data=data.description,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation,
        sample=data.train.shape,
        flops_per_sequence=flops,
        device=runtime.device,
        run_dir=job.run_dir,
        predicted=predicted,
        classes=data.classes,
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        exact_bytes=exact_bytes(model, mesh),
        loss=loss,
    )


def _steady(facts: RunFacts) -> dict[str, float]:
    """Those of the predicted bytes that each step moves. Replicas that differ send each other
    nothing in most steps."""
    steady = dict(facts.predicted)
    if not facts.replicas_equal:
        steady.pop("comm/replicate/bytes", None)
    return steady


def flops_per_sequence(job: Job, parts: ModelParts, sample: SampleShape) -> int | None:
    """FLOPs of one sequence, forward and backward; None where they cannot be counted.

    Counted once per job: restarted workers read what the first ones wrote, since counting imports a
    second's worth of torch.
    """
    if job.restarted:
        try:
            with open(os.path.join(job.run_dir, "layout.json")) as file:
                known: int | None = json.load(file)["flops_per_sequence"]
            return known
        except (OSError, ValueError, KeyError):
            log.info("layout.json of the earlier workers cannot be read; FLOPs are counted again")
    return count_flops(parts.module, functools.partial(sample.example, 1), parts.loss)


def predict_activations(
    config: TrainConfig,
    parts: ModelParts,
    mesh: DeviceMesh,
    micro_batch_size: int,
    tensor_plan: Mapping[str, object] | None,
    sample: SampleShape,
    device_type: str | None = None,
) -> TensorTraffic | None:
    """What the tensor axis will move; None without that axis or where nothing is measured. Every
    rank must ask. ``device_type``: that will run it; default: that of the mesh."""
    if tensor_plan is None or not config.metrics.communication:
        return None
    floating = input_dtype(config.precision) or torch.float32
    # Our engine adds the parts of a gradient in fp32 at least, torch's in the gradient's own dtype.
    sums = torch.float32 if config.sync.engine == "parallel2d" else None
    return count_tensor_axis(
        tensor_twin(parts.module, mesh, config.parallel(), tensor_plan),
        mesh,
        parts.loss,
        functools.partial(sample.example, micro_batch_size, floating=floating),
        CommunicationMeter(mesh, dry=True, device_type=device_type),
        reduce_dtype=sums,
    )


def build_recorder(
    config: TrainConfig, facts: RunFacts, mesh: DeviceMesh, *, first: bool, label: str
) -> Recorder:
    """Every rank records; only the first writes files and the console. Shows the header."""
    display = writer = None
    if first:
        unit = {"tokens": "tok", "images": "img"}[facts.sample.noun]
        display = ConsoleDisplay(config.metrics.console, config.train.steps, unit, label)
        lines = facts.lines()
        for line in lines:
            display.say(line)
        # With the sizes of the axes in the place of ``auto``.
        found = dataclasses.replace(config.mesh, **facts.mesh_sizes())
        texts = {
            "config": f"```yaml\n{to_yaml(dataclasses.replace(config, mesh=found))}\n```",
            "mesh": "```\n" + "\n".join(lines) + "\n```",
        }
        writer = MetricsWriter(
            facts.run_dir,
            texts,
            tensorboard=config.metrics.tensorboard,
            hparams=facts.hparams(config.optimizer.lr),
            axes=facts.used_axes(),
            replicas_equal=facts.replicas_equal,
        )
    flops = facts.flops_per_sequence
    profile = config.profile
    return Recorder(
        log_every=config.metrics.log_every,
        steps=config.train.steps,
        ranks=facts.shape.world_size,
        tokens_per_step=facts.global_batch_size * facts.sample.targets_per_sample,
        flops_per_step=flops * facts.global_batch_size if flops else None,
        peak_flops=peak_flops(facts.device, config.precision.param),
        writer=writer,
        display=display,
        device=facts.device,
        hosts=facts.topology.hosts,
        meter=CommunicationMeter(mesh) if config.metrics.communication else None,
        predicted=_steady(facts),
        slow_axes=facts.slow_axes(),
        exact_bytes=facts.exact_bytes,
        profiler=StepProfiler(
            facts.run_dir, dist.get_rank(), facts.device, profile.steps, profile.ranks
        ),
    )

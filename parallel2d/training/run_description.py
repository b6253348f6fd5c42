"""Describes a run before its first step: `describe_run` returns the `RunFacts` for the header on
the console and for ``layout.json``. `build_recorder` creates the recorder of the run."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import files
from parallel2d.base.config import AXES, Job, TrainConfig
from parallel2d.base.config.composition import to_yaml
from parallel2d.base.device import ATTENTION_KERNELS, free_and_total_bytes, name_of
from parallel2d.base.replicas import current
from parallel2d.base.runtime import Runtime
from parallel2d.base.topology import Topology
from parallel2d.parallel.context_axis import context_axis_of
from parallel2d.parallel.cost.flops import count_flops, peak_flops
from parallel2d.parallel.cost.meta_copy import (
    LossOfBatch,
    TensorTraffic,
    count_tensor_axis,
    meta_copy,
)
from parallel2d.parallel.cost.traffic import exact_bytes, predicted_bytes
from parallel2d.parallel.fsdp_internals.sharded_model import streams_of_collectives
from parallel2d.parallel.mesh import ranks_of
from parallel2d.parallel.mesh_sizes import crossing_group, draw_mesh
from parallel2d.parallel.parallelize.layout import Layout, SampleShape
from parallel2d.training.data.opening import OpenData
from parallel2d.training.loss.model_loss import ModelLoss
from parallel2d.training.metrics.communication import CommunicationMeter
from parallel2d.training.metrics.console import ConsoleDisplay
from parallel2d.training.metrics.phases import StepProfiler
from parallel2d.training.metrics.recorder import Recorder
from parallel2d.training.metrics.writer import MetricsWriter
from parallel2d.training.model_families import ModelParts, name_of_head

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run for users and programs."""

    job: Job
    layout: Layout
    ranks: torch.Tensor  # int64 [replicate, shard, tensor]
    topology: Topology
    device: torch.device
    model: str
    parameters: int
    trained_parameters: int
    data: OpenData
    head: str | None  # name of the output layer for ``train.loss_chunk``; None if that is not set
    flops_per_sequence: int | None  # forward and backward of one sample; None: unknown
    predicted: dict[str, float]  # bytes that a rank sends per step, by ``comm/AXIS/bytes``
    measured: str = ""  # the micro-batch sizes that were probed, with their memory

    def lines(self) -> list[str]:
        """Return the header, readable in 80 columns."""
        config, shape, work = self.job.config, self.layout.shape, self.layout.workload
        name = name_of(self.device)
        lines = [
            f"parallel2d  {shape.world_size} x {name}, {self.topology.describe()}, torch "
            f"{torch.__version__}",
            f"mesh        {shape}; strategy {config.strategy.name}",
            draw_mesh(self.ranks, self.topology),
            *(f"            {note}" for note in shape.notes),
            f"model       {self.model}: {self.parameters:,} parameters, "
            f"{self.layout.local_parameters:,} on this rank",
        ]
        if self.trained_parameters != self.parameters:
            lines.append(
                f"            {self.trained_parameters:,} of them are trained, the others frozen"
            )
        precision, bucketing = config.precision.name, config.bucketing.name
        lines.append(f"            precision {precision}, bucketing {bucketing}")
        lines.append(f"            {self._speed()}")
        if self.head is not None:
            chunk = f"{config.train.loss_chunk:,} tokens, with the layer {self.head}"
            lines.append(f"loss        in chunks of {chunk}")
        batch = self.data.train.shape.describe(config.train.global_batch_size)
        return [
            *lines,
            f"sync        {self.layout.method.description}",
            f"data        {files.printable(self.data.description, 500)}",
            *self._validation_lines(),
            f"batch       {batch} = {shape.data_ranks} data ranks x {work.accumulation} "
            f"micro-batches x {work.micro_batch_size}",
            *([f"            {self.measured}"] if self.measured else []),
            f"run dir     {files.printable(self.job.run_dir, 500)}",
        ]

    def _validation_lines(self) -> list[str]:
        every = self.job.config.train.validate_every
        if not every or self.data.validation or self.data.named_validation:
            return []
        name = self.job.config.data.name
        return [
            f"validation  none: data={name} has no held-out documents, so "
            f"train.validate_every={every} has no effect; set data.validation"
        ]

    def _speed(self) -> str:
        """Return the settings that determine the speed of kernels."""
        precision, compilation = self.job.config.precision, self.layout.config.compile
        text = f"matrix products {precision.param}"
        if self.device.type != "cpu" and precision.param == "fp32":
            text += " rounded to TF32" if precision.tf32 else " without TF32"
        backend = f" with {compilation.backend}" if compilation.name != "none" else ""
        text += f", compile {compilation.name}{backend}"
        if self.device.type != "cuda":
            return text
        return f"{text}, attention {', '.join(ATTENTION_KERNELS)}"

    def hparams(self) -> dict[str, str | float | bool]:
        """Return the settings for comparing runs."""
        facts = {**self.record(), **self.layout.shape.shown}
        names = ("strategy", "bucketing", "precision", *self.layout.shape.shown)
        names += ("parameters", "global_batch_size", "accumulation", "seq_len")
        return {
            "sync": self.layout.method.description,
            "model": self.model,
            # Write numbers as text, because TensorBoard rounds them to five digits, 115008 to
            # 1.1501e+5.
            **{name: str(facts[name]) for name in names},
            "lr": self.job.config.optimizer.lr,
        }

    def record(self) -> dict[str, Any]:
        """Return the facts for programs: for ``layout.json`` and every checkpoint's manifest."""
        config, work = self.job.config, self.layout.workload
        return {
            "parameters": self.parameters,
            "strategy": config.strategy.name,
            "bucketing": config.bucketing.name,
            "precision": config.precision.name,
            "global_batch_size": config.train.global_batch_size,
            "micro_batch_size": work.micro_batch_size,
            "accumulation": work.accumulation,
            "mesh": self.layout.shape.shown,
            "ranks": self.ranks.tolist(),
            "hosts": list(self.topology.hosts),
            "seq_len": self.data.train.shape.targets_per_sample,
            "flops_per_sequence": self.flops_per_sequence,
            "torch": torch.__version__,
            "checkpoints": config.checkpoint.folder or "checkpoints",
            "predicted": self.predicted,
        }


def describe_run(
    job: Job,
    runtime: Runtime,
    mesh: DeviceMesh,
    data: OpenData,
    parts: ModelParts,
    layout: Layout,
    is_shown: bool,
) -> RunFacts:
    """Return the facts of a run with the predicted bytes of each axis, before the model is
    parallelized. Call it on every rank. ``is_shown``: count FLOPs too."""
    counted = count_activations(job.config, parts, mesh, layout)
    parameters = list(parts.module.parameters())
    return RunFacts(
        job=job,
        layout=layout,
        ranks=ranks_of(mesh),
        topology=runtime.topology,
        device=runtime.device,
        model=type(parts.module).__name__,
        parameters=sum(map(torch.Tensor.numel, parameters)),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        data=data,
        head=name_of_head(job.config, parts),
        flops_per_sequence=flops_per_sequence(job, parts, data.train.shape) if is_shown else None,
        predicted=predicted_bytes(layout, counted and counted.of_step(layout)),
    )


def flops_per_sequence(job: Job, parts: ModelParts, sample: SampleShape) -> int | None:
    """Return the FLOPs of one sequence, forward and backward; None if they cannot be counted.
    Restarted workers read the number that the first workers wrote, because counting takes about a
    second to import torch modules."""
    if job.restarted:
        try:
            layout = files.read_json(os.path.join(job.run_dir, "layout.json"))
            known: int | None = layout["flops_per_sequence"]
            if known is None or files.is_count(known):
                return known
        except (OSError, ValueError, KeyError, TypeError):
            pass
        log.info("layout.json of the earlier workers cannot be read; FLOPs are counted again")
    loss = ModelLoss(job.config, parts)
    return count_flops(parts.module, functools.partial(sample.example, 1), loss.value)


def count_activations(
    config: TrainConfig, parts: ModelParts, mesh: DeviceMesh, layout: Layout
) -> TensorTraffic | None:
    """Count the traffic of the tensor and context axes; None without these axes or without
    communication metrics. Call it on every rank."""
    is_split = layout.tensor_plan is not None or layout.shape.context > 1
    if not is_split or not config.metrics.communication:
        return None
    loss = ModelLoss(config, parts).value
    if name_of_head(config, parts) is not None:
        loss = functools.partial(_of_slices, loss)
    return count_tensor_axis(meta_copy(parts.module, mesh, layout), mesh, layout, loss)


def _of_slices(loss: LossOfBatch, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
    """Compute ``loss`` like the chunked loss: with a context axis, only for this rank's
    positions."""
    axis = context_axis_of(model)
    if axis is None or axis.is_learning:
        return loss(model, inputs, targets)
    with axis.without_join():
        return loss(model, inputs, axis.cut(targets, 1))


def outputs(facts: RunFacts) -> tuple[ConsoleDisplay, MetricsWriter]:
    """Create the leader's console display and its writer of metrics."""
    config, sample = facts.job.config, facts.data.train.shape
    unit = {"tokens": "tok"}.get(sample.noun, sample.noun)
    display = ConsoleDisplay(config.metrics.console, config.train.steps, unit, facts.job.label)
    # The shown configuration has the resolved sizes of the axes in place of ``auto``.
    sizes: dict[str, Any] = facts.layout.shape.shown
    found = dataclasses.replace(config.mesh, **sizes)
    texts = {
        "config": f"```yaml\n{to_yaml(dataclasses.replace(config, mesh=found))}\n```",
        "mesh": "```\n" + "\n".join(facts.lines()) + "\n```",
    }
    device_gib = None
    if facts.device.type != "cpu":
        device_gib = free_and_total_bytes(facts.device)[1] / 2**30
    writer = MetricsWriter(
        facts.job.run_dir,
        texts,
        tensorboard=config.metrics.tensorboard,
        hparams=facts.hparams(),
        axes=[axis for axis, size in sizes.items() if size > 1],
        replicas_equal=facts.layout.method.replicas_equal,
        charts=_charts(facts),
        device_gib=device_gib,
    )
    return display, writer


def _charts(facts: RunFacts) -> list[str]:
    """Return the charts of `OPTIONAL` for which the job has data."""
    has_peak = peak_flops(facts.device, facts.job.config.precision.param) is not None
    has_data = {
        "mfu": has_peak and facts.flops_per_sequence is not None,
        "hosts": len(facts.topology.ranks_by_host) > 1 and facts.job.config.metrics.communication,
        "device": facts.device.type != "cpu",
        "replicas": current() is not None,
    }
    return list(filter(has_data.__getitem__, has_data))


def build_recorder(facts: RunFacts, mesh: DeviceMesh, model: nn.Module, *, first: bool) -> Recorder:
    """Create the recorder. Only the rank with ``first=True`` writes files and shows the header."""
    config, layout = facts.job.config, facts.layout
    run_dir, sample = facts.job.run_dir, facts.data.train.shape
    display = writer = None
    if first:
        display, writer = outputs(facts)
        for line in facts.lines():
            display.log(line)
    predicted = dict(facts.predicted)
    # Replicas that train independently exchange nothing in most steps.
    if not facts.layout.method.replicas_equal:
        del predicted["comm/replicate/bytes"]
    slow = []
    for axis in AXES:
        if crossing_group(facts.ranks, axis, facts.topology):
            slow.append(axis)
    streams = functools.partial(streams_of_collectives, model)
    flops, batch = facts.flops_per_sequence, config.train.global_batch_size
    profile = config.profile
    return Recorder(
        log_every=config.metrics.log_every,
        steps=config.train.steps,
        ranks=layout.shape.world_size,
        tokens_per_step=batch * sample.targets_per_sample,
        flops_per_step=flops * batch if flops else None,
        peak_flops=peak_flops(facts.device, config.precision.param),
        writer=writer,
        display=display,
        device=facts.device,
        hosts=facts.topology.hosts,
        meter=CommunicationMeter(mesh, streams=streams) if config.metrics.communication else None,
        predicted=predicted,
        warmup=layout.method.warmup,
        slow_axes=slow,
        exact_bytes=exact_bytes(layout),
        profiler=StepProfiler(run_dir, dist.get_rank(), facts.device, profile.steps, profile.ranks),
    )

"""What a run is, before its first step: `describe_run`. And the recorder of its steps."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.config import Job, SyncConfig, TrainConfig
from parallel2d.config.serialization import to_yaml
from parallel2d.cost.flops import count_flops, peak_flops
from parallel2d.cost.tensor_twin import tensor_twin
from parallel2d.cost.traffic import count_tensor_axis, exact_bytes, predict_communication
from parallel2d.data import BatchPlan, OpenData
from parallel2d.data.batch import SampleShape
from parallel2d.mesh import MeshShape
from parallel2d.metrics.communication import CommunicationMeter
from parallel2d.metrics.console import ConsoleDisplay
from parallel2d.metrics.header import RunFacts
from parallel2d.metrics.profile import StepProfiler
from parallel2d.metrics.recorder import Recorder
from parallel2d.metrics.writer import MetricsWriter
from parallel2d.model_families import ModelParts
from parallel2d.optimizer import update_bytes
from parallel2d.parallelize.precision import input_dtype
from parallel2d.runtime import Runtime
from parallel2d.sync.outer_settings import describe_sync

log = logging.getLogger(__name__)


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
    activations: Mapping[str, float],
) -> RunFacts:
    """The facts of a run, with the bytes that each axis will move per step.

    ``flops``: of one sequence, from `flops_per_sequence`; ``activations``: from
    `predict_activations`; both must be asked for before the model is parallelized.
    """
    config = job.config
    moved = predict_communication(
        model,
        mesh,
        accumulation=plan.accumulation,
        during_accumulation=config.sync.during_accumulation,
    )
    predicted = {**activations, **moved}
    for axis, sent in update_bytes(optimizer).items():
        key = f"comm/{axis}/bytes"
        if key in predicted:
            predicted[key] += sent
    parameters = list(model.parameters())
    return RunFacts(
        shape=shape,
        ranks=mesh.mesh.reshape(shape.replicate, shape.shard, shape.tensor),
        topology=runtime.topology,
        notes=shape.notes,
        strategy=config.strategy.name,
        bucketing=config.bucketing.name,
        precision=config.precision.name,
        sync=describe_sync(config.strategy, config.sync, shape.replicate),
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
        exact_bytes=exact_bytes(model, mesh),
    )


def _steady(predicted: Mapping[str, float], sync: SyncConfig) -> dict[str, float]:
    """Those of the predicted bytes that each step moves. With diloco most steps send nothing
    between replicas."""
    if sync.name != "diloco":
        return dict(predicted)
    return {key: value for key, value in predicted.items() if not key.startswith("comm/replicate")}


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
    plan: BatchPlan,
    tensor_plan: Mapping[str, object] | None,
    sample: SampleShape,
) -> dict[str, float]:
    """What the tensor axis will move per step; nothing without that axis or where nothing is
    measured. Every rank must ask."""
    if tensor_plan is None or not config.metrics.communication:
        return {}
    floating = input_dtype(config.precision) or torch.float32
    # Our engine adds the parts of a gradient in fp32 at least, torch's in the gradient's own dtype.
    sums = torch.float32 if config.sync.engine == "parallel2d" else None
    return count_tensor_axis(
        tensor_twin(parts.module, mesh, config.parallel(), tensor_plan),
        mesh,
        parts.loss,
        functools.partial(sample.example, plan.micro_batch_size, floating=floating),
        CommunicationMeter(mesh, dry=True),
        accumulation=plan.accumulation,
        during_accumulation=config.sync.during_accumulation,
        reduce_dtype=sums,
    )


def build_recorder(
    config: TrainConfig, facts: RunFacts, mesh: DeviceMesh, *, first: bool
) -> Recorder:
    """Every rank records; only the first writes files and the console. Shows the header."""
    display = writer = None
    if first:
        unit = {"tokens": "tok", "images": "img"}[facts.sample.noun]
        display = ConsoleDisplay(config.metrics.console, config.train.steps, unit)
        lines = facts.lines()
        for line in lines:
            display.say(line)
        facts.write_layout()
        texts = {
            "config": f"```yaml\n{to_yaml(config)}\n```",
            "mesh": "```\n" + "\n".join(lines) + "\n```",
        }
        writer = MetricsWriter(
            facts.run_dir,
            texts,
            tensorboard=config.metrics.tensorboard,
            hparams=facts.hparams(config.optimizer.lr),
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
        predicted=_steady(facts.predicted, config.sync),
        slow_axes=facts.slow_axes(),
        exact_bytes=facts.exact_bytes,
        profiler=StepProfiler(
            facts.run_dir, dist.get_rank(), facts.device, profile.steps, profile.ranks
        ),
    )

"""Builds the parts of a run from its configuration, in the order in which the rooms stand: mesh, data, model, optimizer, metrics.

`check` does what one process can do without workers, so that a job that cannot work ends before any is started; `build_trainer`
does all of it on a rank. Both go through the same functions, so neither can know a rule that the other does not.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.checkpoint import Checkpointer
from parallel2d.compose import Job, to_yaml
from parallel2d.config import ConfigError, LlamaModel, TrainConfig
from parallel2d.data import BatchPlan, OpenData, open_data
from parallel2d.mesh import MeshShape, MeshSpec, Topology, build_mesh, data_coordinate
from parallel2d.metrics.communication import CommunicationMeter
from parallel2d.metrics.console import ConsoleDisplay
from parallel2d.metrics.flops import count_flops, peak_flops
from parallel2d.metrics.header import RunFacts
from parallel2d.metrics.prediction import predict_communication
from parallel2d.metrics.profile import StepProfiler
from parallel2d.metrics.recorder import Recorder
from parallel2d.metrics.writer import MetricsWriter
from parallel2d.model import ModelParts, build_model
from parallel2d.optimizer import build_optimizer
from parallel2d.parallelize import parallelize
from parallel2d.parallelize.compilation import check_compilation
from parallel2d.parallelize.tensor_parallel import resolve_plan
from parallel2d.runtime import Runtime, check_same_data, check_shared_run_dir
from parallel2d.trainer import Trainer


def check(config: TrainConfig, topology: Topology) -> None:
    """Raises `ConfigError` for a mesh, batch, model or data set that cannot work on ``topology``."""
    shape = MeshSpec.from_config(config.mesh).resolve(config.strategy.name, topology)
    plan_batches(config, shape, data_rank=0)
    check_compilation(config.compile, shape.tensor)
    parts = build_model(config.model)
    plan_tensor_axis(config, parts, shape)
    check_vocabulary(config, parts, open_training_data(config))


def build_trainer(job: Job, runtime: Runtime) -> Trainer:
    """The trainer of this rank. Collective. Raises `ConfigError`, on every rank alike, for what cannot work."""
    config, device = job.config, runtime.device
    check_shared_run_dir(job.run_dir)
    shape = MeshSpec.from_config(config.mesh).resolve(config.strategy.name, runtime.topology)
    mesh = build_mesh(config.mesh, config.strategy.name, topology=runtime.topology, device_type=device.type)
    plan = plan_batches(config, shape, data_coordinate(mesh))
    data = open_training_data(config)
    check_same_data(data.fingerprint)

    parts = build_model(config.model)
    check_vocabulary(config, parts, data)
    flops = count_flops(parts.module, config.train.seq_len, parts.loss) if runtime.is_first else None
    model = parallelize(
        parts.module,
        mesh,
        config.parallel(),
        seed=config.train.seed,
        init=parts.init,
        tensor_plan=plan_tensor_axis(config, parts, shape),
        weights=parts.weights,
        topology=runtime.topology,
    )
    facts = RunFacts(
        shape=shape,
        ranks=mesh.mesh.reshape(shape.replicate, shape.shard, shape.tensor),
        topology=runtime.topology,
        notes=shape.notes,
        strategy=config.strategy.name,
        bucketing=config.bucketing.name,
        precision=config.precision.name,
        model=type(parts.module).__name__.removeprefix("FSDP"),
        parameters=sum(p.numel() for p in model.parameters()),
        local_parameters=sum(p.to_local().numel() for p in model.parameters()),  # type: ignore[attr-defined]
        data=data.description,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation,
        seq_len=config.train.seq_len,
        flops_per_sequence=flops,
        device=device,
        run_dir=job.run_dir,
        predicted=predict_communication(
            model, mesh, accumulation=plan.accumulation, during_accumulation=config.sync.during_accumulation
        ),
    )
    optimizer = build_optimizer(model, config.optimizer)
    described = {**facts.layout(), "model": dataclasses.asdict(config.model)}  # what an export to another format needs to know
    checkpointer = Checkpointer(config.checkpoint, job.run_dir, mesh, model, optimizer, layout=described)
    trainer = Trainer(
        config=config,
        model=model,
        loss=parts.loss,
        mesh=mesh,
        optimizer=optimizer,
        training=data.train,
        validation=data.validation,
        plan=plan,
        recorder=build_recorder(config, facts, mesh, first=runtime.is_first),
        checkpointer=checkpointer,
        device=device,
    )
    restored = checkpointer.restore(restarted=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0)
    if restored is not None and config.checkpoint.load == "all":
        trainer.load_state_dict(restored)
    trainer.recorder.begin(trainer.progress.step)
    return trainer


def build_recorder(config: TrainConfig, facts: RunFacts, mesh: DeviceMesh, *, first: bool) -> Recorder:
    """Every rank records; only the first writes and speaks. Shows the header."""
    display = writer = None
    if first:
        display = ConsoleDisplay(config.metrics.console, config.train.steps)
        for line in facts.lines():
            display.say(line)
        facts.write_layout()
        texts = {"config": f"```yaml\n{to_yaml(config)}\n```", "mesh": "```\n" + "\n".join(facts.lines()) + "\n```"}
        writer = MetricsWriter(
            facts.run_dir, texts, tensorboard=config.metrics.tensorboard, hparams=facts.hparams(config.optimizer.lr)
        )
    flops = facts.flops_per_sequence
    return Recorder(
        log_every=config.metrics.log_every,
        steps=config.train.steps,
        ranks=facts.shape.world_size,
        tokens_per_step=facts.global_batch_size * facts.seq_len,
        flops_per_step=flops * facts.global_batch_size if flops else None,
        peak_flops=peak_flops(facts.device, config.precision.param),
        writer=writer,
        display=display,
        device=facts.device,
        hosts=facts.topology.hosts,
        meter=CommunicationMeter(mesh) if config.metrics.communication else None,
        predicted=facts.predicted,
        slow_axes=facts.slow_axes(),
        profiler=StepProfiler(facts.run_dir, dist.get_rank(), facts.device, config.profile.steps, config.profile.ranks),
    )


def plan_batches(config: TrainConfig, shape: MeshShape, data_rank: int) -> BatchPlan:
    """This data rank's share of every global batch."""
    return BatchPlan(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_rank=data_rank,
        data_ranks=shape.data_ranks,
    )


def open_training_data(config: TrainConfig) -> OpenData:
    """The configured data; prepared first where it has not been."""
    return open_data(config.data, seq_len=config.train.seq_len, seed=config.train.seed)


def plan_tensor_axis(config: TrainConfig, parts: ModelParts, shape: MeshShape) -> Mapping[str, object] | None:
    """The tensor-parallel plan, or None without a tensor axis. Raises `ConfigError` when the model cannot be split so."""
    if shape.tensor == 1:
        return None
    if parts.tensor_plan is None:
        raise ConfigError(
            f"mesh.tensor={shape.tensor}: {type(parts.module).__name__} has no tensor-parallel plan; give one with "
            "model.tensor_plan={pattern: word} or package.module:function, or set mesh.tensor=1"
        )
    if isinstance(config.model, LlamaModel) and config.train.seq_len % shape.tensor:
        raise ConfigError(
            f"train.seq_len={config.train.seq_len} must be a multiple of mesh.tensor={shape.tensor}: norms run on slices of "
            "the sequence"
        )
    try:
        plan = parts.tensor_plan(parts.module, shape.tensor)
        resolve_plan(parts.module, plan, shape.tensor)
        return plan
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_vocabulary(config: TrainConfig, parts: ModelParts, data: OpenData) -> None:
    """Raises `ConfigError` when the data hold token ids that the model has no row for."""
    if parts.vocab_size is not None and parts.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={parts.vocab_size} is smaller than the {data.vocab_size} token ids of data={config.data.name}; "
            f"it must be at least {data.vocab_size}"
        )

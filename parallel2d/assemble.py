"""Builds the parts of a run from its configuration, in the order in which the rooms stand: mesh,
data, model, optimizer, metrics.

`check` does what one process can do without workers, so that a job that cannot work ends before any
is started; `build_trainer` does all of it on a rank. Both go through the same functions, so neither
can know a rule that the other does not.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.checkpoint import Checkpointer
from parallel2d.config import DataConfig, Job, LlamaModel, TrainConfig
from parallel2d.config.serialization import to_yaml
from parallel2d.cost.flops import count_flops, peak_flops
from parallel2d.cost.tensor_twin import tensor_twin
from parallel2d.cost.traffic import count_tensor_axis, predict_communication
from parallel2d.data import BatchPlan, OpenData, open_data
from parallel2d.data.batch import SampleShape, labelled_images
from parallel2d.errors import ConfigError
from parallel2d.mesh import MeshShape, MeshSpec, build_mesh, data_coordinate
from parallel2d.metrics.communication import CommunicationMeter
from parallel2d.metrics.console import ConsoleDisplay
from parallel2d.metrics.header import RunFacts
from parallel2d.metrics.profile import StepProfiler
from parallel2d.metrics.recorder import Recorder
from parallel2d.metrics.writer import MetricsWriter
from parallel2d.model_families import ModelParts, build_model, words_of
from parallel2d.optimizer import build_optimizer, plan_groups, update_bytes
from parallel2d.parallelize import parallelize
from parallel2d.parallelize.activation_checkpointing import kept_operators
from parallel2d.parallelize.compilation import check_compilation
from parallel2d.parallelize.float8 import check_float8
from parallel2d.parallelize.precision import DTYPES
from parallel2d.parallelize.sharding import check_offload
from parallel2d.parallelize.tensor_parallel import resolve_plan
from parallel2d.runtime import Runtime, check_same_data
from parallel2d.topology import Topology
from parallel2d.trainer import Trainer

log = logging.getLogger(__name__)


def check(config: TrainConfig, topology: Topology) -> None:
    """Raises `ConfigError` for a mesh, batch, model or data set that cannot work on
    ``topology``."""
    shape = resolve_mesh(config, topology)
    plan_batches(config, shape, data_rank=0, pad=False)
    check_compilation(config.compile, shape.tensor)
    kept_operators(config.activation_checkpointing.keep)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    check_offload(config.cpu_offload, device_type, shape.replicate)
    check_float8(config.precision, device_type)
    parts = build_model(config.model)
    plan_groups(parts.module, config.optimizer)
    plan_tensor_axis(config, parts, shape)
    check_targets(config, parts, open_training_data(config, parts))


def build_trainer(job: Job, runtime: Runtime) -> Trainer:
    """The trainer of this rank. Collective. Raises `ConfigError`, on every rank alike, for what
    cannot work."""
    config, device = job.config, runtime.device
    shape = resolve_mesh(config, runtime.topology)
    mesh = build_mesh(
        shape.spec(),
        config.strategy.name,
        topology=runtime.topology,
        allow_cross_node=config.mesh.allow_cross_node,
        device_type=device.type,
    )
    plan = plan_batches(
        config, shape, data_coordinate(mesh), pad=job.restarted or config.launch.elastic
    )
    parts = build_model(config.model)
    data = open_training_data(config, parts)
    check_same_data(data.fingerprint)
    check_targets(config, parts, data)
    sample = data.train.shape
    flops = flops_per_sequence(job, parts, sample) if runtime.is_first else None
    tensor_plan = plan_tensor_axis(config, parts, shape)
    activations = predict_activations(config, parts, mesh, plan, tensor_plan, sample)
    model = parallelize(
        parts.module,
        mesh,
        config.parallel(),
        seed=config.train.seed,
        init=parts.init,
        tensor_plan=tensor_plan,
        weights=parts.weights,
        topology=runtime.topology,
    )
    optimizer = build_optimizer(model, config.optimizer)
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
        sample=sample,
        flops_per_sequence=flops,
        device=device,
        run_dir=job.run_dir,
        predicted=activations
        | predict_communication(
            model,
            mesh,
            accumulation=plan.accumulation,
            during_accumulation=config.sync.during_accumulation,
        ),
        classes=data.classes,
    )
    for axis, sent in update_bytes(optimizer).items():
        if (key := f"comm/{axis}/bytes") in facts.predicted:
            facts.predicted[key] += sent
    # what an export to another format needs to know
    described = {**facts.layout(), "model": dataclasses.asdict(config.model)}
    checkpointer = Checkpointer(
        config.checkpoint, job.run_dir, mesh, model, optimizer, layout=described
    )
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
        data_fingerprint=data.fingerprint,
    )
    restored = checkpointer.restore(restarted=job.restarted)
    if restored is not None:
        check_position(restored, data, config)
        trainer.load_state_dict(restored)
    trainer.recorder.begin(trainer.progress.step)
    return trainer


def flops_per_sequence(job: Job, parts: ModelParts, sample: SampleShape) -> int | None:
    """Counted once per job: restarted workers read what the first ones wrote, since counting loads
    a second's worth of torch."""
    if job.restarted:
        try:
            with open(os.path.join(job.run_dir, "layout.json")) as file:
                known: int | None = json.load(file)["flops_per_sequence"]
            return known
        except (OSError, ValueError, KeyError):
            log.info("layout.json of the earlier workers cannot be read; FLOPs are counted again")
    return count_flops(parts.module, functools.partial(sample.example, 1), parts.loss)


def build_recorder(
    config: TrainConfig, facts: RunFacts, mesh: DeviceMesh, *, first: bool
) -> Recorder:
    """Every rank records; only the first writes and speaks. Shows the header."""
    display = writer = None
    if first:
        unit = {"tokens": "tok", "images": "img"}[facts.sample.noun]
        display = ConsoleDisplay(config.metrics.console, config.train.steps, unit)
        for line in facts.lines():
            display.say(line)
        facts.write_layout()
        texts = {
            "config": f"```yaml\n{to_yaml(config)}\n```",
            "mesh": "```\n" + "\n".join(facts.lines()) + "\n```",
        }
        writer = MetricsWriter(
            facts.run_dir,
            texts,
            tensorboard=config.metrics.tensorboard,
            hparams=facts.hparams(config.optimizer.lr),
        )
    flops = facts.flops_per_sequence
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
        predicted=facts.predicted,
        slow_axes=facts.slow_axes(),
        profiler=StepProfiler(
            facts.run_dir, dist.get_rank(), facts.device, config.profile.steps, config.profile.ranks
        ),
    )


def resolve_mesh(config: TrainConfig, topology: Topology) -> MeshShape:
    """The sizes of the mesh axes on the machines that are there."""
    spec = MeshSpec.from_config(config.mesh)
    if config.launch.elastic:
        return spec.resolve_elastic(config.strategy.name, topology, config.launch.node_range[1])
    return spec.resolve(config.strategy.name, topology)


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
    computes_in = DTYPES[config.precision.param if config.precision.cast_forward_inputs else "fp32"]
    return count_tensor_axis(
        tensor_twin(parts.module, mesh, config.parallel(), tensor_plan),
        mesh,
        parts.loss,
        functools.partial(sample.example, plan.micro_batch_size, floating=computes_in),
        CommunicationMeter(mesh, dry=True),
        accumulation=plan.accumulation,
        during_accumulation=config.sync.during_accumulation,
        reduce_dtype=torch.float32 if config.sync.engine == "parallel2d" else None,
    )


def plan_batches(config: TrainConfig, shape: MeshShape, data_rank: int, *, pad: bool) -> BatchPlan:
    """This data rank's share of every global batch. ``pad``: sizes need not divide, because the
    number of ranks is not what the job began with."""
    return BatchPlan(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_rank=data_rank,
        data_ranks=shape.data_ranks,
        allow_padding=pad,
    )


def open_training_data(config: TrainConfig, parts: ModelParts) -> OpenData:
    """The configured data, with targets where the model has outputs; prepared first where it has
    not been.

    Raises `ConfigError` for data that the model does not read, and for fewer images than a global
    batch takes.
    """
    seq_len, name = config.train.seq_len, config.data.name
    if parts.reads not in (None, "images" if name == "images" else "tokens"):
        gives = (
            f"{words_of(config.model)}: {type(parts.module).__name__} reads {parts.reads}, "
            f"and data={name} gives"
        )
        if name == "images":
            raise ConfigError(
                f"{gives} images: set data=stdlib, text, tokens or hf, or a model of images, such "
                "as model.architecture=vit"
            )
        raise ConfigError(
            f"{gives} token ids: set data=images data.path=FOLDER, with a subfolder of images per "
            "class"
        )
    if name != "images":
        return open_data(
            config.data, seq_len=seq_len, seed=config.train.seed, context=parts.context(seq_len)
        )
    data = open_data(fit_images(config.data, parts), seed=config.train.seed)
    if data.train.ends_before(0, batch := config.train.global_batch_size) or (
        data.train.end is None and len(data.train) < batch
    ):
        raise ConfigError(
            f"train.global_batch_size={batch} is more than the {len(data.train)} training images "
            f"of {config.data.path}"
        )
    return data


def fit_images(data: DataConfig, parts: ModelParts) -> DataConfig:
    """``data`` with the image size and channels that the model reads, where they are not given.
    Raises `ConfigError` when nobody names a size, or the model does not take what is given."""
    size, channels = (
        data.image_size or parts.images.size,
        data.channels or parts.images.channels or 3,
    )
    kind = type(parts.module).__name__
    if size is None:
        raise ConfigError(
            f"data.image_size is required: {kind} names no image_size in a configuration of its own"
        )
    if channels not in (1, 3):
        raise ConfigError(
            f"data=images gives 1 or 3 channels (data.channels), and {kind} reads {channels}"
        )
    own = parts.images.channels or channels, parts.images.size or size
    if (channels, size) != own:  # convolutions take many sizes, patches one: it is tried
        error = _error_on_images(parts.module, channels, size)
        # without storage some run on none
        if error is not None and _error_on_images(parts.module, *own) is None:
            reason = str(error).split("\n")[0]
            raise ConfigError(
                f"{kind} does not read images of data.channels={channels}, "
                f"data.image_size={size}: {reason}"
            )
    return dataclasses.replace(data, image_size=size, channels=channels)


def _error_on_images(model: nn.Module, channels: int, size: int) -> Exception | None:
    example, _ = labelled_images(channels, size).example(1, "meta")
    try:
        copy.deepcopy(model).to("meta").eval()(example)
    except Exception as error:
        return error
    return None


def check_position(restored: Mapping[str, object], data: OpenData, config: TrainConfig) -> None:
    """Raises `ConfigError` when the checkpoint's position is one in other data;
    ``checkpoint.strict=false`` only says so."""
    saved = restored.get("data_fingerprint")
    if saved in (None, data.fingerprint):
        return
    text = (
        f"the checkpoint of step {restored['step']} was trained on other data, or on the same cut "
        "otherwise (files, tokenizer, "
        f"train.seq_len, image size, train.seed, data.*): here sample {restored['samples']} is "
        "another one"
    )
    if config.checkpoint.strict:
        raise ConfigError(
            f"{text}; checkpoint.load=model_only starts over with its weights, "
            "checkpoint.strict=false goes on at that position"
        )
    log.warning("%s; going on at that position", text)


def plan_tensor_axis(
    config: TrainConfig, parts: ModelParts, shape: MeshShape
) -> Mapping[str, object] | None:
    """The tensor-parallel plan, or None without a tensor axis. Raises `ConfigError` when the model
    cannot be split so."""
    if shape.tensor == 1:
        return None
    if isinstance(config.model, LlamaModel) and config.train.seq_len % shape.tensor:
        raise ConfigError(
            f"train.seq_len={config.train.seq_len} must be a multiple of "
            f"mesh.tensor={shape.tensor}: norms run on slices of "
            "the sequence"
        )
    try:
        plan = (
            parts.tensor_plan(parts.module, shape.tensor) if parts.tensor_plan is not None else None
        )
        if plan:
            resolve_plan(parts.module, plan, shape.tensor)
            return plan
    except ValueError as error:
        raise ConfigError(str(error)) from None
    raise ConfigError(
        f"mesh.tensor={shape.tensor}: {type(parts.module).__name__} has no tensor-parallel plan; "
        "give one with "
        "model.tensor_plan={pattern: word} or package.module:function, or set mesh.tensor=1"
    )


def check_targets(config: TrainConfig, parts: ModelParts, data: OpenData) -> None:
    """Raises `ConfigError` when the data hold token ids that the model has no row for, or more
    classes than it tells apart."""
    classes = len(data.classes)
    if classes and parts.images.classes is not None and parts.images.classes < classes:
        raise ConfigError(
            f"model.arguments.num_labels={parts.images.classes} is smaller than the {classes} "
            f"classes of data.path={config.data.path}; "
            f"it must be at least {classes}"
        )
    if parts.vocab_size is not None and parts.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={parts.vocab_size} is smaller than the {data.vocab_size} token ids "
            f"of data={config.data.name}; "
            f"it must be at least {data.vocab_size}"
        )

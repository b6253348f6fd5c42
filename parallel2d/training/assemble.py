"""Builds the components of a run from its configuration, in the order of their dependencies.

`check` runs the checks that need only one process, so that an invalid job ends before any worker
starts; `build_trainer` builds everything on a rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config.job import Job, SchedulerConfig, TrainConfig
from parallel2d.base.device import accelerator_type, preserve_rng_states
from parallel2d.base.errors import ConfigError, counted
from parallel2d.base.exchange import check_same_data
from parallel2d.base.replicas import current
from parallel2d.base.runtime import Runtime, barrier, seed_everything
from parallel2d.base.topology import Topology
from parallel2d.models.adapters import settings_of
from parallel2d.parallel.chunked_head import ChunkedHead
from parallel2d.parallel.cost.state_memory import state_bytes
from parallel2d.parallel.mesh import data_coordinate, place_mesh
from parallel2d.parallel.mesh_sizes import MeshShape, resolve_mesh
from parallel2d.parallel.parallelize import apply_layout
from parallel2d.parallel.parallelize.activation_checkpointing import saved_operators
from parallel2d.parallel.parallelize.float8 import check_float8
from parallel2d.parallel.parallelize.layout import Layout, SampleShape, Workload, resolve
from parallel2d.parallel.parallelize.precision import input_dtype
from parallel2d.parallel.parallelize.preconditions import check as check_model
from parallel2d.parallel.parallelize.preconditions import check_parameters
from parallel2d.parallel.sync.ema import EMAWeights
from parallel2d.parallel.weights.source import WeightSource
from parallel2d.training.checkpoint import Checkpointer, in_memory_checkpoints
from parallel2d.training.checkpoint.resume import check_resume
from parallel2d.training.data.batch import token_sequences
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.data.opening import OpenData
from parallel2d.training.hooks import Hook, build_hooks, check_hooks
from parallel2d.training.loss.model_loss import ModelLoss
from parallel2d.training.metrics.recorder import Recorder
from parallel2d.training.micro_batch_size import probe_micro_batch_size
from parallel2d.training.model_families import (
    ModelParts,
    build_model,
    name_of_head,
    plan_tensor_axis,
)
from parallel2d.training.optimizer import build_optimizer, muon_names, plan_groups
from parallel2d.training.optimizer.learning_rate import learning_rate
from parallel2d.training.run_description import RunFacts, build_recorder, describe_run, outputs
from parallel2d.training.run_directory.ownership import OwnershipLock
from parallel2d.training.run_directory.start import accept_start, read_segments
from parallel2d.training.trainer import Trainer
from parallel2d.training.training_data import (
    check_position,
    check_targets,
    fit_to_data,
    open_training_data,
)


def check(config: TrainConfig, topology: Topology) -> None:
    """Raise `ConfigError` for a mesh, batch, model or data set that cannot work on
    ``topology``."""
    shape = resolve_mesh(config, topology)
    least = config.launch.min_replicas
    if least > shape.replicate:
        raise ConfigError(
            f"launch.min_replicas={least}: the mesh has {counted(shape.replicate, 'replica')}"
        )
    batches = plan_batches(config, shape, data_rank=0, pad=False)
    check_resume(config.checkpoint.resume)
    saved_operators(config.activation_checkpointing.keep)
    device_type = accelerator_type()
    check_float8(config.precision, device_type)
    parts = build_model(config.model)
    check_parameters(parts.module)
    plan_groups(parts.module, config.optimizer)
    # The layout is checked before the data, because preparing data may take long.
    sample = token_sequences(config.train.seq_len)
    lay_out(config, parts, shape, batches, sample, device_type)
    name_of_head(config, parts)
    check_hooks(config.train.hooks)
    data = open_training_data(config, parts)
    check_targets(config, parts, data)
    fit_to_data(config, data)


def lay_out(
    config: TrainConfig,
    parts: ModelParts,
    shape: MeshShape,
    batches: BatchPlan,
    sample: SampleShape,
    device_type: str,
    mesh: DeviceMesh | None = None,
) -> Layout:
    """Return the layout of the job for the axis sizes in ``shape``. The check before the start, the
    training and the planner all use this function, so they have the same layout. ``mesh``: as in
    `resolve`. Raises `ConfigError` for invalid settings."""
    workload = Workload(
        batches.micro_batch_size,
        batches.accumulation,
        sample.cast(input_dtype(config.precision)),
        config.optimizer,
        frozenset(muon_names(parts.module, config.optimizer)),
        device_type,
        config.train.ema is not None,
    )
    plan = plan_tensor_axis(config, parts, shape.tensor)
    return resolve(
        config.parallel(),
        shape,
        parts.module,
        workload,
        mesh=mesh,
        tensor_plan=plan,
        conditional=getattr(config.model, "conditional", None),
    )


def build_trainer(
    job: Job, runtime: Runtime, *, quiet: bool = False, hooks: Sequence[Hook] = ()
) -> Trainer:
    """Build the trainer of this rank. Collective. Raises `ConfigError` on every rank for an invalid
    job.

    Args:
        quiet: True to write no files and show nothing on the console.
        hooks: called after the hooks of ``train.hooks``.
    """
    config, device, topology = job.config, runtime.device, runtime.topology
    shape = MeshShape.from_sizes(job.sizes) if job.sizes else resolve_mesh(config, topology)
    mesh = place_mesh(shape, topology, config.mesh.allow_cross_node, device.type)
    replicas = current()
    if replicas is not None:
        replicas.needs_all = config.strategy.placement.splits_updates
    # Tensor ranks of one data rank draw the same numbers, so that their dropout masks agree.
    seed_everything(config.train.seed + data_coordinate(mesh), config.train.deterministic)
    # After a restart the number of ranks may differ, and may not divide the global batch evenly.
    pad = job.restarted or config.launch.elastic
    plan = plan_batches(config, shape, data_coordinate(mesh), pad=pad)
    parts = build_model(config.model)
    data = open_training_data(config, parts)
    check_same_data(data.fingerprint + data.validation_fingerprint)
    check_targets(config, parts, data)
    config = fit_to_data(config, data)
    job = dataclasses.replace(job, config=config)

    check_model(parts.module, mesh, config.parallel(), topology)
    layout = lay_out(config, parts, shape, plan, data.train.shape, device.type, mesh)
    comes_back = replicas is not None and replicas.incarnation > 0
    writes = runtime.is_first and not quiet and not comes_back
    facts = describe_run(job, runtime, mesh, data, parts, layout, writes)
    loss = ModelLoss(config, parts)  # inspects the model before parallelization
    model, optimizer = _shard(config, parts, layout, mesh, topology)
    loss.chunked_head = _chunked_head(config, model, facts.head)
    loss.learn(model, data.train, device)
    for stream in data.streams:
        stream.prepare_by(loss.prepare)
    if config.train.memory_gib is not None:
        size, measured = _probe(config, model, optimizer, loss, data, layout, runtime, plan)
        config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, micro_batch_size=size)
        )
        job = dataclasses.replace(job, config=config)
        plan = plan_batches(config, shape, data_coordinate(mesh), pad=pad)
        with preserve_rng_states():
            # `lay_out` needs a model on meta, and the first module is already sharded.
            parts = build_model(config.model)
        layout = lay_out(config, parts, shape, plan, data.train.shape, device.type, mesh)
        facts = describe_run(job, runtime, mesh, data, parts, layout, writes)
        facts = dataclasses.replace(facts, measured=measured)
    checkpointer = Checkpointer(
        config.checkpoint,
        job.run_dir,
        mesh,
        model,
        optimizer,
        layout=_facts_of_checkpoint(config, facts, model),
        copies=in_memory_checkpoints(config.checkpoint, job.run_dir, mesh),
        more_state=data.train.collect,
    )
    trainer = Trainer(
        config=config,
        run_dir=job.run_dir,
        model=model,
        loss=loss,
        mesh=mesh,
        device=device,
        optimizer=optimizer,
        data=data,
        plan=plan,
        recorder=build_recorder(facts, mesh, model, first=writes),
        checkpointer=checkpointer,
        ownership=OwnershipLock(job.run_dir, saves=config.checkpoint.enabled),
        hooks=[*build_hooks(config.train.hooks), *hooks],
        replicas=replicas,
        take_roles=functools.partial(_take_roles, job, facts),
    )
    if comes_back:  # this replica receives its state from the other replicas
        trainer.recorder.begin(0)
        return trainer
    restored = checkpointer.restore(restarted=job.restarted, begin=False)
    if restored is not None:
        check_position(restored, data, config)
        trainer.load_state_dict(restored)
    # If the run has already ended, the records of earlier starts stay unchanged.
    if not quiet and trainer.has_steps():
        _begin_records(job, facts, trainer, first=runtime.is_first)
    else:
        trainer.recorder.writer = None  # the file may belong to a start that still trains
        trainer.recorder.begin(trainer.progress.step)
    return trainer


def _shard(
    config: TrainConfig, parts: ModelParts, layout: Layout, mesh: DeviceMesh, topology: Topology
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the parallelized model with initialized weights, and its optimizer. Collective."""
    source = WeightSource(
        parts.module,
        seed=config.train.seed,
        init=parts.init,
        broadcast_from=None,
        given=parts.weights,
        construct=parts.construct,
    )
    model = apply_layout(layout, parts.module, mesh, source, topology, config.train.seed)
    optimizer = build_optimizer(model, config.optimizer)
    if (decay := config.train.ema) is not None:
        average = EMAWeights(model)
        # This hook is registered after the hook of `build_optimizer` that exchanges weights between
        # replicas. Hooks run in the order of registration, and the EMA must average the exchanged
        # weights.
        optimizer.register_step_post_hook(lambda *_: average.update(decay))
    return model, optimizer


def _probe(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: ModelLoss,
    data: OpenData,
    layout: Layout,
    runtime: Runtime,
    plan: BatchPlan,
) -> tuple[int, str]:
    """Return the micro-batch size for ``train.memory_gib``, and a line for the header. Collective,
    except in a restarted replica, which takes the size of the other replicas."""
    replicas = current()
    key = "micro_batch_size"
    if replicas is not None and replicas.incarnation > 0:
        size = int(replicas.store.get(key))
        return size, f"micro-batch {size}, as the other replicas"
    assert config.train.memory_gib is not None
    size, measured = probe_micro_batch_size(
        model,
        loss,
        data.train,
        runtime.device,
        share=plan.accumulation * plan.micro_batch_size,
        limit=int(config.train.memory_gib * 2**30),
        later=state_bytes(layout).optimizer,
    )
    optimizer.zero_grad()
    if replicas is not None:
        replicas.store.set(key, str(size))
    return size, measured


def _facts_of_checkpoint(config: TrainConfig, facts: RunFacts, model: nn.Module) -> dict[str, Any]:
    """Return the facts for the manifest of a checkpoint, with the model's configuration, tokenizer
    and adapters for exports to other formats."""
    tokenizer = {"path": config.data.tokenizer, "end_token": config.data.end_token}
    record = {**facts.record(), "model": dataclasses.asdict(config.model), "tokenizer": tokenizer}
    if adapted := settings_of(model):
        record["adapters"] = adapted
    return record


def _take_roles(job: Job, facts: RunFacts, trainer: Trainer) -> None:
    """Make this rank the leader after a failure of the old leader. The new leader continues the
    run's records."""
    step, recorder = trainer.progress.step, trainer.recorder
    trainer.callbacks.speaks()
    trainer.ownership.take()
    segments = read_segments(job.run_dir)
    number = segments[-1].number if segments else 1
    recorder.take_over(*outputs(facts), step, number)
    trainer.checkpointer.take_over(trainer.state_dict())


def _begin_records(job: Job, facts: RunFacts, trainer: Trainer, *, first: bool) -> None:
    """Take over the run directory for this start, and begin its checkpoints and metrics there.
    Called after all checks that may refuse the start. Collective."""
    finished, recorder = trainer.progress.step, trainer.recorder
    number, not_before = 1, 0.0
    if first:
        start = accept_start(job, facts.record(), finished, trainer.ownership)
        number, not_before = start.segment.number, start.begun_before_s
        for change in start.changes:
            recorder.log(f"changed     {change}")
        if start.before is not None:
            _log_new_rate(job.config, start.before.config, finished + 1, recorder)
    # The other ranks wait until this start owns the directory: `begin` moves checkpoints aside,
    # and a start that is refused must leave them unchanged.
    barrier("start")
    trainer.checkpointer.begin()
    recorder.begin(finished, number, restarted=job.restarted, not_before=not_before)


def _log_new_rate(
    config: TrainConfig, before: dict[str, Any], step: int, recorder: Recorder
) -> None:
    """Warn if the schedule changes the learning rate at ``step``. ``before``: the config of the
    previous start."""
    now = learning_rate(step, config.train.steps, config.optimizer.lr, config.scheduler)
    try:
        schedule, lr = SchedulerConfig(**before["scheduler"]), before["optimizer"]["lr"]
        old = learning_rate(step, before["train"]["steps"], lr, schedule)
        is_same = math.isclose(now * lr, old * config.optimizer.lr)
    except (KeyError, TypeError, ValueError):  # written by another version of parallel2d
        return
    if not is_same:
        recorder.log(
            f"warning: the learning rate of step {step} is {now:.3g}; with the schedule of the "
            f"start before it was {old:.3g}. scheduler={config.scheduler.name} ends at "
            f"train.steps={config.train.steps} now; scheduler=constant optimizer.lr={old:.3g} "
            "keeps the rate"
        )


def _chunked_head(config: TrainConfig, model: nn.Module, head: str | None) -> ChunkedHead | None:
    chunk = config.train.loss_chunk
    if head is None or chunk is None:
        return None
    return ChunkedHead(model, chunk, head, config.train.z_loss)


def plan_batches(config: TrainConfig, shape: MeshShape, data_rank: int, *, pad: bool) -> BatchPlan:
    """Return this data rank's share of every global batch. ``pad``: True if the number of data
    ranks may not divide the global batch, as after a restart on fewer ranks."""
    return BatchPlan(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_rank=data_rank,
        data_ranks=shape.data_ranks,
        allow_padding=pad,
    )

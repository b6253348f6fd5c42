"""A certificate for a job of the train command: `certify_job`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import time
from collections.abc import Mapping
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from parallel2d.assemble import build_trainer, plan_batches, resolve_mesh
from parallel2d.certification.batches import ListedFeed, batches_of, is_as_configured
from parallel2d.certification.bounds import Bounds
from parallel2d.certification.certificate import Certificate, Discrepancy, versions
from parallel2d.certification.collective_log import CollectiveLog
from parallel2d.certification.examiner import Examiner, new_rows
from parallel2d.certification.expected_run import ExpectedRun, StepInputs, outer_begins
from parallel2d.certification.gathered import cuts_of
from parallel2d.certification.plain_model import (
    PlainModel,
    fill,
    gathered_modules,
    switch_dropout_off,
)
from parallel2d.certification.session import Session
from parallel2d.certification.size import fitting_model
from parallel2d.certification.steps import layout_of, shorten_period, steps_of
from parallel2d.config import Job, OptimizerConfig, SchedulerConfig, TrainConfig
from parallel2d.config.serialization import to_yaml
from parallel2d.data import StepBatch
from parallel2d.exchange import broadcast
from parallel2d.mesh import MeshShape
from parallel2d.model_families import ModelParts, build_model
from parallel2d.optimizer import build_optimizer, set_learning_rate
from parallel2d.parallelize.precision import input_dtype
from parallel2d.progress import StepOutcome
from parallel2d.runtime import Runtime
from parallel2d.sync.one_process import Cut
from parallel2d.trainer import Trainer
from parallel2d.weights.named_tensors import parameters_by_name

_MOST_SKIPPED = 12  # steps that fp16 may skip until its loss scale fits


def certify_job(job: Job, runtime: Runtime) -> Certificate:
    """Trains some steps on the job's layout and compares them with one process. Collective; the
    certificate is the same on every rank. Nothing else of it stays."""
    begin = time.perf_counter()
    notes: list[str] = []
    config = _certified(job.config, notes)
    config.model = fitting_model(config, runtime, notes)
    quiet = dataclasses.replace(job, config=config, restarted=False)
    trainer = build_trainer(quiet, runtime, quiet=True)
    try:
        certificate = _compare(trainer, config, runtime, notes)
    finally:
        trainer.recorder.close()
        del trainer
        gc.collect()
    if certificate is not None:
        certificate.seconds = time.perf_counter() - begin
        certificate.configuration = yaml.safe_load(to_yaml(job.config))
    on_all_ranks: Certificate = broadcast(certificate)
    return on_all_ranks


def _certified(config: TrainConfig, notes: list[str]) -> TrainConfig:
    """``config`` without what a few steps do not need."""
    config = copy.deepcopy(config)
    config.checkpoint.enabled = False
    config.checkpoint.resume = "never"
    config.checkpoint.memory_every = 0
    config.metrics.communication = True
    config.metrics.tensorboard = False
    config.profile.steps = []
    config.train.validate_every = 0
    config.sync.compare_every = 0
    # Updates that are large enough to be seen.
    config.scheduler = SchedulerConfig("constant")
    config.data.epochs = 0
    shorten_period(config.sync, notes)
    config.train.steps = max(config.train.steps, _most_steps(config) + 1)
    return config


def _most_steps(config: TrainConfig) -> int:
    """How many steps there may be until enough of them were finite."""
    skipped = _MOST_SKIPPED if config.precision.loss_scaling else 0
    return steps_of(config.sync) + skipped


def _compare(
    trainer: Trainer, config: TrainConfig, runtime: Runtime, notes: list[str]
) -> Certificate | None:
    shape = resolve_mesh(config, runtime.topology)
    parallel = config.parallel()
    bounds = Bounds.of(parallel, shape, config.optimizer.name, runtime.device.type)
    examiner = certificate = None
    parts = build_model(config.model)
    if shape.tensor > 1 and switch_dropout_off(trainer.model):
        notes.append("dropout is off, since tensor ranks draw for their own parts")
    cuts = cuts_of(parameters_by_name(trainer.model), trainer.mesh)
    if runtime.is_first:
        expected = _expected_run(trainer, config, parts, shape, runtime, cuts)
        certificate = Certificate(
            layout_of(config.strategy, config.sync, config.precision.name, shape),
            type(parts.module).__name__,
            new_rows(expected.plain.module),
            bounds.words,
            notes=notes,
            versions=versions(),
        )
        clip = config.optimizer.clip_norm
        examiner = Examiner(expected, certificate, bounds, trainer.mesh, clip)
    # One forward for each micro-batch
    session = Session(trainer.model, trainer.mesh, trainer.optimizer, examiner, bounds.same_kernels)
    trainer.model.register_forward_pre_hook(session.note_random_state, prepend=True)
    meter = trainer.recorder.meter
    assert meter is not None
    # Muon gathers matrices in bf16.
    update_bytes = 2 if config.optimizer.name == "muon" else 8
    predicted = trainer.recorder.predicted
    collectives = CollectiveLog(meter, trainer.mesh, parallel, predicted, update_bytes)
    by_data_rank = _batches(trainer, config, shape, runtime)
    feed: Any = ListedFeed(by_data_rank[trainer.data_rank])
    trainer.begin(feed)
    session.begin()
    compared = 0
    for number in range(1, _most_steps(config) + 1):
        inputs = _inputs(number, by_data_rank, trainer, shape) if runtime.is_first else None
        trainer.gradients_ready = functools.partial(_gradients_ready, session, inputs)
        session.start_step(number)
        collectives.start()
        trainer.step(feed)
        found = collectives.check(
            number, predictable=is_as_configured(number) and session.runs_each_group_once
        )
        session.end_step()
        if certificate is not None:
            for each in found:
                certificate.add(each)
        compared += trainer.progress.skipped_in_a_row == 0
        if compared == steps_of(config.sync):
            break
    if certificate is not None:
        certificate.steps = compared
        certificate.collectives = collectives.lines
        if compared < steps_of(config.sync):
            certificate.discrepancies.append(
                Discrepancy("steps", compared, "too few steps were finite to compare them")
            )
    return certificate


def _new_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    optimizer = build_optimizer(module, config)
    set_learning_rate(optimizer, config.lr)
    return optimizer


def _gradients_ready(
    session: Session,
    inputs: StepInputs | None,
    summed: Tensor,
    outcome: StepOutcome,
) -> None:
    if inputs is not None and session.examiner is not None:
        session.examiner.samples(outcome.batch_hash, inputs.samples)
    session.gradients_ready(inputs, summed.item(), outcome.grad_norm, outcome.finite)


def _inputs(
    number: int, by_data_rank: list[list[StepBatch]], trainer: Trainer, shape: MeshShape
) -> StepInputs:
    """What all data ranks read in step ``number``, on rank 0."""
    batches = [each[number - 1] for each in by_data_rank]
    tokens = max(sum(each.valid_tokens for each in batches), 1)
    return StepInputs(
        number,
        [each.micro_batches for each in batches],
        scale=shape.data_ranks / tokens * trainer.scaler.scale,
        loss_scale=trainer.scaler.scale,
        divisor=float(tokens),
        samples=sum(each.sample_hash for each in batches),
    )


def _batches(
    trainer: Trainer, config: TrainConfig, shape: MeshShape, runtime: Runtime
) -> list[list[StepBatch]]:
    """By data rank and step what is read; on other ranks than the first only their own."""
    found: list[list[StepBatch]] = []
    # One more than there are steps: the token count of the next batch is agreed on in each.
    steps = _most_steps(config) + 1
    for data_rank in range(shape.data_ranks):
        if data_rank != trainer.data_rank and not runtime.is_first:
            found.append([])
            continue
        plan = plan_batches(config, shape, data_rank, pad=trainer.plan.pads)

        def read(position: int, plan: Any = plan) -> Any:
            batches = [trainer.training.read(each) for each in plan.positions(position)]
            return [batch.to(runtime.device) for batch in batches]

        found.append(
            batches_of(read, config.train.global_batch_size, steps, data_rank, shape.data_ranks)
        )
    return found


def _expected_run(
    trainer: Trainer,
    config: TrainConfig,
    parts: ModelParts,
    shape: MeshShape,
    runtime: Runtime,
    cuts: Mapping[str, Cut],
) -> ExpectedRun:
    module = fill(parts.module, config.precision, parts.init, config.train.seed, parts.weights)
    module.to(runtime.device)
    if shape.tensor > 1:
        switch_dropout_off(module)
    floating = input_dtype(config.precision)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch.inputs
        if floating is not None and inputs.is_floating_point():
            inputs = inputs.to(floating)
        ids = batch.document_ids
        output = model(inputs) if ids is None else model(inputs, ids)
        return parts.loss(output, batch.targets)

    plain = PlainModel(module, loss_of, config.precision, gathered_modules(trainer.model))
    return ExpectedRun(
        plain,
        functools.partial(_new_optimizer, config=config.optimizer),
        shape,
        config.sync,
        seed=config.train.seed,
        splits_updates=config.strategy.splits_updates,
        begins=outer_begins(trainer.model),
        cuts=cuts,
    )

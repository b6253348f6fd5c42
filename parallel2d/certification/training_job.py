"""A certificate for a job of the train command: `certify_job`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import time
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.assemble import build_trainer, plan_batches, resolve_mesh
from parallel2d.certification.batches import ListedFeed, batches_of
from parallel2d.certification.certificate import Certificate
from parallel2d.certification.collective_log import CollectiveLog
from parallel2d.certification.expected_run import StepInputs
from parallel2d.certification.plain_model import fill
from parallel2d.certification.session import Session, open_session
from parallel2d.certification.size import fitting_model
from parallel2d.certification.steps import shorten_period, steps_of
from parallel2d.config import Job, OptimizerConfig, SchedulerConfig, StopConfig, TrainConfig
from parallel2d.data import StepBatch
from parallel2d.data.batch import Batch
from parallel2d.mesh import MeshShape
from parallel2d.model_families import Loss, build_model
from parallel2d.optimizer import build_optimizer, set_learning_rate
from parallel2d.parallelize.precision import input_dtype
from parallel2d.progress import StepOutcome
from parallel2d.runtime import Runtime
from parallel2d.trainer import Trainer

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
        session, steps = _compare(trainer, config, runtime, notes)
    finally:
        trainer.recorder.close()
        del trainer
        gc.collect()
    return session.certificate(steps, job.config, time.perf_counter() - begin)


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
    config.data.validation = {}
    config.train.epochs = None
    config.train.stop = StopConfig()
    config.train.hooks = []
    config.checkpoint.keep_best = None
    shorten_period(config.sync, notes)
    config.train.steps = max(config.train.steps, _most_steps(config) + 1)
    return config


def _most_steps(config: TrainConfig) -> int:
    """How many steps there may be until enough of them were finite."""
    skipped = _MOST_SKIPPED if config.precision.loss_scaling else 0
    return steps_of(config.sync) + skipped


def _compare(
    trainer: Trainer, config: TrainConfig, runtime: Runtime, notes: list[str]
) -> tuple[Session, int]:
    """Trains and compares; how many steps were compared."""
    shape = resolve_mesh(config, runtime.topology)
    session = _session(trainer, config, notes)
    by_data_rank = _batches(trainer, config, shape, runtime)
    feed: Any = ListedFeed(by_data_rank[trainer.data_rank])
    trainer.begin(feed)
    session.begin()
    compared = 0
    for number in range(1, _most_steps(config) + 1):
        inputs = _inputs(number, by_data_rank, trainer, shape) if runtime.is_first else None
        trainer.gradients_ready = functools.partial(_gradients_ready, session, inputs)
        session.start_step(number)
        trainer.step(feed)
        session.end_step()
        compared += trainer.progress.skipped_in_a_row == 0
        if compared == steps_of(config.sync):
            break
    if session.examiner is not None and compared < steps_of(config.sync):
        session.examiner.differs("steps", "too few steps were finite to compare them")
    return session, compared


def _session(trainer: Trainer, config: TrainConfig, notes: list[str]) -> Session:
    parts = build_model(config.model)
    seed = config.train.seed
    recorder, parallel = trainer.recorder, config.parallel()
    assert recorder.meter is not None
    session = open_session(
        trainer.model,
        trainer.mesh,
        parallel,
        trainer.optimizer,
        CollectiveLog(
            recorder.meter, trainer.mesh, parallel, recorder.predicted, trainer.optimizer
        ),
        plain=lambda: fill(parts.module, config.precision, parts.init, seed, parts.weights),
        loss_of=functools.partial(
            _loss_of,
            parts.loss_in_training(config.train.z_loss),
            input_dtype(config.precision),
        ),
        make_optimizer=functools.partial(_new_optimizer, config=config.optimizer),
        seed=seed,
        clip=config.optimizer.clip_norm,
        notes=notes,
    )
    # One forward for each micro-batch
    trainer.model.register_forward_pre_hook(session.note_random_state, prepend=True)
    return session


def _loss_of(loss: Loss, floating: torch.dtype | None, model: nn.Module, batch: Batch) -> Tensor:
    """As the trainer's, written once more, so that an error there shows."""
    inputs = batch.inputs
    if floating is not None and inputs.is_floating_point():
        inputs = inputs.to(floating)
    ids = batch.document_ids
    output = model(inputs) if ids is None else model(inputs, ids)
    return loss(output, batch.targets)


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

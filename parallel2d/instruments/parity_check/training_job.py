"""Parity check for a job of the train command: `certify_job`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from typing import Any

import torch

from parallel2d.base.config import Job, LlamaModel
from parallel2d.base.device import free_and_total_bytes
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import broadcast
from parallel2d.base.memory import free_memory
from parallel2d.base.runtime import Runtime
from parallel2d.instruments.parity_check.checked_steps import certify_steps, choose_steps
from parallel2d.instruments.parity_check.parity_report import ParityReport
from parallel2d.instruments.parity_check.reference_run import CheckedRun
from parallel2d.parallel.mesh import data_coordinate, mesh_shape
from parallel2d.training.assemble import build_trainer, plan_batches
from parallel2d.training.data.batch import Batch
from parallel2d.training.model_families import build_model
from parallel2d.training.trainer import Trainer

# Estimated memory of the check in copies of the weights: weights of two steps, gradients, two
# moments, and the parallel model
_COPIES = 8
_SHARE = 0.6  # share of the free memory that the check may use
_LAYERS = ("n_layers", "num_hidden_layers", "n_layer", "num_layers")  # keys of the layer count


def certify_job(job: Job, runtime: Runtime) -> ParityReport:
    """Train some steps on the job's layout and compare them with a reference run in one process.
    Collective. The report is the same on every rank. The check writes no files and does not change
    ``job``."""
    notes: list[str] = []
    config = copy.deepcopy(job.config)
    steps = choose_steps(config, notes)
    config.checkpoint.enabled = False
    config.checkpoint.resume = "never"
    config.checkpoint.memory_every = 0
    config.metrics.communication = True
    config.metrics.tensorboard = False
    # The check reads more steps than training may have, so the data repeat without end.
    config.data.epochs = 0
    config.data.validation = {}
    config.train.epochs = None
    config.train.hooks = []
    config.model = fitting_model(config.model, runtime.device, notes)
    quiet = dataclasses.replace(job, config=config, restarted=False)
    trainer = build_trainer(quiet, runtime, quiet=True)
    meter = trainer.recorder.meter
    assert meter is not None
    # The meter is installed again for the checked steps.
    meter.remove()
    try:
        checked = _checked(trainer, notes)
        # The comparison of the head runs forwards that do not belong to a step, so it comes first.
        first = checked.read(1, data_coordinate(trainer.mesh))[0]
        trainer.loss.compare_head(trainer.model, first)
        return certify_steps(checked, meter, steps)
    finally:
        trainer.recorder.close()
        del trainer
        gc.collect()


def _checked(trainer: Trainer, notes: list[str]) -> CheckedRun:
    config = trainer.config
    parts = build_model(config.model)
    return CheckedRun(
        model=trainer.model,
        mesh=trainer.mesh,
        shape=mesh_shape(trainer.mesh),
        config=config.parallel(),
        optimizer=trainer.optimizer,
        optimizer_config=config.optimizer,
        loss_of=trainer.loss,
        read=functools.partial(_micro_batches, trainer),
        count=lambda batch: batch.valid_tokens,
        predicted=trainer.recorder.predicted,
        plain=parts.module,
        seed=config.train.seed,
        init=parts.init,
        weights=parts.weights,
        notes=notes,
        construct=parts.construct,
    )


def _micro_batches(trainer: Trainer, step: int, data_rank: int) -> list[Batch]:
    """Return the micro-batches of a data rank in ``step``, with different samples in every step.
    Odd steps have one global batch, as in training. Even steps have two global batches, to check
    gradient accumulation. In even steps the last micro-batch has a different number of targets on
    each data rank, and no target on the last data rank."""
    shape = mesh_shape(trainer.mesh)
    plan = plan_batches(trainer.config, shape, data_rank, pad=trainer.plan.pads)
    size = trainer.config.train.global_batch_size
    positions = plan.positions(2 * step * size)
    if step % 2 == 0:
        positions = positions + plan.positions((2 * step + 1) * size)
    batches = []
    for each in positions:
        batches.append(trainer.training.read(each).to(trainer.device))
    if step % 2 == 0:
        share = (data_rank + 1) / shape.data_ranks
        batches[-1] = trainer.loss.without_first(batches[-1], share)
    return batches


def fitting_model(model: Any, device: torch.device, notes: list[str]) -> Any:
    """Return a copy of the ``model`` section that fits in rank 0's memory, with fewer layers if
    necessary. Collective. Raises `ConfigError` if the model does not fit and the configuration has
    no key for the number of layers, or if even one layer does not fit."""
    room = broadcast(free_bytes(device) * _SHARE)
    model = copy.deepcopy(model)
    settings = vars(model) if isinstance(model, LlamaModel) else model.arguments
    key = next((key for key in _LAYERS if key in settings), "")
    layers = settings.get(key, 1)
    while (needed := _bytes_needed(model)) > room:
        if settings.get(key, 1) <= 1:
            raise ConfigError(
                f"certify: one process needs {needed / 2**30:.1f} GiB for this model and has "
                f"{room / 2**30:.1f}; certify a smaller model of the same kind"
            )
        settings[key] //= 2
    if settings.get(key, 1) < layers:
        notes.append(f"{key}={settings[key]} instead of {layers}: too many for one process")
    return model


def _bytes_needed(model: Any) -> float:
    return 4.0 * _COPIES * sum(map(torch.Tensor.numel, build_model(model).module.parameters()))


def free_bytes(device: torch.device) -> float:
    if device.type != "cpu":
        return float(free_and_total_bytes(device)[0])
    return float(free_memory())

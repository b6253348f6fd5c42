"""A certificate for a model of one's own loop: `certify`."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from parallel2d import exchange
from parallel2d.certification.certificate import Certificate
from parallel2d.certification.collective_log import CollectiveLog
from parallel2d.certification.expected_run import StepInputs
from parallel2d.certification.plain_model import LossOf, fill
from parallel2d.certification.session import Session, open_session
from parallel2d.certification.steps import shorten_period, steps_of
from parallel2d.config import OptimizerConfig, ParallelConfig
from parallel2d.cost.traffic import predict_communication
from parallel2d.errors import ConfigError
from parallel2d.gradients import gradient_norm, scale_gradients
from parallel2d.mesh import data_coordinate, mesh_shape
from parallel2d.metrics.communication import CommunicationMeter
from parallel2d.optimizer import build_optimizer, update_bytes
from parallel2d.parallelize import parallelize
from parallel2d.sync import accumulate, set_step, updated_parameters
from parallel2d.weights.initial_values import Initializer


def certify(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    loss: LossOf,
    batch: Any,
    *,
    optimizer: OptimizerConfig | None = None,
    seed: int = 0,
    init: Initializer | None = None,
    tensor_plan: Mapping[str, object] | None = None,
) -> Certificate:
    """Trains some steps on ``mesh`` and compares them with one process. Collective; the certificate
    is the same on every rank.

    Args:
        model: plain, with real weights or on meta; it is left as it is, copies are trained.
        config: as `parallelize` gets it. A long ``sync.every`` is shortened in the copy.
        loss: ``loss(model, batch)``, a scalar: the sum over the samples of ``batch``.
        batch: a global batch, the same on every rank: tensors, in lists, tuples or dictionaries,
            whose dim 0 counts samples; at least two for each data rank.
        optimizer: default AdamW.
        seed, init, tensor_plan: as of `parallelize`.

    Raises `ConfigError` for a batch that is too small, and for what `parallelize` refuses.
    """
    begin = time.perf_counter()
    shape = mesh_shape(mesh)
    config = copy.deepcopy(config)
    settings = optimizer or OptimizerConfig()
    notes: list[str] = []
    shorten_period(config.sync, notes)
    batches = _Batches(batch, shape.data_ranks)
    parallel = parallelize(
        copy.deepcopy(model), mesh, config, seed=seed, init=init, tensor_plan=tensor_plan
    )
    trained_by = build_optimizer(parallel, settings)
    meter = CommunicationMeter(mesh)
    predicted = predict_communication(
        parallel, mesh, accumulation=1, during_accumulation=config.sync.during_accumulation
    )
    for axis, sent in update_bytes(trained_by).items():
        predicted[f"comm/{axis}/bytes"] = predicted.get(f"comm/{axis}/bytes", 0.0) + sent
    # The tensor axis depends on what the model computes.
    predicted.pop("comm/tensor/bytes", None)
    session = open_session(
        parallel,
        mesh,
        config,
        trained_by,
        CollectiveLog(meter, mesh, config, predicted, trained_by),
        plain=lambda: fill(copy.deepcopy(model), config.precision, init, seed),
        loss_of=loss,
        make_optimizer=functools.partial(build_optimizer, config=settings),
        seed=seed,
        clip=settings.clip_norm,
        notes=notes,
    )
    loop = _Loop(parallel, mesh, config, trained_by, loss, session, settings.clip_norm)
    meter.install()
    try:
        session.begin()
        for number in range(1, steps_of(config.sync) + 1):
            meter.start()
            loop.step(number, batches)
    finally:
        meter.remove()
    return session.certificate(steps_of(config.sync), config, time.perf_counter() - begin)


class _Batches:
    """Parts of a global batch: `micro_batches`."""

    def __init__(self, batch: Any, data_ranks: int) -> None:
        sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        self._batch = batch
        self._data_ranks = data_ranks
        self._samples = min(sizes, default=0) // data_ranks * data_ranks
        if len(sizes) != 1 or self._samples < 2 * data_ranks:
            raise ConfigError(
                f"certify: the tensors of batch have {sorted(sizes)} samples in dim 0; they must "
                f"have the same number, at least two for each of {data_ranks} data ranks"
            )

    def micro_batches(self, step: int, data_rank: int) -> list[Any]:
        """What a data rank reads in ``step``, from 1: whole, in two parts, in the other order with
        a last part that is smaller, and so on; other samples in every step."""
        share = self._samples // self._data_ranks
        begin = data_rank * share
        # Other samples come to a rank in every step but the third, which turns the second around.
        shift = step - (step % 4 == 3)
        places = [(begin + place + shift) % self._samples for place in range(share)]
        kind = (step - 1) % 4
        if kind in (0, 3):
            return [self._take(places)]
        parts = [places[: share // 2], places[share // 2 :]]
        if kind == 2:
            parts.reverse()
            # Some samples are not read by anybody, on each data rank another number.
            parts[-1] = parts[-1][data_rank % len(parts[-1]) :]
        return [self._take(part) for part in parts]

    def samples(self, step: int) -> int:
        """That all data ranks read together."""
        per_rank = [self.micro_batches(step, rank) for rank in range(self._data_ranks)]
        return sum(tree_leaves(part)[0].shape[0] for parts in per_rank for part in parts)

    def _take(self, places: list[int]) -> Any:
        return tree_map(
            lambda leaf: leaf[places] if isinstance(leaf, Tensor) else leaf, self._batch
        )


class _Loop:
    """A training loop as a user would write it."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        config: ParallelConfig,
        optimizer: torch.optim.Optimizer,
        loss: LossOf,
        session: Session,
        clip: float,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._session = session
        self._clip = clip
        self._mode = config.sync.during_accumulation
        self._data_rank = data_coordinate(mesh)
        self._data_ranks = mesh_shape(mesh).data_ranks

    def step(self, number: int, batches: _Batches) -> None:
        """One step, from 1. Collective."""
        set_step(self._model, number)
        self._session.start_step(number)
        samples = batches.samples(number)
        scale = self._data_ranks / samples
        summed = 0.0
        for micro in accumulate(
            self._model, batches.micro_batches(number, self._data_rank), self._mode
        ):
            self._session.note_random_state()
            loss = self._loss(self._model, micro)
            (loss * scale).backward()
            summed += loss.item()
        parameters = updated_parameters(self._model)
        norm = float(gradient_norm(parameters))
        # With diloco each replica has its own.
        norms = exchange.all_gather(norm)
        finite = all(map(math.isfinite, norms))
        inputs = None
        if self._session.examiner is not None:
            read = [batches.micro_batches(number, rank) for rank in range(self._data_ranks)]
            inputs = StepInputs(number, read, scale, loss_scale=1.0, divisor=float(samples))
        mean_norm = sum(norms) / len(norms)
        self._session.gradients_ready(inputs, summed, mean_norm, finite)
        if finite:
            scale_gradients(parameters, min(1.0, self._clip / (norm + 1e-6)))
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._session.end_step()

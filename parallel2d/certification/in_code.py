"""A certificate for a model of one's own loop: `certify`."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from parallel2d import exchange
from parallel2d.certification.batches import is_as_configured
from parallel2d.certification.bounds import Bounds
from parallel2d.certification.certificate import Certificate, versions
from parallel2d.certification.collective_log import CollectiveLog
from parallel2d.certification.examiner import Examiner, new_rows
from parallel2d.certification.expected_run import ExpectedRun, StepInputs, outer_begins
from parallel2d.certification.gathered import cuts_of
from parallel2d.certification.plain_model import LossOf, PlainModel, fill, gathered_modules
from parallel2d.certification.session import Session
from parallel2d.certification.steps import layout_of, shorten_period, steps_of
from parallel2d.config import OptimizerConfig, ParallelConfig
from parallel2d.cost.traffic import predict_communication
from parallel2d.errors import ConfigError
from parallel2d.gradients import gradient_norm, scale_gradients
from parallel2d.mesh import data_coordinate, mesh_shape
from parallel2d.metrics.communication import CommunicationMeter
from parallel2d.optimizer import Muon, build_optimizer, update_bytes
from parallel2d.parallelize import parallelize
from parallel2d.sync import accumulate, set_step, updated_parameters
from parallel2d.weights.initial_values import Initializer
from parallel2d.weights.named_tensors import parameters_by_name


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
    bounds = Bounds.of(config, shape, settings.name, mesh.device_type)
    parallel = parallelize(
        copy.deepcopy(model), mesh, config, seed=seed, init=init, tensor_plan=tensor_plan
    )
    trained_by = build_optimizer(parallel, settings)
    cuts = cuts_of(parameters_by_name(parallel), mesh)
    examiner = None
    if dist.get_rank() == 0:
        plain = fill(copy.deepcopy(model), config.precision, init, seed).to(mesh.device_type)
        run = ExpectedRun(
            PlainModel(plain, loss, config.precision, gathered_modules(parallel)),
            functools.partial(build_optimizer, config=settings),
            shape,
            config.sync,
            seed=seed,
            splits_updates=config.strategy.splits_updates,
            begins=outer_begins(parallel),
            cuts=cuts,
        )
        certificate = Certificate(
            layout_of(config.strategy, config.sync, config.precision.name, shape),
            type(model).__name__,
            new_rows(plain),
            bounds.words,
            notes=notes,
            versions=versions(),
        )
        examiner = Examiner(run, certificate, bounds, mesh, settings.clip_norm)
    session = Session(parallel, mesh, trained_by, examiner, bounds.same_kernels)
    loop = _Loop(parallel, mesh, config, trained_by, loss, session, settings.clip_norm)
    loop.run(steps_of(config.sync), batches)
    found = None
    if examiner is not None:
        found = examiner.certificate
        found.steps = steps_of(config.sync)
        found.seconds = time.perf_counter() - begin
    on_all_ranks: Certificate = exchange.broadcast(found)
    return on_all_ranks


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
        self._meter = CommunicationMeter(mesh)
        predicted = predict_communication(
            model, mesh, accumulation=1, during_accumulation=self._mode
        )
        # The tensor axis depends on what the model computes.
        predicted.pop("comm/tensor/bytes", None)
        is_muon = isinstance(optimizer, Muon)
        for axis, sent in update_bytes(optimizer).items():
            predicted[f"comm/{axis}/bytes"] = predicted.get(f"comm/{axis}/bytes", 0.0) + sent
        self._collectives = CollectiveLog(self._meter, mesh, config, predicted, 2 if is_muon else 8)

    def run(self, steps: int, batches: _Batches) -> None:
        self._meter.install()
        try:
            self._session.begin()
            for number in range(1, steps + 1):
                self._step(number, batches)
        finally:
            self._meter.remove()
        if self._session.examiner is not None:
            self._session.examiner.certificate.collectives = self._collectives.lines

    def _step(self, number: int, batches: _Batches) -> None:
        set_step(self._model, number)
        self._session.start_step(number)
        self._meter.start()
        self._collectives.start()
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
        found = self._collectives.check(
            number, predictable=is_as_configured(number) and self._session.runs_each_group_once
        )
        self._session.end_step()
        if self._session.examiner is not None:
            for each in found:
                self._session.examiner.certificate.add(each)

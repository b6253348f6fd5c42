"""Runs training steps on every rank, as in a user's training loop, and compares each step by a
`StepComparison`: `certify_steps`."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from parallel2d.base import exchange
from parallel2d.base.config import ParallelConfig, TrainConfig
from parallel2d.base.runtime import seed_everything
from parallel2d.instruments.parity_check.comparison import RankRecord, StepComparison
from parallel2d.instruments.parity_check.parity_report import ParityReport
from parallel2d.instruments.parity_check.reference_run import (
    CheckedRun,
    seed_forward,
    switch_dropout_off,
)
from parallel2d.parallel.gradients import (
    clip_factor,
    gradient_norm,
    scale_gradients,
    without_partial,
)
from parallel2d.parallel.mesh import axis_positions, data_coordinate
from parallel2d.parallel.model_structure import fqn_of
from parallel2d.parallel.sync import accumulate, set_step
from parallel2d.parallel.sync.methods import method_of
from parallel2d.parallel.sync.updates import outer_sync
from parallel2d.parallel.weights.geometry import local_region
from parallel2d.parallel.weights.hashes import hashes_of
from parallel2d.parallel.weights.named_tensors import (
    parameters_by_name,
    reshard,
    undisturbed,
    updated_by_name,
)
from parallel2d.training.metrics.communication import CommunicationMeter

_FEWEST_STEPS = 5


def choose_steps(config: TrainConfig | ParallelConfig, notes: list[str]) -> int:
    """Return the number of steps of the check. With a periodic exchange of parameters, this
    function shortens the period in ``config``. The steps then cover two periods and the arrival of
    the last fragment."""
    sync = config.sync
    # The number of replicas is not known yet. The attributes that are read here do not depend on
    # it.
    method = method_of(config.strategy, sync, replicas=2)
    if method.warmup:
        notes.append("sync.warmup=0, to see steps after the first")
        sync.warmup = 0
    every = method.shortest_period
    if every == 0:
        return _FEWEST_STEPS
    if every < sync.every:
        notes.append(f"sync.every={every} instead of {sync.every}, to see outer steps")
        sync.every = every
    return max(_FEWEST_STEPS, 2 * sync.every + sync.delay + 1)


def certify_steps(checked: CheckedRun, meter: CommunicationMeter, steps: int) -> ParityReport:
    """Compare ``steps`` steps with the reference run. Collective; the report is the same on every
    rank."""
    begun = time.perf_counter()
    seed = torch.initial_seed()
    session = _CheckedSteps(checked, meter)
    meter.install()
    try:
        for number in range(1, steps + 1):
            session.step(number)
    finally:
        meter.remove()
        # Reset the generators, so that later code draws the same random numbers as without the
        # check.
        seed_everything(seed % 2**63, deterministic=False)
    found = None
    if session.comparison is not None:
        found = session.comparison.report
        found.steps = steps
        found.seconds = time.perf_counter() - begun
    report: ParityReport = exchange.broadcast(found)
    return report


class _CheckedSteps:
    """The steps of one check. All methods are collective."""

    def __init__(self, checked: CheckedRun, meter: CommunicationMeter) -> None:
        self._checked = checked
        self._meter = meter
        self._outer = outer_sync(checked.model)
        # With diloco each replica trains independently.
        place = axis_positions(checked.mesh).get("replicate", 0)
        self._replica = 0 if self._outer is None else place
        self._parameters = parameters_by_name(checked.model)
        self._updated = updated_by_name(checked.model)
        self._buffers_before = {name: value.clone() for name, value in self._buffers().items()}
        record = RankRecord(data_coordinate(checked.mesh))
        if checked.shape.tensor * checked.shape.context > 1 and switch_dropout_off(checked.model):
            checked.notes.append(
                "dropout is off, since context and tensor ranks draw for their own parts"
            )
            # Ranks with the same data must draw the same random numbers for replicated values.
            _hold(record, "random numbers", {"": torch.get_rng_state()}, record.data_rank)
        _hold(record, "weights", self._parameters, self._replica)
        weights = self._gather(self._parameters)
        records = exchange.gather(record)
        if checked.shape.context > 1:
            # The first forward also checks the context axis: it runs additional forwards with full
            # and with split sequences.
            with undisturbed(checked.model):
                checked.loss_of(checked.model, checked.read(1, record.data_rank)[0])
        self.comparison = StepComparison(checked) if records else None
        if self.comparison is not None:
            self.comparison.begin(records, weights)

    def step(self, number: int) -> None:
        """Run step ``number`` as in a user's training loop. The first step has number 1."""
        checked, model = self._checked, self._checked.model
        record = RankRecord(data_coordinate(checked.mesh))
        own = checked.read(number, record.data_rank)
        counts = exchange.all_gather(sum(map(checked.count, own)))
        scale = checked.shape.world_size / max(sum(counts), 1)
        set_step(model, number)
        self._meter.start()
        self._meter.log = record.collectives
        for micro_batch in accumulate(model, own, checked.config.sync.during_accumulation):
            seed_forward(number, record.data_rank, record.forwards)
            loss = checked.loss_of(model, micro_batch)
            (loss * scale).backward()
            record.forwards += 1
            record.loss += loss.item()
        record.norm = float(gradient_norm(self._updated.values()))
        whole = {"gradients": self._gather(self._gradients(record))}
        clip = checked.optimizer_config.clip_norm
        scale_gradients(self._updated.values(), clip_factor(record.norm, clip))
        checked.optimizer.step()
        checked.optimizer.zero_grad()
        self._meter.log = None
        whole |= self._after_update(record)
        records = exchange.gather(record)
        if self.comparison is not None:
            self.comparison.compare(number, records, whole)

    def _gradients(self, record: RankRecord) -> dict[str, Tensor]:
        """Return the gradients by FQN. A missing gradient is zero, so that all ranks have the same
        names."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._updated.items():
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter.detach())
            else:
                record.used.append(name)
            if isinstance(gradient, DTensor):
                gradient = without_partial(gradient)
            if parameter.requires_grad:
                found[name] = gradient
        _hold(record, "gradients", found, self._replica)
        return found

    def _after_update(self, record: RankRecord) -> dict[str, list[dict[str, Tensor]]]:
        # After a forward, parameters may still be unsharded and have old values.
        reshard(self._checked.model)
        _hold(record, "weights", self._parameters, self._replica)
        weights = self._gather(self._parameters)
        is_split = self._checked.method.splits_updates
        updated = self._gather(self._updated) if is_split else weights
        shared = []
        if self._outer is not None:
            _hold(record, "shared weights", self._outer.masters(), 0)
            shared = self._gather(self._outer.masters())[:1]
        for name, value in self._buffers().items():
            if not torch.equal(value, self._buffers_before[name]):
                record.buffers[name] = value
        return {"weights": weights, "updated": updated, "shared": shared}

    def _buffers(self) -> dict[str, Tensor]:
        named = self._checked.model.named_buffers()
        buffers: dict[str, Tensor] = {}
        for name, value in named:
            buffers[fqn_of(name)] = value.detach()
        return buffers

    @torch.no_grad()
    def _gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Gather the unsharded ``tensors`` on the first rank. The result is a list of one dict, or
        with diloco one dict per replica. All ranks must pass ``tensors`` in the same order."""
        log, self._meter.log = self._meter.log, None
        rank, first = dist.get_rank(), exchange.leader()
        replicas = 1 if self._outer is None else self._checked.shape.replicate
        leaders = self._checked.mesh.mesh.reshape(replicas, -1)[:, 0].tolist()
        found: list[dict[str, Tensor]] = []
        for _ in leaders:
            found.append({})
        for name, tensor in tensors.items():
            own = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank == first:
                # The next update must not change the result.
                found[0][name] = own.detach().clone()
            for replica, leader in enumerate(leaders[1:], 1):
                if rank == leader:
                    c10d.send(own.contiguous(), dst=first)
                elif rank == first:
                    found[replica][name] = torch.empty_like(own)
                    c10d.recv(found[replica][name], src=leader)
        self._meter.log = log
        return found


def _hold(record: RankRecord, what: str, tensors: Mapping[str, Tensor], group: int) -> None:
    """Record hashes of ``tensors``, for a comparison with the other ranks of ``group``."""
    held = record.held.setdefault(what, {})
    hashes = hashes_of(list(tensors.values()))
    for (name, tensor), value in zip(tensors.items(), hashes, strict=True):
        held[name] = (group, local_region(tensor), value)

"""The training loop: `Trainer.run`.

One step: take this rank's part of the global batch, accumulate gradients over its micro-batches,
agree with all ranks, update.

[Note: one agreement per step] All that ranks must learn from each other in a step goes into a
single all-reduce of a small fp64 vector: loss, token counts (of this batch and of the next, whose
weight is then known before it begins), the squared gradient norm, the batch's hash, whether
anything was not finite, whether some rank was told to save and end, hashes of what replicas must
have in common, and every rank's report about the step before, each in a row of its own. Every
decision is taken from that vector, so every rank takes the same one.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel2d.checkpoint import Checkpointer
from parallel2d.config import TrainConfig
from parallel2d.data import BatchFeed, BatchPlan, EndOfData, SampleStream, StepBatch
from parallel2d.errors import ConfigError
from parallel2d.gradients import scale_gradients, squared_norm_share
from parallel2d.mesh import data_coordinate, mesh_shape, sum_over_data_ranks
from parallel2d.metrics.clock import PhaseClock
from parallel2d.metrics.recorder import Recorder
from parallel2d.model_families import Loss
from parallel2d.optimizer import LossScaler, learning_rate, set_learning_rate
from parallel2d.parallelize.precision import input_dtype
from parallel2d.progress import Progress, RankReport, StepOutcome, problems_of_state
from parallel2d.sync import (
    accumulate,
    finish_updates,
    outer_parameters,
    updated_parameters,
)
from parallel2d.sync.comparison import ReplicaComparison
from parallel2d.sync.gradient_sync import gradient_syncs
from parallel2d.sync.updates import outer_sync, replicated_tensors, set_step


def _nothing(*_: object) -> None:
    pass


def _never() -> bool:
    return False


class Trainer:
    """Trains ``model``, which is parallel over ``mesh`` and has its weights already."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        model: nn.Module,
        loss: Loss,
        mesh: DeviceMesh,
        optimizer: torch.optim.Optimizer,
        training: SampleStream,
        validation: SampleStream | None,
        plan: BatchPlan,
        recorder: Recorder,
        checkpointer: Checkpointer,
        device: torch.device,
        data_fingerprint: str,
    ) -> None:
        self.config = config
        self.model = model
        self.loss = loss
        self.mesh = mesh
        self.optimizer = optimizer
        self.training = training
        self.validation = validation
        self.plan = plan
        self.recorder = recorder
        self.checkpointer = checkpointer
        self.device = device
        self.data_fingerprint = data_fingerprint
        # Hooks for the command that trains. The second gets this rank's summed loss and what the
        # ranks agreed on, when gradients are complete and not clipped yet. The third comes before a
        # step is saved and recorded; if it raises, nothing is written. The last is called once,
        # after this process's first step.
        self.stop_requested: Callable[[], bool] = _never
        self.gradients_ready: Callable[[Tensor, StepOutcome], object] = _nothing
        self.before_writing: Callable[[], object] = _nothing
        self.after_first_step: Callable[[], object] = _nothing

        self.scaler = LossScaler(config.precision.loss_scaling)
        self.clock = PhaseClock(device)
        self.progress = Progress()
        self.preempted = False
        self.parameters = [p for p in updated_parameters(model) if p.requires_grad]
        # Sharding casts inputs where it computes in another dtype than it stores; where both are
        # the same it casts nothing, and the trainer does.
        self._input_dtype = input_dtype(config.precision)
        # Which parameters were used travels in the step's agreement, if the engine can wait so long
        engines = gradient_syncs(model)
        self._engine = next((engine for engine in engines if engine.defer_agreement()), None)
        shape = mesh_shape(mesh)
        # With sync=diloco: the parameters that replicas share. Each replica clips its own gradient.
        self._outer = outer_sync(model)
        self._norms = 1
        self._norm_index = 0
        if self._outer is not None and shape.replicate > 1:
            self._norms = shape.replicate
            self._norm_index = mesh.get_local_rank("replicate")
        self._comparison: ReplicaComparison | None = None
        if shape.replicate > 1:
            self._comparison = ReplicaComparison(mesh, replicated_tensors(model))
        self._data_ranks = shape.data_ranks
        self.data_rank = data_coordinate(mesh)
        # Tensor ranks hold copies of their data rank's sums: only the first of them counts.
        self._counts = float(shape.tensor == 1 or mesh.get_local_rank("tensor") == 0)
        self._upcoming: StepBatch | None = None
        self._upcoming_tokens = 0  # of the global batch
        self._measured = recorder.measure({}, 0.0)

    def run(self) -> None:
        """Trains until ``train.steps``, until finite data end, or until told to save and end.
        Collective.

        Raises `ConfigError` after too many non-finite steps in a row.
        """
        feed = BatchFeed(self.training, self.plan, self.device, start=self.progress.samples)
        # Automatic collections would fall at different moments on different ranks, and all ranks
        # would wait for each of them.
        gc.collect()
        gc.disable()
        try:
            self.begin(feed)
            while self._upcoming is not None and not self.preempted:
                self.step(feed)
                self.after_first_step()
                self.after_first_step = _nothing
                if self.progress.step % self.config.train.gc_every == 0:
                    gc.collect()
            self.checkpointer.finish()
        finally:
            gc.enable()
            feed.close()

    def begin(self, feed: BatchFeed) -> None:
        """Reads the first batch and sums its token count over the ranks; those of later batches are
        in the agreement of the step before. Collective."""
        self._upcoming = self._take(feed) if self.progress.step < self.config.train.steps else None
        tokens = _valid_tokens(self._upcoming)
        count = torch.tensor([tokens], dtype=torch.float64, device=self.device)
        self._upcoming_tokens = int(sum_over_data_ranks(count, self.mesh).item())

    def step(self, feed: BatchFeed) -> None:
        """One optimizer step, saved if that is due, and recorded. Collective. Raises `RunTakenOver`
        on rank 0."""
        batch, tokens = self._upcoming, self._upcoming_tokens
        assert batch is not None, "begin() comes first, and no step after the last"
        step, train = self.progress.step + 1, self.config.train
        rate = learning_rate(step, train.steps, self.config.optimizer.lr, self.config.scheduler)
        set_learning_rate(self.optimizer, rate)

        begin, busy = time.perf_counter(), time.process_time()
        self.recorder.start_step(step)
        set_step(self.model, step)
        self.clock.start()
        summed = self._forward_backward(batch, tokens)
        self.clock.mark("forward_backward_s")
        self._upcoming = self._take(feed) if step < train.steps else None
        self.clock.mark("data_s")
        outcome = self._agree(summed, batch)
        self.clock.mark("sync_s")
        self.gradients_ready(summed, outcome)
        self._update(outcome)
        if self._upcoming is None:
            finish_updates(self.model)
        self.clock.mark("optimizer_s")
        seconds = {**self.clock.read(), "step_s": time.perf_counter() - begin}
        self._measured = self.recorder.measure(seconds, time.process_time() - busy)

        self._count(step, batch, outcome)
        self._end_if_hopeless()
        validation_loss = self._validate_if_due(step, seconds)
        self.before_writing()
        self.preempted = outcome.preempted
        last = self._upcoming is None
        self.checkpointer.save_if_due(
            step,
            self.state_dict(),
            last=last,
            preempted=self.preempted and not last,
            due=outcome.save_is_due,
        )
        seconds["checkpoint_s"] = self.checkpointer.blocked_s
        self.recorder.record(self.progress, outcome, rate, seconds, validation_loss, last=last)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors; plain numbers."""
        return {
            **asdict(self.progress),
            "scaler": self.scaler.state_dict(),
            "data_fingerprint": self.data_fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where `state_dict` was taken. Raises `ConfigError` for what it cannot have
        given."""
        problems = problems_of_state(state, state["step"])
        if problems:
            raise ConfigError(
                f"the checkpoint's state cannot be gone on from: {'; '.join(problems[:4])}"
            )
        self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**{item.name: int(state[item.name]) for item in fields(Progress)})

    @torch.no_grad()
    def validate(self, stream: SampleStream) -> float:
        """Mean loss over the valid tokens of the first ``train.validate_batches`` global batches of
        ``stream``. Collective."""
        feed = BatchFeed(stream, self.plan, self.device)
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, tokens
        try:
            for _ in range(self.config.train.validate_batches):
                batch = self._take(feed)
                if batch is None:
                    break
                for micro in batch.micro_batches:
                    sums[0] += self._loss_of(micro.inputs, micro.targets, micro.document_ids)
                sums[1] += batch.valid_tokens
        finally:
            feed.close()
            self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward nothing else frees what forward gathered
        sums *= self._counts
        dist.all_reduce(sums)
        return (sums[0] / sums[1].clamp(min=1)).item()

    def _validate_if_due(self, step: int, seconds: dict[str, float]) -> float | None:
        """Adds what it takes to ``seconds``."""
        every = self.config.train.validate_every
        if self.validation is None or not every or step % every:
            return None
        begin = time.perf_counter()
        with outer_parameters(self.model):
            loss = self.validate(self.validation)
        seconds["validation_s"] = time.perf_counter() - begin
        return loss

    def _take(self, feed: BatchFeed) -> StepBatch | None:
        try:
            return feed.next()
        except EndOfData:
            return None

    def _loss_of(self, inputs: Tensor, targets: Tensor, document_ids: Tensor | None) -> Tensor:
        if self._input_dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self._input_dtype)
        output = self.model(inputs) if document_ids is None else self.model(inputs, document_ids)
        return self.loss(output, targets)

    def _forward_backward(self, batch: StepBatch, tokens: int) -> Tensor:
        """Accumulates the gradient of the mean over the global batch's ``tokens``, times the loss
        scale. Returns this rank's summed loss, fp64."""
        # Gradients are averaged over the data ranks, so each loss is weighted by their number.
        weight = self._data_ranks / max(tokens, 1) * self.scaler.scale
        summed = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in accumulate(
            self.model, batch.micro_batches, self.config.sync.during_accumulation
        ):
            loss = self._loss_of(micro.inputs, micro.targets, micro.document_ids)
            (loss * weight).backward()
            summed += loss.detach()
        return summed

    def _agree(self, summed: Tensor, batch: StepBatch) -> StepOutcome:
        """See [Note: one agreement per step]. ``summed``: this rank's loss."""
        on_device = torch.cat([self._own_sums(summed, batch), self._own_norms()])
        broken = (~on_device.isfinite().all()).reshape(1).double()
        flags = [self.stop_requested(), self.checkpointer.time_is_up()]
        told = torch.tensor(flags, dtype=torch.float64)
        reports = self._own_report()
        nothing = torch.zeros(0, dtype=torch.float64)
        used = self._engine.vector() if self._engine else nothing
        comparison = self._comparison if self._comparison_is_due() else None
        hashes = comparison.vector() if comparison else nothing
        # The part that is made on CPU goes to the device in one copy. Numbers that are not finite
        # would spoil the sums of all ranks: zeros take their place, and `broken` tells of them.
        from_cpu = torch.cat([told, reports.flatten(), used, hashes]).to(self.device)
        vector = torch.cat([broken, on_device.nan_to_num(0.0, 0.0, 0.0), from_cpu])
        dist.all_reduce(vector)

        sizes = [1, 5, self._norms, 2, reports.numel(), len(used), len(hashes)]
        not_finite, sums, squares, told, rows, used, hashes = vector.split(sizes)
        loss_sum, tokens, batch_hash, upcoming_tokens, squared_change = sums.tolist()
        self._upcoming_tokens = int(upcoming_tokens)
        if self._engine:
            self._engine.agree_on(used.cpu())
        if comparison:
            comparison.check(hashes.cpu())
        finite = not_finite.item() == 0
        norms = (squares.sqrt() / self.scaler.scale).tolist()
        preempted, due = told.tolist()
        return StepOutcome(
            loss=loss_sum / max(tokens, 1.0) if finite else math.nan,
            grad_norm=sum(norms) / len(norms) if finite else math.nan,
            own_norm=norms[self._norm_index],
            outer_norm=math.sqrt(squared_change) if squared_change else None,
            tokens=int(tokens),
            batch_hash=int(batch_hash),
            finite=finite,
            preempted=preempted > 0,
            save_is_due=due > 0,
            ranks=self._reports_in(rows.view(reports.shape).tolist()),
        )

    def _own_sums(self, summed: Tensor, batch: StepBatch) -> Tensor:
        """What is summed over the ranks: loss, tokens, hash, tokens of the next batch, squared norm
        of the last outer step's change."""
        counts = torch.tensor(
            [batch.valid_tokens, batch.sample_hash, _valid_tokens(self._upcoming)],
            dtype=torch.float64,
            device=self.device,
        )
        of_data = torch.cat([summed.reshape(1), counts]) * self._counts
        change = torch.zeros(1, dtype=torch.float64, device=self.device)
        if self._outer is not None and self._outer.squared_change is not None:
            change += self._outer.squared_change
        return torch.cat([of_data, change])

    def _own_norms(self) -> Tensor:
        """This rank's share of the squared norms of the gradient: one, or where replicas train on
        their own one for each."""
        share = squared_norm_share(self.parameters, dist.get_world_size())
        norms = torch.zeros(self._norms, dtype=torch.float64, device=self.device)
        # The share counts the replicas as copies of each other.
        norms[self._norm_index] = share * self._norms
        return norms

    def _comparison_is_due(self) -> bool:
        every = self.config.sync.compare_every
        return self._comparison is not None and every > 0 and (self.progress.step + 1) % every == 0

    def _reports_in(self, rows: list[list[float]]) -> list[RankReport]:
        keys = self._measured.communication
        return [RankReport.from_floats(row, keys) for row in rows]

    def _own_report(self) -> Tensor:
        """This rank's report in its own row, zeros in the others': the sum over the ranks holds
        every rank's. fp64 [ranks, numbers of a report]."""
        values = torch.tensor(self._measured.floats(), dtype=torch.float64)
        reports = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64)
        reports[dist.get_rank()] = values
        return reports

    def _update(self, outcome: StepOutcome) -> None:
        if outcome.finite:
            clip = min(1.0, self.config.optimizer.clip_norm / (outcome.own_norm + 1e-6))
            if clip != 1.0 or self.scaler.enabled:
                scale_gradients(self.parameters, clip / self.scaler.scale)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.scaler.update(outcome.finite)

    def _count(self, step: int, batch: StepBatch, outcome: StepOutcome) -> None:
        progress = self.progress
        progress.step = step
        progress.samples = batch.position
        progress.tokens += outcome.tokens
        progress.skipped += not outcome.finite
        progress.skipped_in_a_row = 0 if outcome.finite else progress.skipped_in_a_row + 1

    def _end_if_hopeless(self) -> None:
        limit = self.config.train.max_skipped_steps
        if self.progress.skipped_in_a_row >= limit:
            raise ConfigError(
                f"loss or gradient was not finite in {limit} steps in a row "
                f"(train.max_skipped_steps), the last one step {self.progress.step}: lower "
                f"optimizer.lr={self.config.optimizer.lr} or use a wider precision"
            )


def _valid_tokens(batch: StepBatch | None) -> int:
    return batch.valid_tokens if batch is not None else 0

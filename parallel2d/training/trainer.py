"""The training loop: `Trainer.run`.

One step: take this rank's part of the global batch, accumulate gradients over its micro-batches,
agree with all ranks (`step_agreement`), update.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel2d.base.config import TrainConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.chunked_head import ChunkedHead
from parallel2d.parallel.gradients import scale_gradients
from parallel2d.parallel.mesh import data_coordinate, mesh_shape, sum_over_data_ranks
from parallel2d.parallel.parallelize.precision import input_dtype
from parallel2d.parallel.sync import (
    accumulate,
    finish_updates,
    outer_parameters,
    updated_parameters,
)
from parallel2d.parallel.sync.updates import set_step
from parallel2d.training.checkpoint import Checkpointer
from parallel2d.training.data.feed import BatchFeed, BatchPlan, EndOfData, StepBatch
from parallel2d.training.data.stream import SampleStream
from parallel2d.training.hooks import Agreed, Hook, HookCalls, RunView
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.phases import PhaseClock
from parallel2d.training.metrics.recorder import Recorder
from parallel2d.training.model_families import Loss
from parallel2d.training.optimizer import LossScaler, learning_rate, set_learning_rate
from parallel2d.training.progress import Progress, StepOutcome, WatchedMetrics, problems_of_state
from parallel2d.training.step_agreement import OwnPart, StepAgreement


def _nothing(*_: object) -> None:
    pass


def _never() -> bool:
    return False


class Trainer:
    """Trains ``model``, which is parallel over ``mesh`` and has its weights already.

    ``named_validation``: streams by name, validated on beside ``validation``; ``hooks``: see
    `hooks`, which are told ``run_dir`` and ``tokenizer`` (its name and fingerprint);
    ``loss``: of a step, with its z-loss; ``validation_loss``: without. ``chunked_head``: computes
    both in their place.
    """

    def __init__(
        self,
        *,
        config: TrainConfig,
        model: nn.Module,
        loss: Loss,
        validation_loss: Loss,
        mesh: DeviceMesh,
        optimizer: torch.optim.Optimizer,
        training: SampleStream,
        validation: SampleStream | None,
        plan: BatchPlan,
        recorder: Recorder,
        checkpointer: Checkpointer,
        device: torch.device,
        data_fingerprint: str,
        named_validation: Mapping[str, SampleStream] | None = None,
        hooks: Sequence[Hook] = (),
        run_dir: str = "",
        tokenizer: tuple[str, str] = ("", ""),
        chunked_head: ChunkedHead | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.loss = loss
        self.validation_loss = validation_loss
        self.chunked_head = chunked_head
        self.mesh = mesh
        self.optimizer = optimizer
        self.training = training
        self.validation = validation
        self.plan = plan
        self.recorder = recorder
        self.checkpointer = checkpointer
        self.device = device
        self.data_fingerprint = data_fingerprint
        # By the key of the loss, in the same order on every rank
        self.validation_sets: dict[str, SampleStream] = {}
        if validation is not None:
            self.validation_sets[keys.VALIDATION_LOSS] = validation
        for name, stream in sorted((named_validation or {}).items()):
            self.validation_sets[keys.set_loss_key(name)] = stream
        # Callbacks of the command that trains. The second gets this rank's summed loss and what the
        # ranks agreed on, when gradients are complete and not clipped yet. The third comes before a
        # step is saved and again before its row; if it raises, nothing more is written. The last is
        # called once, after this process's first step.
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
        self._agreement = StepAgreement(
            model, mesh, self.parameters, device, config.sync.compare_every
        )
        self._data_ranks = mesh_shape(mesh).data_ranks
        self.data_rank = data_coordinate(mesh)
        self._upcoming: StepBatch | None = None
        self._upcoming_tokens = 0  # of the global batch
        self._measured = recorder.measure({}, 0.0)
        self._watched = WatchedMetrics(config)
        self.stopped: str | None = None  # why the run ends before its last step
        self._told_saves = 0  # checkpoints of this process that hooks know of
        self.hooks = HookCalls(
            hooks,
            RunView(
                config=config,
                model=model,
                optimizer=optimizer,
                mesh=mesh,
                device=device,
                rank=dist.get_rank(),
                run_dir=run_dir,
                tokenizer=tokenizer,
                say=recorder.say,
                show_text=recorder.show_text,
            ),
        )

    def run(self) -> None:
        """Trains until ``train.steps``, until finite data end, until ``train.stop`` or a hook stops
        the run, or until told to save and end. Collective.

        Raises `ConfigError` after too many non-finite steps in a row, and `HookError`.
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
            self._end()
        finally:
            gc.enable()
            feed.close()

    def has_steps(self) -> bool:
        """Whether `run` will train, unless the data end here."""
        step = self.progress.step
        return step < self.config.train.steps and self._watched.reason_to_stop(step) is None

    def begin(self, feed: BatchFeed) -> None:
        """Reads the first batch and sums its token count over the ranks; those of later batches are
        in the agreement of the step before. Starts the hooks. Collective."""
        self.stopped = self._watched.reason_to_stop(self.progress.step)
        if self.stopped is not None:
            self.recorder.say(f"not trained on: {self.stopped}; other settings would go on")
        more = self.progress.step < self.config.train.steps and self.stopped is None
        self._upcoming = self._take(feed) if more else None
        if self.chunked_head is not None and self._upcoming is not None:
            micro = self._upcoming.micro_batches[0]
            ids = () if micro.document_ids is None else (micro.document_ids,)
            self.chunked_head.compare(micro.targets, micro.inputs, *ids)
        tokens = _valid_tokens(self._upcoming)
        count = torch.tensor([tokens], dtype=torch.float64, device=self.device)
        self._upcoming_tokens = int(sum_over_data_ranks(count, self.mesh).item())
        self.hooks.start(self.progress.step)

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
        validation = self._validate_if_due(step, seconds)
        self.before_writing()
        agreed = self._call_hooks(outcome, rate, validation, seconds)
        is_best = self._judge(outcome, validation, agreed)
        if self.stopped is not None and validation is None:
            validation = self._validate_if_due(step, seconds)  # the last step, which is known now
        self.preempted = outcome.preempted
        last = self._upcoming is None
        self.checkpointer.save_if_due(
            step,
            self.state_dict(),
            last=last,
            preempted=self.preempted and not last,
            due=outcome.save_is_due,
            wanted=is_best or agreed.save,
        )
        seconds["checkpoint_s"] = self.checkpointer.blocked_s
        # Hooks and a save take their time, in which another start may have set rows aside.
        self.before_writing()
        self.recorder.record(
            self.progress,
            outcome,
            rate,
            seconds,
            validation,
            last=last or self.preempted,
            given=agreed.metrics,
        )
        self._tell_saves()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors; plain numbers."""
        return {
            **asdict(self.progress),
            "scaler": self.scaler.state_dict(),
            "data_fingerprint": self.data_fingerprint,
            **self._watched.state_dict(),
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
        self._watched.load_state_dict(state)
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
        sums *= self._agreement.counts
        dist.all_reduce(sums)
        return (sums[0] / sums[1].clamp(min=1)).item()

    def _validate_if_due(self, step: int, seconds: dict[str, float]) -> dict[str, float] | None:
        """The losses by key. Adds what it takes to ``seconds``."""
        every = self.config.train.validate_every
        if not self.validation_sets or not every:
            return None
        last = self._upcoming is None
        if step % every and not last:
            return None
        begin = time.perf_counter()
        with outer_parameters(self.model):
            losses = {key: self.validate(stream) for key, stream in self.validation_sets.items()}
        seconds["validation_s"] = time.perf_counter() - begin
        return losses

    def _call_hooks(
        self,
        outcome: StepOutcome,
        rate: float,
        validation: Mapping[str, float] | None,
        seconds: dict[str, float],
    ) -> Agreed:
        """What the hooks of all ranks came to after this step. Adds what it takes to
        ``seconds``."""
        if not self.hooks.hooks:
            return Agreed()
        begin = time.perf_counter()
        metrics = {
            keys.LOSS: outcome.loss,
            keys.GRAD_NORM: outcome.grad_norm,
            keys.LEARNING_RATE: rate,
            keys.TOKENS: self.progress.tokens,
            keys.SAMPLES: self.progress.samples,
            keys.SKIPPED_STEPS: self.progress.skipped,
            keys.STEP_S: seconds["step_s"],
        }
        saved = self.checkpointer.save_is_done
        agreed = self.hooks.step(self.progress.step, metrics, validation, saved)
        if agreed.saved:
            self.checkpointer.collect()
            self._tell_saves()
        seconds["hooks_s"] = time.perf_counter() - begin
        return agreed

    def _judge(
        self, outcome: StepOutcome, validation: Mapping[str, float] | None, agreed: Agreed
    ) -> bool:
        """Compares what was measured in this step with the best so far. Returns whether this state
        is the best one; ends the run if it should stop."""
        step = self.progress.step
        measured = {
            keys.LOSS: outcome.loss,
            keys.GRAD_NORM: outcome.grad_norm,
            **(validation or {}),
            **agreed.metrics,
        }
        is_best = self._watched.measure(step, measured)
        self.stopped = self._watched.reason_to_stop(step)
        if self.stopped is None and agreed.stop is not None:
            self.stopped = f"stopped after step {step} by a hook: {agreed.stop}"
        if self.stopped is not None and self._upcoming is not None:
            self.recorder.say(self.stopped)
            self._upcoming = None
            finish_updates(self.model)
        return is_best

    def _tell_saves(self) -> None:
        published = self.checkpointer.published
        for step in published[self._told_saves :]:
            self.hooks.saved(step, self.checkpointer.store.path_of(step))
        self._told_saves = len(published)

    def _end(self) -> None:
        """After the last step of this process. Collective."""
        self._tell_saves()
        reason = self.stopped
        if reason is None:
            reason = "preempted" if self.preempted else "finished"
        self.hooks.end(self.progress.step, reason)
        for warning in self._watched.never_measured() if reason == "finished" else ():
            self.recorder.say(f"warning: {warning}")

    def _take(self, feed: BatchFeed) -> StepBatch | None:
        try:
            return feed.next()
        except EndOfData:
            return None

    def _loss_of(self, inputs: Tensor, targets: Tensor, document_ids: Tensor | None) -> Tensor:
        if self._input_dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self._input_dtype)
        arguments = (inputs,) if document_ids is None else (inputs, document_ids)
        if self.chunked_head is not None:
            return self.chunked_head.loss(targets, *arguments)
        loss = self.loss if self.model.training else self.validation_loss
        return loss(self.model(*arguments), targets)

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
        own = OwnPart(
            loss=summed,
            tokens=batch.valid_tokens,
            sample_hash=batch.sample_hash,
            upcoming_tokens=_valid_tokens(self._upcoming),
            stop_requested=self.stop_requested(),
            save_is_due=self.checkpointer.time_is_up(),
            report=self._measured,
        )
        outcome, self._upcoming_tokens = self._agreement.reach(
            self.progress.step + 1, own, self.scaler.scale
        )
        return outcome

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

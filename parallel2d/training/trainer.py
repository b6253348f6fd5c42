"""The training loop: `Trainer.run`.

Each step forms the quorum (`membership`) and accumulates gradients over this rank's micro-batches
of the global batch. Then the step all-reduces the status of all ranks (`step_status`). If all live
replicas have completed the gradients, the optimizer updates the parameters; otherwise the step is
repeated.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas import ReplicaLost, crossings, is_joining
from parallel2d.parallel.gradients import clip_factor, scale_gradients
from parallel2d.parallel.mesh import mesh_shape, sum_over_data_ranks
from parallel2d.parallel.parallelize.running_statistics import average_buffers
from parallel2d.parallel.sync import (
    accumulate,
    finish_updates,
    outer_parameters,
    reduce_zeros,
    updated_parameters,
)
from parallel2d.parallel.sync.updates import outer_sync, set_step
from parallel2d.parallel.weights.named_tensors import undisturbed
from parallel2d.training.assignment import Assignment
from parallel2d.training.data.feed import BatchFeed, EndOfData, StepBatch
from parallel2d.training.data.stream import SampleStream
from parallel2d.training.fixed_quorum import FixedQuorum
from parallel2d.training.hooks import AgreedResult, HookCalls, RunView
from parallel2d.training.membership import StepQuorum
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.phases import PhaseClock
from parallel2d.training.micro_batch_size import MicroBatchHalving
from parallel2d.training.optimizer.learning_rate import learning_rate, set_learning_rate
from parallel2d.training.optimizer.loss_scaler import LossScaler
from parallel2d.training.progress import Progress, StepOutcome, WatchedMetrics, problems_of_state
from parallel2d.training.step_status import RankStatus, StepStatus
from parallel2d.training.trainer_parts import LoopCallbacks, TrainerParts


@dataclass(kw_only=True, eq=False)
class Trainer(TrainerParts):
    """The training loop over the components in `TrainerParts`. Every rank constructs a trainer and
    calls its methods in the same order."""

    def __post_init__(self) -> None:
        config, data, recorder = self.config, self.data, self.recorder
        self.training = data.train
        # Keyed by the name of the loss, in the same order on every rank
        self.validation_sets: dict[str, SampleStream] = {}
        if data.validation is not None:
            self.validation_sets[keys.VALIDATION_LOSS] = data.validation
        for name, stream in sorted(data.named_validation.items()):
            self.validation_sets[keys.set_loss_key(name)] = stream

        self.scaler = LossScaler(config.precision.loss_scaling)
        self.clock = PhaseClock(self.device)
        self.progress = Progress()
        self.preempted = False
        # True if this run ends because a later start waits for its run directory
        self.gives_way = False
        self.parameters = [p for p in updated_parameters(self.model) if p.requires_grad]
        self._status = StepStatus(
            self.model, self.mesh, self.parameters, self.device, config.sync.compare_every
        )
        self.data_ranks = mesh_shape(self.mesh).data_ranks
        self.upcoming: StepBatch | None = None
        self.upcoming_tokens = 0  # valid tokens of the next global batch, over all ranks
        self._measured = recorder.measure({}, 0.0)
        self._watched = WatchedMetrics(config)
        self.stopped: str | None = None  # the reason for an end before the last step
        self._reported_saves = 0  # number of published checkpoints that were reported to hooks
        self.callbacks = LoopCallbacks()
        # True if a joining replica must run forward and backward too: the forward has collectives
        # across replicas, or replicas train independently (``sync=diloco``).
        self.forward_crosses = outer_sync(self.model) is not None
        self.quorum: FixedQuorum | StepQuorum = FixedQuorum(self.plan, self.data_ranks)
        if self.replicas is not None and len(self.replicas.ranks) > 1:
            self.quorum = StepQuorum(
                self, self.replicas, self.shared_state, lambda: self.take_roles(self)
            )
        view = RunView(
            config=config,
            model=self.model,
            optimizer=self.optimizer,
            mesh=self.mesh,
            device=self.device,
            rank=dist.get_rank(),
            run_dir=self.run_dir,
            tokenizer=data.tokenizer,
            say=recorder.log,
            show_text=recorder.show_text,
        )
        self._calls = HookCalls(self.hooks, view)
        repeats = config.train.memory_gib is not None and self.replicas is None
        self.halving = MicroBatchHalving(self.model, self.optimizer, enabled=repeats)

    def run(self, callbacks: LoopCallbacks | None = None) -> None:
        """Train until ``train.steps``, the end of the data, a stop by ``train.stop`` or a hook, or
        a request to save and stop. Collective.

        Raises `ConfigError` after too many consecutive non-finite steps, and `HookError` if a hook
        raises an error.
        """
        self.callbacks = callbacks or LoopCallbacks()
        plan, start = self.quorum.plan, self.progress.samples
        feed = BatchFeed(self.training, plan, self.device, start=start)
        # Automatic garbage collection would run at different times on different ranks, and each
        # collection would delay all ranks. `_take_steps` collects at the same step on every rank.
        gc.collect()
        gc.disable()
        try:
            self.begin(feed)
            self.quorum.start(self.callbacks.stop_requested, self._warm_up)
            self._take_steps(feed)
            self.checkpointer.finish()
            self.quorum.lead()
            self._end()
        finally:
            gc.enable()
            feed.close()

    def _take_steps(self, feed: BatchFeed) -> None:
        is_first = True
        while self.upcoming is not None and not self.preempted:
            try:
                self.step(feed)
                if is_first:
                    self.callbacks.first_step_done()
                    is_first = False
                if self.progress.step % self.config.train.gc_every == 0:
                    gc.collect()
            except ReplicaLost:
                if not self.quorum.needs_all:
                    raise
                # At the start of the next step all replicas roll back to a checkpoint. The results
                # of this step are discarded.
                self.quorum.lose_state()
                self.upcoming, self.preempted = self._no_batch(), False
            except Exception as error:
                error.step_of_run = self.progress.step + 1  # type: ignore[attr-defined]
                raise

    def has_steps(self) -> bool:
        """True if `run` will train at least one step, provided that the data have not ended."""
        step = self.progress.step
        return step < self.config.train.steps and self._watched.reason_to_stop(step) is None

    def begin(self, feed: BatchFeed) -> None:
        """Read the first batch, sum its token count over the ranks, and start the hooks. In later
        steps, the status all-reduce of the previous step sums this count. Collective."""
        self.stopped = self._watched.reason_to_stop(self.progress.step)
        if self.stopped is not None:
            self.recorder.log(f"not continued: {self.stopped}; change train.stop to continue")
        self.upcoming = self.take(feed) if self.has_steps() else None
        if self.upcoming is not None:
            self.loss.compare_head(self.model, self.upcoming.micro_batches[0])
        tokens = self.upcoming.valid_tokens if self.upcoming else 0
        count = torch.tensor([tokens], dtype=torch.float64, device=self.device)
        self.upcoming_tokens = int(sum_over_data_ranks(count, self.mesh).item())
        self._calls.start(self.progress.step)

    def step(self, feed: BatchFeed) -> None:
        """Run one optimizer step, save if a save is due, and record the step. If a replica fails,
        the survivors repeat the step until all survivors have completed the step. Collective.
        Raises `RunTakenOver` on rank 0 if another start has taken over the run directory.
        """
        begin, busy = time.perf_counter(), time.process_time()
        self.clock.start()
        assignment = self._form_quorum(feed)
        self.recorder.start_step(self.progress.step + 1)
        batch = self._read_part(assignment, feed, again=False)
        while True:
            step = self.progress.step + 1
            summed = self._gradients(step, assignment, batch)
            self.clock.mark("forward_backward_s")
            # The next batch is read before the status all-reduce, which also sums the tokens of the
            # next global batch. The losses of the next step are divided by this sum, which must be
            # known before the first backward pass of that step. Reading the batch here saves a
            # second all-reduce.
            is_last = step >= self.config.train.steps
            following = None if is_last else self.take(feed)
            self.clock.mark("data_s")
            own = self._own_status(summed, batch, following if assignment.computes else None)
            status = self._status.all_reduce(step, own)
            if self.quorum.should_commit(status):
                break
            assignment = self._form_quorum(feed)
            batch = self._read_part(assignment, feed, again=True)
        self.clock.mark("sync_s")
        scale = self.scaler.scale
        outcome, self.upcoming_tokens = self._status.conclude(step, status, own, scale)
        self.upcoming = following
        # The order from here on is the same on every rank. The update follows the status
        # all-reduce, which shows if the gradients of all ranks are finite. Validation and hooks see
        # the updated weights. The save follows the hooks, because a hook may request a save. A save
        # is collective, so the decision to save depends only on values that are equal on all ranks.
        saves_and_stops = self.quorum.finish_step(outcome)
        self.gives_way = outcome.gives_way
        rate = self._set_learning_rate(step)
        self._update(outcome)
        if self.upcoming is None:
            finish_updates(self.model)
        self.clock.mark("optimizer_s")
        seconds = {**self.clock.read(), "step_s": time.perf_counter() - begin}
        self._measured = self.recorder.measure(seconds, time.process_time() - busy)

        self._count(step, batch, outcome)
        validation = self._validate_if_due(step, seconds)
        self.ownership.check()
        agreed = self._call_hooks(outcome, rate, validation, seconds)
        is_best = self._judge(outcome, validation, agreed)
        if self.stopped is not None and validation is None:
            validation = self._validate_if_due(step, seconds)  # `_judge` made this the last step
        self.preempted = saves_and_stops
        last = self.upcoming is None
        self.checkpointer.save_if_due(
            step,
            self.state_dict(),
            last=last,
            preempted=self.preempted and not last,
            due=outcome.save_is_due,
            wanted=is_best or agreed.save,
        )
        seconds["checkpoint_s"] = self.checkpointer.blocked_s
        self.quorum.lead()
        # During hooks and saves, another start may take over the run directory and move the later
        # rows of the metrics file away. Without this second check, this rank would append its row
        # to the file of the new start.
        self.ownership.check()
        row = self.recorder.record(
            self.progress,
            outcome,
            rate,
            seconds,
            validation,
            last=last or self.preempted,
            lost_s=self.quorum.lost_s,
            given={**keys.of_batch(batch.metrics), **agreed.metrics, **self.quorum.metrics()},
        )
        if row is not None:
            self._calls.row(step, row)
        self._tell_saves()

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state for a checkpoint: numbers, strings and dicts, but no
        tensors."""
        return {
            **asdict(self.progress),
            "scaler": self.scaler.state_dict(),
            "data_fingerprint": self.data.fingerprint,
            **self.training.known_state(),
            **self._watched.state_dict(),
        }

    def shared_state(self) -> dict[str, Any]:
        """Return the state that a joining replica receives in addition to tensors."""
        return {
            **self.state_dict(),
            "upcoming_tokens": self.upcoming_tokens,
            "forward_crosses": self.forward_crosses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned. Raises `ConfigError` for an invalid
        state."""
        if problems := problems_of_state(state, state["step"]):
            listed = "; ".join(problems[:4])
            raise ConfigError(f"no run can continue from the checkpoint's state: {listed}")
        self.scaler.load_state_dict(state["scaler"])
        self._watched.load_state_dict(state)
        self.training.load(state)
        self.progress = Progress(**{item.name: int(state[item.name]) for item in fields(Progress)})

    def validate(self, stream: SampleStream) -> float:
        """Return the mean loss over the valid tokens of the first ``train.validate_batches`` global
        batches of ``stream``. Collective."""
        while True:
            sums = self._validation_sums(stream)
            dist.all_reduce(sums)
            # If a replica fails, its share is missing from the sums, so the survivors repeat the
            # complete evaluation.
            if not self.quorum.repeats_evaluation():
                return (sums[0] / sums[1].clamp(min=1)).item()

    def _validation_sums(self, stream: SampleStream) -> Tensor:
        """Return the summed loss and the number of valid tokens of this rank's share, in fp64. In a
        joining replica, which has no complete state yet, both are zero."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, tokens
        plan = self.quorum.plan
        if is_joining():
            return sums
        feed = BatchFeed(stream, plan, self.device)
        try:
            with undisturbed(self.model):
                for _ in range(self.config.train.validate_batches):
                    batch = self.take(feed)
                    if batch is None:
                        break
                    for micro in batch.micro_batches:
                        sums[0] += self.loss(self.model, micro)
                    sums[1] += batch.valid_tokens
        finally:
            feed.close()
        sums *= self._status.counts
        return sums

    def _validate_if_due(self, step: int, seconds: dict[str, float]) -> dict[str, float] | None:
        """Validate if a validation is due. Return the losses by key, and add the time to
        ``seconds``."""
        every = self.config.train.validate_every
        is_due = every and (step % every == 0 or self.upcoming is None)
        if not is_due or not self.validation_sets:
            return None
        begin = time.perf_counter()
        average_buffers(self.model)
        with outer_parameters(self.model):
            losses = {}
            for key, stream in self.validation_sets.items():
                losses[key] = self.validate(stream)
        seconds["validation_s"] = time.perf_counter() - begin
        return losses

    def _call_hooks(
        self,
        outcome: StepOutcome,
        rate: float,
        validation: Mapping[str, float] | None,
        seconds: dict[str, float],
    ) -> AgreedResult:
        """Call the hooks of all ranks after this step; return their combined result, and add the
        time to ``seconds``."""
        if not self.hooks:
            return AgreedResult()
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
        agreed = self._calls.step(self.progress.step, metrics, validation, saved)
        if agreed.saved:
            self.checkpointer.collect()
            self._tell_saves()
        seconds["hooks_s"] = time.perf_counter() - begin
        return agreed

    def _judge(
        self, outcome: StepOutcome, validation: Mapping[str, float] | None, agreed: AgreedResult
    ) -> bool:
        """Compare the metrics of this step with the best values so far, and end the run if a stop
        condition holds. Return True if this step has a new best value for
        ``checkpoint.keep_best``."""
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
        if self.stopped is not None and self.upcoming is not None:
            self.recorder.log(self.stopped)
            self.upcoming = None
            finish_updates(self.model)
        return is_best

    def _tell_saves(self) -> None:
        published = self.checkpointer.published
        for step in published[self._reported_saves :]:
            self._calls.saved(step, self.checkpointer.store.path_of(step))
        self._reported_saves = len(published)

    def _end(self) -> None:
        self._tell_saves()
        reason = self.stopped or ("preempted" if self.preempted else "finished")
        self._calls.end(self.progress.step, reason)
        if reason == "finished":
            for warning in self._watched.never_measured():
                self.recorder.log(f"warning: {warning}")

    def take(self, feed: BatchFeed) -> StepBatch | None:
        try:
            return feed.next()
        except EndOfData:
            return None

    def forward_backward(self, batch: StepBatch, tokens: int) -> Tensor:
        """Accumulate the gradient of the mean loss per token, multiplied by the loss scale. Return
        the sum of this rank's token losses in fp64. ``tokens``: the number of valid tokens in the
        global batch."""
        # Gradients are averaged over the data ranks, so each loss is multiplied by the number of
        # data ranks.
        weight = self.data_ranks / max(tokens, 1) * self.scaler.scale
        summed: Tensor | None = None
        mode = self.config.sync.during_accumulation
        for micro in accumulate(self.model, self.halving.split(batch.micro_batches), mode):
            begun = crossings()
            loss = self.loss(self.model, micro)
            self.forward_crosses |= crossings() != begun
            loss.backward(torch.full_like(loss, weight))
            summed = loss.detach().double() if summed is None else summed + loss.detach()
        if summed is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return summed

    def _form_quorum(self, feed: BatchFeed) -> Assignment:
        """Form the quorum of the next step. If this replica joins or rolls back, load the new
        state."""
        assignment = self.quorum.start_step()
        if (state := assignment.received) is not None:
            self.load_state_dict(dict(state))
            self.upcoming_tokens = state["upcoming_tokens"]
            self.forward_crosses = state["forward_crosses"]
        if (state := assignment.rolled_back) is not None:
            self.load_state_dict(dict(state))
            self.recorder.go_back(self.progress.step)
            feed.restart(assignment.plan, self.progress.samples)
            self.begin(feed)
        if assignment.note:
            self.quorum.lead()
            self.recorder.log(assignment.note)
        return assignment

    def _read_part(self, assignment: Assignment, feed: BatchFeed, *, again: bool) -> StepBatch:
        """Return this rank's share of the global batch. ``feed`` continues with the next global
        batch. ``again``: True if the step is repeated, so that ``feed`` has already read this
        global batch."""
        if assignment.computes:
            prepared = None if again else self.upcoming
            return feed.part(assignment.plan, self.progress.samples, prepared)
        # A rank that computes nothing still reads the later batches, so that it reaches the end of
        # the data in the same step as the other ranks.
        batch = self._no_batch()
        if again or assignment.received or assignment.plan.share != feed.plan.share:
            feed.restart(assignment.plan, batch.position)
        return batch

    def _no_batch(self) -> StepBatch:
        """Return the empty share of a rank that computes nothing in the next step."""
        return StepBatch([], 0, 0, 0.0, self.progress.samples + self.plan.global_batch_size)

    def _gradients(self, step: int, assignment: Assignment, batch: StepBatch) -> Tensor:
        """Accumulate the gradients of this step, and return this rank's summed loss; see
        `forward_backward`."""
        self.data_ranks = assignment.data_ranks

        def compute() -> Tensor:
            set_step(self.model, step, self.scaler.scale)
            return self.forward_backward(batch, self.upcoming_tokens)

        if assignment.computes:
            return self.halving.run(batch.micro_batches, compute)
        set_step(self.model, step, self.scaler.scale)
        is_full = self.config.sync.during_accumulation == "full"
        reduce_zeros(self.model, assignment.plan.accumulation if is_full else 1)
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _warm_up(self) -> None:
        assert self.upcoming is not None, "begin() comes first"
        self.forward_backward(self.upcoming, 1)

    def _own_status(
        self, summed: Tensor, batch: StepBatch, following: StepBatch | None
    ) -> RankStatus:
        return RankStatus(
            loss=summed,
            tokens=batch.valid_tokens,
            sample_hash=batch.sample_hash,
            upcoming_tokens=following.valid_tokens if following else 0,
            stop_requested=self.callbacks.stop_requested(),
            gives_way=self._must_give_way(),
            save_is_due=self.checkpointer.time_is_up(),
            is_ready=self.quorum.is_ready,
            replicas_lost_s=self.quorum.total_lost_s,
            report=self._measured,
        )

    def _must_give_way(self) -> bool:
        """True on the owner of the run directory if a later start waits for it."""
        requester = self.ownership.requester()
        if requester is None:
            return False
        self.recorder.log(f"{requester} waits for this run directory; saving and ending")
        return True

    def _set_learning_rate(self, step: int) -> float:
        steps, optimizer = self.config.train.steps, self.config.optimizer
        rate = learning_rate(step, steps, optimizer.lr, self.config.scheduler)
        set_learning_rate(self.optimizer, rate)
        return rate

    def _update(self, outcome: StepOutcome) -> None:
        if outcome.finite:
            clip = clip_factor(outcome.own_norm, self.config.optimizer.clip_norm)
            if clip != 1.0 or self.scaler.enabled:
                scale_gradients(self.parameters, clip / self.scaler.scale)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.scaler.update(outcome.finite)

    def _count(self, step: int, batch: StepBatch, outcome: StepOutcome) -> None:
        """Count the step. Raises `ConfigError` after too many consecutive non-finite steps."""
        self.progress.count(step, batch.position, outcome)
        limit = self.config.train.max_skipped_steps
        if self.progress.skipped_in_a_row >= limit:
            raise ConfigError(
                f"loss or gradient was not finite in {limit} steps in a row "
                f"(train.max_skipped_steps), the last one step {step}: lower "
                f"optimizer.lr={self.config.optimizer.lr} or use a wider precision"
            )

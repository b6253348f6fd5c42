"""How a `Trainer` goes on when replicas come and go: `Membership`. See [Note: replicas that never
stop] in `parallel2d.base.replicas`.

A replica that comes back builds everything by itself and is a member from then on, but for a step
in which it gets the state; see [Note: nobody waits for a replica that joins] in `state_transfer`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import TrainConfig
from parallel2d.base.exchange import broadcast
from parallel2d.base.replicas import Quorum, ReplicaLost, absent_ranks
from parallel2d.base.replicas.events import Member, post
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.sync.engine.accumulation import discard_accumulated
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.methods.method import UpdateFollower
from parallel2d.parallel.sync.updates import error_feedback_of, outer_sync
from parallel2d.training.checkpoint import Checkpointer
from parallel2d.training.data.feed import BatchFeed, BatchPlan, StepBatch
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.recorder import Recorder
from parallel2d.training.progress import Progress, StepOutcome
from parallel2d.training.state_transfer import KeptBuffers, Receiver, Sender, start_senders


class Trained(Protocol):
    """What a `Membership` needs of the `Trainer`, which says what it is."""

    config: TrainConfig
    callbacks: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    device: torch.device
    plan: BatchPlan
    data_ranks: int
    progress: Progress
    recorder: Recorder
    checkpointer: Checkpointer
    upcoming: StepBatch | None
    upcoming_tokens: int
    preempted: bool
    forward_crosses: bool

    def begin(self, feed: BatchFeed) -> None: ...
    def take(self, feed: BatchFeed) -> StepBatch | None: ...
    def forward_backward(self, batch: StepBatch, tokens: int) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Membership:
    """Follows ``replicas`` for ``trainer``. All ranks of a replica make the same calls.

    ``take_roles``: called on the rank that speaks for all from now on.
    """

    def __init__(
        self, trainer: Trained, replicas: Quorum, take_roles: Callable[[Any], None]
    ) -> None:
        self.trainer, self.replicas, self._take_roles = trainer, replicas, take_roles
        self._least = min(trainer.config.launch.min_replicas, len(replicas.ranks))
        if replicas.needs_all:
            self._least = len(replicas.ranks)
        self._requeue_exit_code = trainer.config.launch.requeue_exit_code
        self._planned = replicas.epoch
        self._dealt: int | None = None
        self._readers: list[Member] = []  # among whom batches from the feed are dealt
        self._senders: list[Sender] = []
        self._receiver: Receiver | None = None
        self._outer = outer_sync(trainer.model)
        self._speaks = not replicas.life and replicas.rank == 0
        self.buffers = KeptBuffers(trainer.model)
        self._reductions = 1  # of a step in which this replica joins
        self._joins = False  # a replica waits to be let in
        self._leaving: set[int] = set()  # replicas that end after this step
        self._has_joined = False  # at the begin of the last step
        self._totals = {keys.REPLICAS_JOINED: 0.0, keys.REPEATED_SAMPLES: 0.0}
        self._totals |= {keys.REPLICAS_LOST_S: 0.0, keys.LEFT_OUT_STEPS: 0.0}
        self._members = set(replicas.members)  # when batches were dealt out last
        if not replicas.life and absent_ranks():
            self.deal()

    @property
    def has_state(self) -> bool:
        """False before this replica has joined."""
        return self.replicas.has_state

    @property
    def is_joining(self) -> bool:
        """Whether this replica gets the state in this step, of which it computes nothing."""
        return self._receiver is not None

    def start(self) -> None:
        """Before the first step, once all is built. A replica that comes back asks to be let in."""
        trainer, replicas = self.trainer, self.replicas
        replicas.stop_requested = trainer.callbacks.stop_requested
        replicas.start()
        self._planned = self._dealt = replicas.epoch
        self._readers = sorted(replicas.members)
        if not replicas.life:
            if absent_ranks():
                self._say("the others may come later")
            return
        self._warm_up()
        if replicas.place == 0:
            post(replicas.store, "join", replicas.own)

    def note(self, outcome: StepOutcome) -> bool:
        """Takes from a step's agreement who comes and goes after it. Returns whether all save and
        stop: a rank was told to stop, and without its replica too few would be left, or the store
        of the others would end with its node."""
        self._joins = outcome.joins
        ranks, members = self.replicas.ranks, self.replicas.members
        told = set(outcome.preempted_ranks)
        self._leaving = {number for number, _ in members if told.intersection(ranks[number])}
        if outcome.store_ends or len(members) - len(self._leaving) < self._least:
            self._leaving = set()
        return bool(told) and not self._leaving

    def before_step(self, feed: BatchFeed) -> None:
        """Where all are between two steps: replicas join and leave."""
        joins, leaving = self._joins, self._leaving
        while not (self.has_state or self.is_joining):
            if self.replicas.needs_all:
                self._go_back(feed)
            else:
                self._join(feed)
        if self.is_joining:
            return
        if self.replicas.replica in leaving:
            self.replicas.leave(self._requeue_exit_code)
        if self._has_joined:
            self._say(f"from step {self.trainer.progress.step} on")
        self._has_joined = joins
        if joins and not leaving:
            self._admit()
        elif leaving:
            self._regroup(admit=False)
            self._say(f"{sorted(leaving)} were told to stop")
        elif self.replicas.epoch != self._planned:  # a replica was lost between two steps
            self._say(f"from step {self.trainer.progress.step + 1} on")
        self._wait_for_enough()
        if self.replicas.epoch != self._planned:
            self._plan(feed)
        self.take_roles()

    def begin_step(self) -> None:
        """Before what may be done again."""
        self.replicas.in_step = True
        self.buffers.keep()

    def end_step(self) -> None:
        """After it, before the update."""
        self.replicas.in_step = False

    def repeat(self, feed: BatchFeed) -> list[float] | None:
        """After a step that not all have agreed on: the sums of its agreement where others have
        applied it; None where all compute it again, after this."""
        begin = time.perf_counter()
        if self.is_joining or self.replicas.needs_all:
            self.lose_state()
            return None
        sums = self._regroup(admit=False)
        if sums is not None and sums[0]:  # others have heard that the step has failed
            sums = None
        self.take_roles()
        trainer = self.trainer
        if sums is None:
            self._discard_gradients()
            self.buffers.put_back()
            self._wait_for_enough()
            self._plan(feed, again=True)
            self._totals[keys.REPEATED_SAMPLES] += trainer.config.train.global_batch_size
        seconds = time.perf_counter() - begin
        self._totals[keys.REPLICAS_LOST_S] += seconds
        what = "again" if sums is None else "to its end"
        self._say(f"step {trainer.progress.step + 1} {what} after {seconds:.2f} s")
        return sums

    def row(self) -> dict[str, float]:
        """What a row of metrics tells of replicas."""
        return {keys.REPLICAS: len(self.replicas.members), **self._totals}

    def _admit(self, least: int = 1) -> None:
        """Lets in who waits to join, until at least ``least`` replicas are there."""
        if self._outer is not None:
            self._outer.receive()
        self._regroup(admit=True, least=least)
        self._totals[keys.REPLICAS_JOINED] += len(self.replicas.joined)

    def _regroup(self, *, admit: bool, least: int = 1) -> list[float] | None:
        # What is being sent to a replica that joins ends first: it belongs to this generation.
        self.replicas.give_up()
        for sender in self._senders:
            sender.finish()
        self._senders = []
        result = self.replicas.regroup(admit=admit, least=least)
        return None if result is None else result.view(torch.float64).tolist()

    def _wait_for_enough(self) -> None:
        """Where a rank is asked to stop meanwhile, one more step is done, and saved."""
        if len(self.replicas.members) < self._least:
            self._say(f"waiting for launch.min_replicas={self._least}")
            self._admit(self._least)

    def _say(self, what: str) -> None:
        there = [number for number, _ in self.replicas.members]
        self.trainer.recorder.log(
            f"replicas   {sorted(there)} of {len(self.replicas.ranks)} are there: {what}"
        )

    def take_roles(self) -> None:
        """Lets this rank speak for all where the one that did is gone."""
        speaks = self.replicas.rank == self.replicas.first_rank
        if speaks and not self._speaks:
            self._take_roles(self.trainer)
        self._speaks = speaks

    def deal(self) -> bool:
        """Deals global batches out among those who are there; false where that was done already."""
        trainer, members = self.trainer, self.replicas.members
        if self._dealt == self.replicas.epoch:
            return False
        self._dealt = self.replicas.epoch
        lost = len(self._members.difference(members))
        self._members = set(members)
        kept = error_feedback_of(trainer.model)
        self._totals[keys.LEFT_OUT_STEPS] += lost * kept.unshared_steps
        data_ranks = len(members) * mesh_shape(trainer.mesh).shard
        kept.scale(data_ranks / trainer.data_ranks)
        trainer.data_ranks = data_ranks
        trainer.plan = self._plan_among(sorted(members))
        return True

    def _plan_among(self, members: list[Member]) -> BatchPlan:
        """This rank's share where global batches are dealt out among ``members``."""
        trainer = self.trainer
        shards = mesh_shape(trainer.mesh).shard
        index = members.index(self.replicas.own)
        return BatchPlan(
            global_batch_size=trainer.config.train.global_batch_size,
            micro_batch_size=trainer.plan.micro_batch_size,
            data_rank=index * shards + trainer.mesh.get_local_rank("shard"),
            data_ranks=len(members) * shards,
            allow_padding=True,
        )

    def _plan(self, feed: BatchFeed, *, again: bool = False) -> None:
        """Makes this rank's part of the next global batch `upcoming`, which those have computed who
        have the state; later ones are dealt out among all. ``again``: it was taken before."""
        trainer, replicas = self.trainer, self.replicas
        joined = [] if trainer.forward_crosses else replicas.joined
        computing = sorted(set(replicas.members) - set(joined))
        if replicas.own in joined:
            trainer.upcoming = self._nothing()
        elif again or computing != self._readers:
            feed.restart(self._plan_among(computing), trainer.progress.samples)
            trainer.upcoming = trainer.take(feed)
        assert trainer.upcoming is not None, "there was one, and data do not change"
        self.deal()
        self._readers = sorted(replicas.members)
        if joined:
            feed.restart(trainer.plan, trainer.upcoming.position)
        self._planned = replicas.epoch
        self._give()
        if trainer.forward_crosses and self.finish_joining() and not self.has_state:
            replicas.has_state = True

    def _nothing(self) -> StepBatch:
        """The part in the next global batch of a rank that computes nothing of it."""
        size = self.trainer.config.train.global_batch_size
        return StepBatch([], 0, 0, 0.0, self.trainer.progress.samples + size)

    def _warm_up(self) -> None:
        """The first step of a process takes long, and as a member all others would wait for it."""
        trainer = self.trainer
        assert trainer.upcoming is not None
        with self.replicas.isolated():
            trainer.forward_backward(trainer.upcoming, 1)
            followers = [type(each.updates) for each in engines_in(trainer.model)]
            if set(followers) <= {UpdateFollower}:  # others talk to other replicas
                trainer.optimizer.step()
                trainer.optimizer.state.clear()  # the donor may have none of some parameters
            self._discard_gradients()

    def _discard_gradients(self) -> None:
        discard_accumulated(self.trainer.model)
        self.trainer.optimizer.zero_grad()

    def _go_back(self, feed: BatchFeed) -> None:
        """All have waited for those that were lost, and load what all would after a restart; see
        [Note: in-memory checkpoints]. Raises `ReplicaLost`."""
        trainer, replicas = self.trainer, self.replicas
        begin, before = time.perf_counter(), trainer.progress.step
        while True:
            replicas.regroup(admit=True, least=self._least)
            if len(replicas.members) < self._least:  # a rank was told to stop meanwhile
                replicas.leave(self._requeue_exit_code)
            replicas.synchronized = replicas.epoch
            state = None
            with contextlib.suppress(ReplicaLost):
                state = trainer.checkpointer.restore(restarted=True)
            if replicas.vote(not replicas.lost):
                break
            replicas.give_up()
        if state is None:
            replicas.leave()  # there is nothing to go back to: all restart
        step = state["step"]
        if before > step:
            self.take_roles()  # the rows of these steps stand
        trainer.load_state_dict(state)
        replicas.has_state = True
        trainer.recorder.go_back(step)
        self.take_roles()
        feed.restart(trainer.plan, trainer.progress.samples)
        trainer.begin(feed)
        seconds = time.perf_counter() - begin
        self._totals[keys.REPLICAS_JOINED] += len(replicas.joined)
        self._totals[keys.REPLICAS_LOST_S] += seconds
        self._totals[keys.REPEATED_SAMPLES] += (before - step) * trainer.plan.global_batch_size
        self._totals = broadcast(self._totals)
        replicas.joined = []
        self._planned = self._dealt = replicas.epoch
        self._say(f"from step {before} back to step {step} after {seconds:.2f} s")

    # A replica that joins, and its donor

    def _join(self, feed: BatchFeed) -> None:
        """Becomes a member, which gets the state in the next step."""
        trainer, replicas = self.trainer, self.replicas
        while True:
            replicas.regroup(admit=True)
            self._receiver = Receiver(trainer.model, trainer.optimizer, replicas)
            manifest = self._receiver.begin()
            if replicas.vote(manifest is not None):
                break
            replicas.give_up()
            if manifest is not None:
                self._receiver.finish()
        assert manifest is not None
        told = manifest.state
        trainer.load_state_dict(told)
        trainer.checkpointer.follow(trainer.progress.step)
        trainer.upcoming_tokens, self._reductions = told["upcoming_tokens"], told["reductions"]
        self._totals, trainer.forward_crosses = told["totals"], told["forward_crosses"]
        self._plan(feed, again=True)

    def _give(self) -> None:
        """Begins to send the state to each replica that has joined, where this one is its donor."""
        trainer = self.trainer
        assert trainer.upcoming is not None
        is_full = trainer.config.sync.during_accumulation == "full"
        told = {
            "step": trainer.progress.step,
            "upcoming_tokens": trainer.upcoming_tokens,  # of the next global batch
            "reductions": len(trainer.upcoming.micro_batches) if is_full else 1,
            "totals": self._totals,
            "forward_crosses": trainer.forward_crosses,
        }
        state = {**trainer.state_dict(), **told}
        self._senders += start_senders(trainer.model, trainer.optimizer, self.replicas, state)

    def reduce_nothing(self) -> Tensor:
        """What `Trainer.forward_backward` is to a replica that joins: gradients are zeros."""
        for _ in range(self._reductions):
            for engine in engines_in(self.trainer.model):
                engine.finish_without_backward()
        return torch.zeros((), dtype=torch.float64, device=self.trainer.device)

    def finish_joining(self) -> bool:
        """Before an update: waits until those who join have the state. False where this replica has
        not got it, which asks to be let in again. Collective over the ranks of this replica."""
        for sender in self._senders:
            sender.finish()
        self._senders = []
        if self._receiver is not None and not self.replicas.vote(self._receiver.finish()):
            self.lose_state()
            return False
        if self._receiver is not None:
            self._receiver, self.replicas.has_state = None, True
        self.replicas.joined = []
        return True

    def lose_state(self) -> None:
        """Gives up a step: this replica asks for the state in the next one."""
        self.replicas.give_up()
        if self._receiver is not None:
            self._receiver.finish()
            self._receiver = None
        self.replicas.in_step = False
        self.replicas.has_state = False
        self.trainer.upcoming = self._nothing()  # there is a next step
        self.trainer.preempted = False
        self._discard_gradients()

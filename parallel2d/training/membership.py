"""The quorum of each step of a `Trainer` whose replicas may fail: `StepQuorum`.

See [Note: replicas that never stop] in `parallel2d.base.replicas`, and [Note: join without a wait]
in `state_transfer`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from parallel2d.base.exchange import broadcast
from parallel2d.base.replicas import Quorum, ReplicaLost
from parallel2d.base.replicas.events import Member, post
from parallel2d.base.replicas.states import ReplicaState
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.sync.engine.accumulation import discard_accumulated
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.methods.method import UpdateFollower
from parallel2d.parallel.sync.updates import error_feedback_of, outer_sync
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.fixed_quorum import Assignment, assign
from parallel2d.training.metrics import keys
from parallel2d.training.progress import StepOutcome
from parallel2d.training.state_transfer import KeptBuffers, Receiver, Sender, start_senders
from parallel2d.training.trainer_parts import TrainerParts

_TOTALS = (keys.REPLICAS_JOINED, keys.REPEATED_SAMPLES, keys.REPLICAS_LOST_S, keys.LEFT_OUT_STEPS)


class StepQuorum:
    """The quorum of a job whose replicas may fail. All ranks of a replica make the same calls.

    Args:
        parts: the parts of the trainer.
        quorum: the live replicas.
        shared_state: returns `Trainer.shared_state`.
        on_lead: called when this rank becomes the leader.
    """

    def __init__(
        self,
        parts: TrainerParts,
        quorum: Quorum,
        shared_state: Callable[[], dict[str, Any]],
        on_lead: Callable[[], object],
    ) -> None:
        self._quorum, self._shared_state, self._on_lead = quorum, shared_state, on_lead
        self._model, self._optimizer, self._plan = parts.model, parts.optimizer, parts.plan
        self._checkpointer, self._recorder = parts.checkpointer, parts.recorder
        settings, shape = parts.config.launch, mesh_shape(parts.mesh)
        self._least = len(quorum.ranks)
        if not quorum.needs_all:
            self._least = min(settings.min_replicas, self._least)
        self._requeue_exit_code = settings.requeue_exit_code
        self._shards, self._shard = shape.shard, parts.mesh.get_local_rank("shard")
        # Number of data ranks that averaged their last gradients
        self._data_ranks = shape.data_ranks
        if not quorum.incarnation:
            self._data_ranks = len(quorum.members) * self._shards
        self._members = set(quorum.members)  # at the last assignment
        # Quorum numbers of the last assignment and of the last `plan`
        self._assigned = self._planned = -1
        self._senders: list[Sender] = []
        self._receiver: Receiver | None = None
        self._buffers = KeptBuffers(self._model)
        self._leads = not quorum.incarnation and quorum.rank == 0
        self._repeats = False  # the next step is a repetition
        self._lost_since = time.perf_counter()
        self._joins = False  # a replica waits to join
        self._leaving: set[int] = set()  # replicas that leave before the next step
        self._has_joined = False  # a replica has joined before the last step
        self._totals = dict.fromkeys(_TOTALS, 0.0)

    @property
    def needs_all(self) -> bool:
        """True if a failed replica makes all replicas roll back."""
        return self._quorum.needs_all

    @property
    def plan(self) -> BatchPlan:
        """The part of this rank in each global batch, which the live replicas divide. A joining
        replica without the state warms up with its part among all replicas."""
        if not self._quorum.has_state:
            return self._plan
        self._planned = self._quorum.epoch
        return self._part_among(self._quorum.members, self._quorum.own)

    def start(self, stop_requested: Callable[[], bool], warm_up: Callable[[], None]) -> None:
        """Allow replicas to fail. Called before the first step, after everything is built.

        Args:
            stop_requested: True if this rank was asked to save and stop.
            warm_up: runs one step without other replicas, in a restarted replica before it joins.
                The first step of a process is slow, and would delay all members of the quorum.
        """
        quorum = self._quorum
        quorum.start(stop_requested)
        self._assigned = quorum.epoch
        if not quorum.incarnation:
            if len(quorum.members) < len(quorum.ranks):
                self._log("training starts")
            return
        with quorum.isolated():
            warm_up()
            followers = set()
            for each in engines_in(self._model):
                followers.add(type(each.updates))
            if followers <= {UpdateFollower}:  # the update has no traffic between replicas
                self._optimizer.step()
                self._optimizer.state.clear()  # the donor may lack the state of some parameters
            self._discard_gradients()
        if quorum.place == 0:
            post(quorum.store, "join", quorum.own)

    # A step

    def start_step(self) -> Assignment:
        """Form the quorum of the next or repeated step, and assign the parts of its global batch.
        Replicas join and leave here. In a leaving replica this call ends the process."""
        quorum = self._quorum
        received = rolled_back = None
        note = ""
        while quorum.state is ReplicaState.MISSING:
            if quorum.needs_all:
                rolled_back, note = self._roll_back()
            else:
                received = self._join()
        if quorum.has_state and not self._repeats:
            self._change_members()
        self._repeats = False
        self.lead()
        if quorum.epoch != self._assigned:
            self._follow_members()
            self._send_state()
        # A replica without the state computes no part of this batch, and a part of later batches.
        computing = set(quorum.members) - set(quorum.joined)
        computes = quorum.own in computing
        current = self._part_among(computing, quorum.own if computes else min(computing))
        later = self._part_among(quorum.members, quorum.own)
        quorum.start_step()
        self._buffers.keep()
        return Assignment(
            current, later, self._data_ranks, computes, received, rolled_back, note=note
        )

    def should_commit(self, status: Tensor) -> bool:
        """True if all live replicas have the complete step. Otherwise this call discards the
        gradients, and the trainer repeats the step. Collective over the ranks of this replica.

        Args:
            status: the sum of `StepStatus`. This call sets it if only other replicas have the sum.
        """
        quorum, begin = self._quorum, time.perf_counter()
        if not quorum.is_complete(status):
            if self._receiver is not None or quorum.needs_all:
                self.lose_state()
                return False
            self._finish_sending()
            is_committed, seconds = quorum.should_commit(status), 0.0
            self.lead()
            if not is_committed:
                self._discard_gradients()
                self._buffers.put_back()
                seconds = self._wait_for_enough()
                self._repeats = True
                self._totals[keys.REPEATED_SAMPLES] += self._plan.global_batch_size
            else:
                # The computation of this step was useful.
                self._lost_since = begin
            seconds += self._count_lost()
            how = "committed" if is_committed else "recomputed"
            self._log(f"step {self._step + 1} {how} after {seconds:.2f} s")
            return is_committed
        return self._finish_transfers() and quorum.should_commit(status)

    def finish_step(self, outcome: StepOutcome) -> bool:
        """Plan the changes of members after a committed step. True if a rank was asked to stop and
        all replicas must save and stop with it: too few replicas would remain, or the store would
        end with the node of this rank."""
        self._lost_since = time.perf_counter()
        self._joins = outcome.joins
        asked = set(outcome.preempted_ranks)
        self._leaving = set()
        for number, _ in self._quorum.members:
            if asked.intersection(self._quorum.ranks[number]):
                self._leaving.add(number)
        remaining = len(self._quorum.members) - len(self._leaving)
        if outcome.store_ends or remaining < self._least:
            self._leaving = set()
        return bool(asked) and not self._leaving

    def lose_state(self) -> None:
        """Leave the step. This replica needs a state before its next step."""
        self._quorum.lose_state()
        if self._receiver is not None:
            self._receiver.finish()
            self._receiver = None
        self._discard_gradients()

    def repeats_evaluation(self) -> bool:
        """True if the quorum has changed between the last `plan` and the last all-reduce over all
        ranks. Then the result of the evaluation lacks a part."""
        return self._quorum.synchronized != self._planned

    def lead(self) -> None:
        """Call ``on_lead`` if this rank has become the leader."""
        leads = self._quorum.rank == self._quorum.first_rank
        if leads and not self._leads:
            self._on_lead()
        self._leads = leads

    def metrics(self) -> dict[str, float]:
        """Return the values for a row of metrics."""
        return {keys.REPLICAS: len(self._quorum.members), **self._totals}

    # Changes of members

    def _change_members(self) -> None:
        """Change the members of the quorum between two steps."""
        quorum, joins, leaving = self._quorum, self._joins, self._leaving
        self._joins, self._leaving = False, set()
        if quorum.replica in leaving:
            quorum.leave(self._requeue_exit_code)
        if self._has_joined:
            self._log(f"training from step {self._step}")
        self._has_joined = joins and not leaving
        if self._has_joined:
            self._admit()
        elif leaving:
            self._regroup(admit=False)
            self._log(f"{sorted(leaving)} stopped on request; training from step {self._step + 1}")
        elif quorum.epoch != self._assigned:  # a replica failed between two steps
            self._count_lost()
            self._log(f"training from step {self._step + 1}")
        self._wait_for_enough()

    def _admit(self, least: int = 1) -> None:
        """Form a quorum of at least ``least`` replicas with the waiting replicas."""
        outer = outer_sync(self._model)
        if outer is not None:
            outer.receive()
        self._regroup(admit=True, least=least)
        self._totals[keys.REPLICAS_JOINED] += len(self._quorum.joined)

    def _regroup(self, *, admit: bool, least: int = 1) -> None:
        self._finish_sending()
        self._quorum.regroup(admit=admit, least=least)

    def _wait_for_enough(self) -> float:
        """Wait for ``launch.min_replicas``, and return the lost seconds. A request to stop ends the
        wait: one more step is computed and saved."""
        if len(self._quorum.members) >= self._least:
            return 0.0
        self._log(f"waiting for launch.min_replicas={self._least}")
        self._admit(self._least)
        return self._count_lost()

    def _count_lost(self) -> float:
        """Count the time since the last committed step, or since the last call, as lost. Return
        this time in seconds."""
        begin, self._lost_since = self._lost_since, time.perf_counter()
        seconds = self._lost_since - begin
        self._totals[keys.REPLICAS_LOST_S] += seconds
        return seconds

    def _follow_members(self) -> None:
        """Adapt the weight of the error feedback to the current number of replicas."""
        self._assigned = self._quorum.epoch
        lost = len(self._members.difference(self._quorum.members))
        self._members = set(self._quorum.members)
        feedback = error_feedback_of(self._model)
        self._totals[keys.LEFT_OUT_STEPS] += lost * feedback.unshared_steps
        data_ranks = len(self._members) * self._shards
        feedback.scale(data_ranks / self._data_ranks)
        self._data_ranks = data_ranks

    def _part_among(self, members: Collection[Member], own: Member) -> BatchPlan:
        return assign(self._plan, members, own, self._shards, self._shard)

    def _roll_back(self) -> tuple[dict[str, Any], str]:
        """Wait for all replicas, and load the newest checkpoint as after a restart; see
        [Note: in-memory checkpoints]. Return the state of the checkpoint and a line for the log.
        Raises `ReplicaLost`."""
        quorum = self._quorum
        before = self._step
        while True:
            quorum.regroup_all(self._least)
            if len(quorum.members) < self._least:  # a rank was asked to stop meanwhile
                quorum.leave(self._requeue_exit_code)
            state = None
            with contextlib.suppress(ReplicaLost):
                state = self._checkpointer.restore(restarted=True)
            if quorum.vote(not quorum.lost):
                break
            quorum.give_up()
        if state is None:
            quorum.leave()  # without any checkpoint all ranks restart
        step = state["step"]
        if before > step:
            self.lead()  # before `Trainer.load_state_dict`, so that the rows of later steps remain
        seconds = self._count_lost()
        self._totals[keys.REPLICAS_JOINED] += len(quorum.joined)
        self._totals[keys.REPEATED_SAMPLES] += (before - step) * self._plan.global_batch_size
        self._totals = broadcast(self._totals)
        quorum.complete_join()
        self._assigned = quorum.epoch
        return state, f"replicas   rolled back from step {before} to {step} after {seconds:.2f} s"

    # A joining replica, and its donor

    def _join(self) -> dict[str, Any] | None:
        """Join the quorum, and receive the state during the next step. Return the values of
        `Trainer.shared_state`, or None if the donor failed."""
        quorum = self._quorum
        quorum.regroup(admit=True)
        self._receiver = Receiver(self._model, self._optimizer, quorum)
        manifest = self._receiver.begin()
        if not quorum.vote(manifest is not None):
            if manifest is None:
                self._receiver = None  # it has nothing to finish
            self.lose_state()
            return None
        assert manifest is not None, "on all ranks of the replica"
        state = manifest.state
        self._totals = state["totals"]
        self._checkpointer.follow(state["step"])
        # The forward passes of the replicas exchange values. Therefore this replica must compute in
        # its first step, and needs the state before.
        if state["forward_crosses"] and not self._finish_transfers():
            return None
        return state

    def _send_state(self) -> None:
        """If this replica is the donor, start to send the state to the joined replicas."""
        state = {**self._shared_state(), "totals": self._totals}
        self._senders += start_senders(self._model, self._optimizer, self._quorum, state)
        if state["forward_crosses"] and self._receiver is None:
            self._finish_transfers()

    def _finish_sending(self) -> None:
        """End the quorum, and wait until its transfers have ended, successfully or not."""
        self._quorum.give_up()
        for sender in self._senders:
            sender.finish()
        self._senders = []

    def _finish_transfers(self) -> bool:
        """Wait until the joined replicas have the state. False if this replica joins and has not
        received the state. Collective over the ranks of this replica."""
        for sender in self._senders:
            sender.finish()
        self._senders = []
        if self._receiver is not None and not self._quorum.vote(self._receiver.finish()):
            self.lose_state()
            return False
        self._receiver = None
        self._quorum.complete_join()
        return True

    def _discard_gradients(self) -> None:
        discard_accumulated(self._model)
        self._optimizer.zero_grad()

    @property
    def _step(self) -> int:
        step: int = self._shared_state()["step"]
        return step

    def _log(self, event: str) -> None:
        live, count = self._quorum.live_replicas, len(self._quorum.ranks)
        self._recorder.log(f"replicas   {event} with {len(live)} of {count} replicas; live: {live}")

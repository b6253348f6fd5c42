"""The quorum of each step of a `Trainer` in a job with replicas that may fail: `StepQuorum`.

See [Note: replicas that never stop] in `parallel2d.base.replicas`, and [Note: join without a wait]
in `state_transfer`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
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
from parallel2d.training.assignment import Assignment, assign
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.kept_buffers import KeptBuffers
from parallel2d.training.metrics import keys
from parallel2d.training.progress import StepOutcome
from parallel2d.training.state_transfer import Receiver, Sender, start_senders
from parallel2d.training.trainer_parts import TrainerParts

_TOTALS = (keys.REPEATED_SAMPLES, keys.REPLICAS_LOST_S, keys.LEFT_OUT_STEPS)


class StepQuorum:
    """The quorum of a job with replicas that may fail. All ranks of a replica make the same calls.

    Args:
        parts: the components of the trainer.
        quorum: the live replicas.
        shared_state: returns `Trainer.shared_state`.
        on_lead: called when this rank becomes the leader.

    Attributes:
        lost_s: seconds of this step that were lost to failed attempts and to waits for joining
            replicas.
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
        # Number of data ranks over which the last gradients were averaged
        self._data_ranks = shape.data_ranks
        if not quorum.incarnation:
            self._data_ranks = len(quorum.members) * self._shards
        self._members = set(quorum.members)  # at the last assignment
        # Quorum epochs at the last assignment and at the last read of `plan`
        self._assigned = self._planned = -1
        self._senders: list[Sender] = []
        self._receiver: Receiver | None = None
        self._buffers = KeptBuffers(self._model)
        self._leads = not quorum.incarnation and quorum.rank == 0
        self._repeats = False  # the next call of `start_step` repeats a step
        self._lost_since = time.perf_counter()
        self._joins = False  # a replica waits to join
        self._leaving: set[int] = set()  # replicas that leave before the next step
        self.lost_s = 0.0
        self._step_began = 0.0
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        # All replicas that have joined. The members are in a set, because the same member may be
        # added twice. If the donor fails before it sends the last buffers, the joining replica must
        # join again, although the other replicas have already counted it as complete.
        self._have_joined: set[Member] = set()

    @property
    def needs_all(self) -> bool:
        """True if a failed replica makes all replicas roll back."""
        return self._quorum.needs_all

    @property
    def plan(self) -> BatchPlan:
        """Return this rank's share of each global batch, which is divided among the live replicas.
        If this replica computes nothing, return the share of another replica. Before it joins, a
        restarted replica warms up with its share of a batch that is divided among all replicas."""
        if self._quorum.state is ReplicaState.MISSING:
            return self._plan
        self._planned = self._quorum.epoch
        computing, own = self._computing, self._quorum.own
        own = own if own in computing else min(computing)
        return assign(self._plan, computing, own, self._shards, self._shard)

    @property
    def _computing(self) -> list[Member]:
        """Return the replicas that have the state. The global batches are divided among these
        replicas."""
        joined = self._quorum.joined
        return [each for each in self._quorum.members if each not in joined]

    def start(self, stop_requested: Callable[[], bool], warm_up: Callable[[], None]) -> None:
        """Allow replicas to fail from now on. Called before the first step, after the trainer is
        built.

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
            if followers <= {UpdateFollower}:  # no update runs collectives across replicas
                self._optimizer.step()
                self._optimizer.state.clear()  # the donor may lack the state of some parameters
            self._discard_gradients()
        if quorum.place == 0:
            post(quorum.store, "join", quorum.own)

    # A step

    def start_step(self) -> Assignment:
        """Form the quorum of the next or repeated step, and assign the shares of its global batch.
        Replicas join and leave here. In a leaving replica this call ends the process."""
        quorum = self._quorum
        begin = time.perf_counter()
        if not self._repeats:
            self._step_began, self.lost_s = begin, 0.0
        received = rolled_back = None
        note = ""
        while quorum.state is ReplicaState.MISSING:
            if quorum.needs_all:
                rolled_back, note = self._roll_back()
            else:
                received = self._join()
        admitted = False
        if received is None and not self._repeats:
            admitted = self._change_members()
        self.lead()
        if quorum.epoch != self._assigned:
            self._follow_members()
            state = {**self._shared_state(), "totals": self._all_totals}
            self._senders = start_senders(
                self._model, self._optimizer, quorum, quorum.joined, state
            )
        if received is None or not received["forward_crosses"]:
            self._start_transfers(received or self._shared_state())
        now = time.perf_counter()
        if self._repeats or rolled_back is not None:
            self.lost_s = now - self._step_began
        elif admitted:
            self.lost_s = now - begin
            self._totals[keys.REPLICAS_LOST_S] += now - max(begin, self._lost_since)
            self._lost_since = now
        self._repeats = False
        quorum.start_step()
        self._buffers.keep()
        return Assignment(
            self.plan, self._data_ranks, quorum.has_state, received, rolled_back, note=note
        )

    def should_commit(self, status: Tensor) -> bool:
        """Return True if all live replicas have the reduced gradients of this step. Otherwise this
        call discards the gradients, and the trainer repeats the step. Collective over the ranks of
        this replica.

        Args:
            status: the result of `StepStatus.all_reduce`. If this replica lacks a valid result,
                this call writes the result of another replica into ``status``.
        """
        quorum, begin = self._quorum, time.perf_counter()
        if not quorum.is_complete(status):
            if quorum.needs_all:
                self.lose_state()
                return False
            quorum.give_up()
            self._finish_transfers()
            is_committed, seconds = quorum.should_commit(status), 0.0
            if is_committed and self._misses_state:
                self.lose_state()
                return False
            self.lead()
            if not is_committed:
                self._discard_gradients()
                self._buffers.put_back()
                seconds = self._wait_for_enough()
                self._repeats = True
                self._totals[keys.REPEATED_SAMPLES] += self._plan.global_batch_size
            else:
                # The step is committed, so the time of its computation does not count as lost.
                self._lost_since = begin
            seconds += self._count_lost()
            how = "committed" if is_committed else "recomputed"
            self._log(f"step {self._step + 1} {how} after {seconds:.2f} s")
            return is_committed
        seconds = self._finish_transfers()
        if self._misses_state:
            self.lose_state()
            return False
        self.lost_s += seconds
        self._totals[keys.REPLICAS_LOST_S] += seconds
        return quorum.should_commit(status)

    def finish_step(self, outcome: StepOutcome) -> bool:
        """Plan the joins and leaves after a committed step. Return True if a rank was asked to stop
        and all replicas must save and stop with this rank. All replicas must stop if too few
        replicas would remain, if the node of that rank runs the store, or if another start waits
        for the run directory."""
        self._lost_since = time.perf_counter()
        # Each replica measures its own waits. All replicas adopt the largest value, because any
        # replica may become the leader and write the next row.
        self._totals[keys.REPLICAS_LOST_S] = max(self.total_lost_s, outcome.replicas_lost_s)
        ready = []
        for each in self._quorum.joined:
            if outcome.ready_ranks.issuperset(self._quorum.ranks[each[0]]):
                ready.append(each)
        self._complete_joins(ready, self._step + 2)
        self._joins = outcome.joins
        asked = set(outcome.preempted_ranks)
        self._leaving = set()
        for number, _ in self._quorum.members:
            if asked.intersection(self._quorum.ranks[number]):
                self._leaving.add(number)
        remaining = len(set(self._quorum.complete_replicas) - self._leaving)
        if outcome.store_ends or outcome.gives_way or remaining < self._least:
            self._leaving = set()
        return bool(asked) and not self._leaving

    def lose_state(self) -> None:
        """Abort the step, and mark the state of this replica as missing. The replica must receive
        or load a state before its next step."""
        self._quorum.lose_state()
        self._receiver = None
        self._discard_gradients()

    @property
    def is_ready(self) -> bool:
        """True if this replica will have the complete state after this step, and computes in the
        next step."""
        return self._receiver is not None and self._receiver.is_last_step

    @property
    def total_lost_s(self) -> float:
        """Seconds lost to failures and joins since the last start of all ranks."""
        return self._totals[keys.REPLICAS_LOST_S]

    def repeats_evaluation(self) -> bool:
        """True if the quorum has changed between the last read of `plan` and the last all-reduce
        over all ranks. In this case the sums of the evaluation lack the share of a replica."""
        return self._quorum.synchronized != self._planned

    def lead(self) -> None:
        """Call ``on_lead`` if this rank has become the leader."""
        leads = self._quorum.rank == self._quorum.first_rank
        if leads and not self._leads:
            self._on_lead()
        self._leads = leads

    def metrics(self) -> dict[str, float]:
        """Return the values for a row of metrics."""
        live, joined = len(self._quorum.complete_replicas), len(self._have_joined)
        return {keys.REPLICAS: live, keys.REPLICAS_JOINED: joined, **self._totals}

    # Changes of members

    def _change_members(self) -> bool:
        """Admit and release replicas between two steps. Return True if replicas have joined."""
        quorum, joins, leaving = self._quorum, self._joins, self._leaving
        self._joins, self._leaving = False, set()
        if quorum.replica in leaving:
            quorum.leave(self._requeue_exit_code)
        admits = joins and not leaving
        if admits:
            self._admit()
        elif leaving:
            quorum.regroup(admit=False)
            self._log(f"{sorted(leaving)} stopped on request; training from step {self._step + 1}")
        elif quorum.epoch != self._assigned:  # a replica failed between two steps
            self._count_lost()
            self._log(f"training from step {self._step + 1}")
        self._wait_for_enough()
        return admits

    def _admit(self, least: int = 1) -> None:
        """Form a quorum that includes the waiting replicas. Wait until it has ``least``
        replicas."""
        outer = outer_sync(self._model)
        if outer is not None:
            outer.receive()
        self._quorum.regroup(admit=True, least=least)

    def _wait_for_enough(self) -> float:
        """Wait for ``launch.min_replicas``, and return the lost seconds. A request to stop ends the
        wait: the run computes one more step and saves it."""
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

    def _roll_back(self) -> tuple[dict[str, Any], str]:
        """Wait for all replicas, and load the newest checkpoint as after a restart; see
        [Note: in-memory checkpoints]. Return the state of the checkpoint and a line for the log.
        Raises `ReplicaLost` if a replica fails after the load."""
        quorum = self._quorum
        before = self._step
        while True:
            quorum.regroup_all(self._least)
            if len(quorum.members) < self._least:  # a request to stop has ended the wait
                quorum.leave(self._requeue_exit_code)
            state = None
            with contextlib.suppress(ReplicaLost):
                state = self._checkpointer.restore(restarted=True)
            if quorum.vote(not quorum.lost):
                break
            quorum.give_up()
        if state is None:
            quorum.leave()  # without a checkpoint, the launcher restarts all ranks
        step = state["step"]
        if before > step:
            self.lead()  # before `Trainer.load_state_dict`, so that the rows of later steps remain
        seconds = self._count_lost()
        self._have_joined.update(quorum.joined)
        self._totals[keys.REPEATED_SAMPLES] += (before - step) * self._plan.global_batch_size
        self._set_totals(broadcast(self._all_totals))
        quorum.complete_join(quorum.members)
        self._assigned = quorum.epoch
        return state, f"replicas   rolled back from step {before} to {step} after {seconds:.2f} s"

    # A joining replica, and its donor

    def _join(self) -> dict[str, Any] | None:
        """Join the quorum, and receive the state from the donor in this step and the next steps.
        Return the donor's `Trainer.shared_state`; None if the donor has failed."""
        quorum = self._quorum
        quorum.regroup(admit=True)
        self._receiver = Receiver(self._model, self._optimizer, quorum)
        manifest = self._receiver.begin()
        if not quorum.vote(manifest is not None):
            self.lose_state()
            return None
        assert manifest is not None, "on all ranks of the replica"
        state = manifest.state
        self._set_totals(state["totals"])
        self._checkpointer.follow(state["step"])
        if state["forward_crosses"]:
            self._receiver.start_step()
            self._finish_transfers()
            if not self._receiver.is_complete:
                self.lose_state()
                return None
            self._complete_joins(quorum.joined, state["step"] + 1)
        return state

    def _start_transfers(self, state: Mapping[str, Any]) -> None:
        """Start the state transfers of this step. If the forward has collectives across replicas,
        joining replicas must compute too, so they receive the complete state now."""
        joined, crosses = self._quorum.joined, state["forward_crosses"]
        for sender in self._senders:
            sender.start_step(everything=crosses)
        if self._receiver is not None:
            self._receiver.start_step()
        if joined and crosses:
            self._finish_transfers()
            self._complete_joins(joined, state["step"] + 1)

    def _finish_transfers(self) -> float:
        """End the transfers of this step, and return the seconds that this call waited. After this
        call the state may change. Collective over the ranks of this replica."""
        seconds = 0.0
        for sender in self._senders:
            seconds += sender.finish_step()
            if line := sender.progress():
                self._recorder.log(line)
        if self._receiver is not None:
            self._receiver.finish_step()
        return seconds

    @property
    def _misses_state(self) -> bool:
        """True if the other replicas count this replica as complete, but its state is
        incomplete."""
        receiver = self._receiver
        return receiver is not None and receiver.is_last_step and not receiver.is_complete

    def _complete_joins(self, ready: Collection[Member], step: int) -> None:
        """Mark the replicas ``ready`` as complete: they have the state, and compute from ``step``
        on."""
        if not ready:
            return
        self._have_joined.update(ready)
        self._senders = [each for each in self._senders if each.joiner not in ready]
        if self._quorum.own in ready:
            self._receiver = None
        self._quorum.complete_join(ready)
        self._log(f"training from step {step}")

    @property
    def _all_totals(self) -> tuple[dict[str, float], list[Member]]:
        """The totals for a joining replica: values by key, and the replicas that have joined."""
        return self._totals, sorted(self._have_joined)

    def _set_totals(self, totals: tuple[dict[str, float], list[Member]]) -> None:
        self._totals = totals[0]
        self._have_joined = {(number, incarnation) for number, incarnation in totals[1]}

    def _discard_gradients(self) -> None:
        discard_accumulated(self._model)
        self._optimizer.zero_grad()

    @property
    def _step(self) -> int:
        step: int = self._shared_state()["step"]
        return step

    def _log(self, event: str) -> None:
        live, count = self._quorum.complete_replicas, len(self._quorum.ranks)
        self._recorder.log(f"replicas   {event} with {len(live)} of {count} replicas; live: {live}")

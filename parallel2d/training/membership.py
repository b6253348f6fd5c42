"""How a `Trainer` goes on when replicas come and go: `Membership`. See [Note: replicas that never
stop] in `parallel2d.base.replicas`.

A replica that comes back builds everything by itself, takes the state from one that is there, rank
by rank, while the others begin their next step, and is a member from then on. What it takes is what
a checkpoint holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import TrainConfig
from parallel2d.base.exchange import decode, encode
from parallel2d.base.replicas import Applied, Replicas
from parallel2d.base.replicas.events import post
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.sync.engine.accumulation import discard_accumulated
from parallel2d.parallel.weights.named_tensors import describe_optimizer, reshard, tied_names
from parallel2d.training.checkpoint import Checkpointer
from parallel2d.training.checkpoint.local_state import STATE, LocalState, as_bytes, pack
from parallel2d.training.checkpoint.manifest import Manifest, StoredFile
from parallel2d.training.checkpoint.state import (
    load_averages,
    load_model,
    load_optimizer,
    saved_tensors,
)
from parallel2d.training.data.feed import BatchFeed, BatchPlan, StepBatch
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.recorder import Recorder
from parallel2d.training.progress import Progress


class Trained(Protocol):
    """What a `Membership` needs of the `Trainer`, which says what it is."""

    config: TrainConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    plan: BatchPlan
    data_ranks: int
    progress: Progress
    recorder: Recorder
    checkpointer: Checkpointer
    upcoming: StepBatch | None
    upcoming_tokens: int

    def take(self, feed: BatchFeed) -> StepBatch | None: ...
    def forward_backward(self, batch: StepBatch, tokens: int) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Membership:
    """Follows ``replicas`` for ``trainer``. All ranks of a replica make the same calls.

    ``take_roles``: called on the rank that speaks for all from now on.
    """

    def __init__(
        self, trainer: Trained, replicas: Replicas, take_roles: Callable[[Any], None]
    ) -> None:
        self.trainer, self.replicas, self._take_roles = trainer, replicas, take_roles
        self._least = min(trainer.config.launch.min_replicas, len(replicas.ranks))
        self._planned = self._dealt = replicas.generation
        self._speaks = not replicas.life and replicas.rank == 0
        self._buffers = list(trainer.model.buffers())
        self._versions: list[int] | None = None
        self._written: set[int] = set()
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._has_joined = False  # at the begin of the last step
        self._totals = {keys.REPLICAS_JOINED: 0.0, keys.REPEATED_SAMPLES: 0.0}
        self._totals[keys.REPLICAS_LOST_S] = 0.0

    def start(self, feed: BatchFeed) -> None:
        """Before the first step, once all is built. A replica that comes back joins the others."""
        trainer, replicas = self.trainer, self.replicas
        replicas.start(trainer.progress.step)
        self._planned = self._dealt = replicas.generation
        if not replicas.life:
            return
        self._warm_up()
        if replicas.place == 0:
            post(replicas.store, "join", replicas.own)
        while replicas.applied.step is None:
            replicas.regroup(admit=True)
            with replicas.link(replicas.own) as send:
                if not replicas.vote(self._take(send)):
                    replicas.applied = Applied(None, [])
                    replicas.give_up()
        self._plan(feed)

    def leaving(self, told_to_stop: Sequence[int]) -> set[int]:
        """The replicas that leave after a step, because a rank of each was told to stop; none where
        too few would be left: then all save and stop."""
        ranks, members = self.replicas.ranks, self.replicas.members
        found = {number for number, _ in members if set(ranks[number]) & set(told_to_stop)}
        return found if len(members) - len(found) >= self._least else set()

    def before_step(self, feed: BatchFeed, joins: bool, leaving: set[int]) -> None:
        """Where all are between two steps. ``joins``: a replica waits to be let in; ``leaving``:
        those that end now."""
        if self.replicas.replica in leaving:
            self.replicas.leave(self.trainer.config.launch.requeue_exit_code)
        if self._has_joined:
            self._say(f"from step {self.trainer.progress.step} on")
        self._has_joined = joins
        if joins and not leaving:
            self._admit()
        elif leaving:
            self.replicas.regroup(admit=False)
            self._say(f"{sorted(leaving)} were told to stop")
        elif self.replicas.generation != self._planned:  # a replica was lost between two steps
            self._say(f"from step {self.trainer.progress.step + 1} on")
        self._wait_for_enough()
        if self.replicas.generation != self._planned:
            self._plan(feed)
        self.take_roles()

    def keep_buffers(self) -> None:
        """Before a step, whose forward passes may write to buffers and may be done again: copies
        all before the first one, later those that were written to."""
        versions = [each._version for each in self._buffers]
        if self._versions is None:
            written = set(range(len(versions)))
        else:
            pairs = enumerate(zip(versions, self._versions, strict=True))
            changed = {index for index, (now, before) in pairs if now != before}
            written = self._written = self._written | changed
        self._versions = versions
        self._kept = [(self._buffers[index], self._buffers[index].clone()) for index in written]

    def repeat(self, feed: BatchFeed) -> list[float] | None:
        """After a step that not all have agreed on: the sums of its agreement where others have
        applied it; None where all compute it again, after this."""
        begin = time.perf_counter()
        sums = self.replicas.regroup(admit=False)
        self.take_roles()
        trainer = self.trainer
        if sums is None:
            discard_accumulated(trainer.model)
            trainer.optimizer.zero_grad()
            for buffer, values in self._kept:
                buffer.copy_(values)
            self._wait_for_enough()
            self._plan(feed)
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
        self.replicas.regroup(admit=True, least=least)
        self._totals[keys.REPLICAS_JOINED] += len(self.replicas.joined)
        self._give()

    def _wait_for_enough(self) -> None:
        while len(self.replicas.members) < self._least:
            self._say(f"waiting for launch.min_replicas={self._least}")
            self._admit(self._least)

    def _say(self, what: str) -> None:
        there = [number for number, _ in self.replicas.members]
        self.trainer.recorder.say(
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
        trainer, replicas = self.trainer, self.replicas
        if self._dealt == replicas.generation:
            return False
        self._dealt = replicas.generation
        shards = mesh_shape(trainer.mesh).shard
        index = sorted(replicas.members).index(replicas.own)
        trainer.data_ranks = len(replicas.members) * shards
        trainer.plan = BatchPlan(
            global_batch_size=trainer.config.train.global_batch_size,
            micro_batch_size=trainer.plan.micro_batch_size,
            data_rank=index * shards + trainer.mesh.get_local_rank("shard"),
            data_ranks=trainer.data_ranks,
            allow_padding=True,
        )
        return True

    def _plan(self, feed: BatchFeed) -> None:
        """Reads this rank's part of the next global batch."""
        trainer = self.trainer
        self.deal()
        feed.restart(trainer.plan, trainer.progress.samples)
        trainer.upcoming = trainer.take(feed)
        self._planned = self.replicas.generation

    def _warm_up(self) -> None:
        """The first step of a process takes long, and as a member all others would wait for it."""
        trainer = self.trainer
        assert trainer.upcoming is not None
        self.replicas.give_up()  # nothing crosses replicas
        self.replicas.in_step = True
        trainer.forward_backward(trainer.upcoming, 1)
        discard_accumulated(trainer.model)
        trainer.optimizer.zero_grad()
        self.replicas.in_step = self.replicas.lost = False

    def _give(self) -> None:
        """Sends the state to each replica that has joined, where this one is its donor."""
        replicas = self.replicas
        if replicas.replica != replicas.donor:
            return
        for joiner in replicas.joined:
            with replicas.link(joiner) as send:
                manifest, blocks = self._state()
                sizes = [block.numel() for block in blocks]
                data = encode([manifest, sizes, self.trainer.upcoming_tokens, self._totals])
                header = as_bytes(data.encode())
                for tensor in (torch.tensor([len(header)]), header, *blocks):
                    send(tensor)

    def _state(self) -> tuple[Manifest, list[Tensor]]:
        trainer = self.trainer
        reshard(trainer.model)
        step = trainer.progress.step
        tensors, blocks = pack(saved_tensors(trainer.model, trainer.optimizer))
        manifest = Manifest(
            step=step,
            state={**trainer.state_dict(), "step": step},
            optimizer=describe_optimizer(trainer.model, trainer.optimizer),
            tied=tied_names(trainer.model),
            tensors=tensors,
            files={STATE: StoredFile(sum(block.numel() for block in blocks), "")},
        )
        return manifest, blocks

    def _take(self, send: Callable[[Tensor], bool]) -> bool:
        """Receives what `_give` sends; false where the donor was lost meanwhile."""
        length = torch.zeros(1, dtype=torch.int64)
        if not send(length):
            return False
        header = torch.empty(int(length), dtype=torch.uint8)
        if not send(header):
            return False
        manifest, sizes, tokens, self._totals = decode(header.numpy().tobytes())
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        for block in data.split(sizes):
            if not send(block):
                return False
        trainer = self.trainer
        peer = LocalState(manifest, data, "the state of another replica")
        load_model(trainer.model, peer, strict=True)
        load_optimizer(trainer.model, trainer.optimizer, peer, strict=True)
        load_averages(trainer.model, peer, restart=False)
        trainer.load_state_dict(manifest.state)
        trainer.upcoming_tokens = tokens
        trainer.checkpointer.follow(manifest.step)
        self.replicas.applied = Applied(manifest.step, [])
        return True

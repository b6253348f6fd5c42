"""Replicas that come and go in a training loop of one's own: `Replicas`. See [Note: replicas that
never stop] in `parallel2d.base.replicas`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import files
from parallel2d.base.errors import ConfigError
from parallel2d.base.metering import control_traffic
from parallel2d.base.replicas import Quorum, current
from parallel2d.base.replicas.events import post
from parallel2d.base.topology import AGENT
from parallel2d.parallel.mesh import data_coordinate, live_data_ranks, mesh_shape
from parallel2d.parallel.sync.engine.accumulation import discard_accumulated
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.updates import error_feedback_of, outer_sync
from parallel2d.training.state_transfer import KeptBuffers, Receiver, start_senders


class Replicas:
    """Lets the replicas of a mesh be lost one by one, while the others train on::

        replicas = Replicas(mesh, model, optimizer)
        for step in replicas.steps(1, 1000):
            while replicas.compute():  # again, where a replica is lost
                own = samples(step).chunk(replicas.data_ranks)[replicas.data_rank]
                ...  # forward and backward
            optimizer.step()
            optimizer.zero_grad()

    What is inside of ``while`` may be done again, by fewer replicas: the global batch of a step
    must follow from ``step`` alone. Behind it every replica that is there has the gradients, so
    whatever changes the state comes there. A replica that comes back runs the script from its
    beginning, gets the state of another one, and goes on with the step of the others.

    That needs ``setup(replicas=True)`` and ``python -m parallel2d.launch run``; without, no replica
    may be lost, and the loop is an ordinary one.

    Args:
        mesh: from `parallel2d.build_mesh`, all ranks.
        model: from `parallel2d.parallelize` over it.
        optimizer: of its parameters.
        state: returns what else one that comes back needs: plain values, equal on all ranks.
        load_state: is given it there.

    Raises `ConfigError` for a model whose replicas need each other (``strategy=hybrid_full``).
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        state: Callable[[], dict[str, Any]] = dict,
        load_state: Callable[[dict[str, Any]], object] = lambda state: None,
    ) -> None:
        self._mesh, self._model, self._optimizer = mesh, model, optimizer
        self._state, self._load_state = state, load_state
        self._replicas = current()
        reducers = engines_in(model)
        alone = reducers and not any(each.method.splits_updates for each in reducers)
        if self._replicas is not None and not alone:
            raise ConfigError(
                "Replicas: with strategy=hybrid_full no replica continues without the others; "
                "leave out setup(replicas=True)"
            )
        self._buffers = KeptBuffers(model)
        self._shards = mesh_shape(mesh).shard
        self._data_ranks = mesh_shape(mesh).data_ranks  # over which gradients were averaged last
        self._step = 0
        self._computes = self._joins = False

    @property
    def data_ranks(self) -> int:
        """Among how many ranks the global batch is divided: those that are there."""
        return live_data_ranks(self._mesh)

    @property
    def data_rank(self) -> int:
        """This rank's number among them, equal for all context and tensor ranks of one."""
        if self._replicas is None:
            return data_coordinate(self._mesh)
        replica = sorted(self._replicas.members).index(self._replicas.own)
        return replica * self._shards + self._mesh.get_local_rank("shard")

    def steps(self, first: int, last: int) -> Iterator[int]:
        """The steps from ``first`` to ``last``; in a replica that comes back from that of the
        others. Collective, once all is built."""
        self._step, replicas = first - 1, self._replicas
        if replicas is not None:
            replicas.start()
            replicas.committed_step = None if replicas.life else self._step
            if replicas.life:
                self._join(replicas)
        while self._step < last:
            if replicas is not None and self._joins:
                self._admit(replicas)
            self._step += 1
            yield self._step
            if self._computes:
                raise ConfigError("Replicas: a step ends with `while replicas.compute()`")

    def compute(self) -> bool:
        """Whether gradients are to be computed: once for each step, and again where a replica was
        lost meanwhile. Collective."""
        replicas = self._replicas
        if not self._computes:
            self._computes = True
            self._buffers.keep()
            self._follow_members()
            if replicas is not None:
                replicas.in_step = True
            return True
        self._computes = replicas is not None and not self._agree(replicas)
        if self._computes:
            discard_accumulated(self._model)
            self._optimizer.zero_grad()
            self._buffers.put_back()
            self._follow_members()
        elif replicas is not None:
            replicas.in_step = False
            self._note_step()
        return self._computes

    def _agree(self, replicas: Quorum) -> bool:
        """Whether all who are there have the gradients of this step."""
        vector = torch.tensor([replicas.lost, replicas.joins], dtype=torch.float64)
        with control_traffic():
            dist.all_reduce(vector)
        sums: Tensor | None = vector
        if not replicas.committed or vector[0]:
            result = replicas.regroup(admit=False)
            sums = None if result is None else result.view(vector.dtype)
        if sums is None or sums[0]:
            return False
        self._joins = bool(sums[1] > 0)
        replicas.committed_step = self._step
        return True

    def _follow_members(self) -> None:
        """What replicas have not sent yet counts as much, however many are there."""
        error_feedback_of(self._model).scale(self.data_ranks / self._data_ranks)
        self._data_ranks = self.data_ranks

    def _note_step(self) -> None:
        # The launcher asks whether there is progress.
        if AGENT in os.environ and os.environ.get("LOCAL_RANK") == "0":
            files.replace(os.path.join(os.environ[AGENT], "step"), str(self._step))

    # A replica that comes back, and those that let it in

    def _join(self, replicas: Quorum) -> None:
        if replicas.place == 0:
            post(replicas.store, "join", replicas.own)
        while True:
            replicas.regroup(admit=True)
            receiver = Receiver(self._model, self._optimizer, replicas)
            manifest = receiver.begin()
            if replicas.vote(manifest is not None and receiver.finish()):
                break
            replicas.give_up()
        assert manifest is not None
        replicas.joined = []
        self._step = manifest.step
        self._data_ranks = self.data_ranks
        replicas.has_state = True
        replicas.committed_step = self._step
        self._load_state(manifest.state["own"])

    def _admit(self, replicas: Quorum) -> None:
        if (outer := outer_sync(self._model)) is not None:
            outer.receive()
        replicas.regroup(admit=True)
        state = {"step": self._step, "own": self._state()}
        for sender in start_senders(self._model, self._optimizer, replicas, state):
            sender.finish()
        replicas.joined = []

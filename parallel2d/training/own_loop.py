"""Replicas that fail and rejoin in a custom training loop: `Replicas`. See [Note: replicas that
never stop] in `parallel2d.base.replicas`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import files
from parallel2d.base.errors import ConfigError
from parallel2d.base.launcher_environment import AGENT
from parallel2d.base.metering import control_traffic
from parallel2d.base.replicas import Quorum, current
from parallel2d.base.replicas.events import post
from parallel2d.parallel.mesh import data_coordinate, live_data_ranks, mesh_shape
from parallel2d.parallel.sync.engine.accumulation import discard_accumulated
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.updates import error_feedback_of, outer_sync
from parallel2d.training.kept_buffers import KeptBuffers
from parallel2d.training.state_transfer import Receiver, start_senders


class Replicas:
    """Continues a custom training loop when replicas fail::

        replicas = Replicas(mesh, model, optimizer)
        for step in replicas.steps(1, 1000):
            while replicas.compute():  # repeated after the failure of a replica
                own = samples(step).chunk(replicas.data_ranks)[replicas.data_rank]
                ...  # forward and backward
            optimizer.step()
            optimizer.zero_grad()

    The body of ``while`` may run again with fewer replicas, so the global batch must depend only on
    ``step``. After the ``while`` all live replicas have the gradients, and the script updates the
    state. A restarted replica runs the script from its beginning, receives the state of another
    replica, and continues at the step of the other replicas.

    Replicas may fail only in jobs with ``setup(replicas=True)`` that ``python -m parallel2d.launch
    run`` has started. In other jobs each step is computed once.

    Args:
        mesh: the mesh of all ranks, from `parallel2d.build_mesh`.
        model: the model that `parallel2d.parallelize` returned for this mesh.
        optimizer: the optimizer of the model's parameters.
        state: returns further state that a joining replica needs: plain values, equal on all ranks.
        load_state: receives this state in the joining replica.

    Raises `ConfigError` for a model whose state is split over the replicas
    (``strategy=hybrid_full``).
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
        self._quorum = current()
        reducers = engines_in(model)
        is_complete = reducers and not any(each.method.splits_updates for each in reducers)
        if self._quorum is not None and not is_complete:
            raise ConfigError(
                "Replicas: with strategy=hybrid_full the replicas split the state, and none can "
                "continue after a failure; use setup() without replicas=True"
            )
        self._buffers = KeptBuffers(model)
        self._shards = mesh_shape(mesh).shard
        # Number of data ranks over which the last gradients were averaged
        self._data_ranks = mesh_shape(mesh).data_ranks
        self._step = 0
        self._computes = self._joins = False

    @property
    def data_ranks(self) -> int:
        """Number of live data ranks, which divide the global batch."""
        return live_data_ranks(self._mesh)

    @property
    def data_rank(self) -> int:
        """Position of this rank among the live data ranks. The context and tensor ranks of a data
        rank share this position."""
        if self._quorum is None:
            return data_coordinate(self._mesh)
        replica = sorted(self._quorum.members).index(self._quorum.own)
        return replica * self._shards + self._mesh.get_local_rank("shard")

    def steps(self, first: int, last: int) -> Iterator[int]:
        """Yield the steps from ``first`` to ``last``. A joining replica starts at the step of the
        other replicas. Collective. Call it after the model and the optimizer are built."""
        self._step, quorum = first - 1, self._quorum
        if quorum is not None:
            quorum.start()
            quorum.committed_step = None if quorum.incarnation else self._step
            if quorum.incarnation:
                self._join(quorum)
        while self._step < last:
            if quorum is not None and self._joins:
                self._admit(quorum)
            self._step += 1
            yield self._step
            if self._computes:
                raise ConfigError(
                    f"Replicas: step {self._step} ended before compute() returned False; call it "
                    "in `while replicas.compute():`"
                )

    def compute(self) -> bool:
        """Return True if the gradients of this step must be computed: in the first call of a step,
        and after a failure. Return False if all live replicas have the gradients. Collective."""
        if not self._computes:
            self._computes = True
            self._buffers.keep()
        elif self._should_commit():
            self._computes = False
            self._write_step()
            return False
        else:
            discard_accumulated(self._model)
            self._optimizer.zero_grad()
            self._buffers.put_back()
        self._scale_error_feedback()
        if self._quorum is not None:
            self._quorum.start_step()
        return True

    def _should_commit(self) -> bool:
        """True if all live replicas have the gradients of this step."""
        quorum = self._quorum
        if quorum is None:
            return True
        status = torch.tensor([quorum.lost, quorum.joins], dtype=torch.float64)
        with control_traffic():
            dist.all_reduce(status)
        if not quorum.should_commit(status):
            return False
        self._joins = bool(status[1] > 0)
        quorum.committed_step = self._step
        return True

    def _scale_error_feedback(self) -> None:
        """Adapt the weight of the error feedback to the current number of replicas."""
        error_feedback_of(self._model).scale(self.data_ranks / self._data_ranks)
        self._data_ranks = self.data_ranks

    def _write_step(self) -> None:
        # The launcher reads the step from this file, because it counts consecutive failures without
        # progress.
        if self._quorum is None:
            return
        if AGENT in os.environ and os.environ.get("LOCAL_RANK") == "0":
            files.replace(os.path.join(os.environ[AGENT], "step"), str(self._step))

    # A rejoining replica, and its donor

    def _join(self, quorum: Quorum) -> None:
        if quorum.place == 0:
            post(quorum.store, "join", quorum.own)
        while True:
            quorum.regroup(admit=True)
            receiver = Receiver(self._model, self._optimizer, quorum)
            manifest = receiver.begin()
            if quorum.vote(manifest is not None):
                receiver.start_step()
                receiver.finish_step()
                if receiver.is_complete:
                    break
            quorum.lose_state()
        assert manifest is not None
        quorum.complete_join(quorum.joined)
        self._step = quorum.committed_step = manifest.step
        self._data_ranks = self.data_ranks
        self._load_state(manifest.state["own"])

    def _admit(self, quorum: Quorum) -> None:
        if (outer := outer_sync(self._model)) is not None:
            outer.receive()
        quorum.regroup(admit=True)
        state = {"step": self._step, "own": self._state()}
        senders = start_senders(self._model, self._optimizer, quorum, quorum.joined, state)
        for sender in senders:
            sender.start_step(everything=True)
        for sender in senders:
            sender.finish_step()
        quorum.complete_join(quorum.joined)

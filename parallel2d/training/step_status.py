"""The all-reduce of the status of a step over all ranks: `StepStatus`.

[Note: one status all-reduce per step] Each step runs a single all-reduce for all values other than
gradients. This all-reduce sums a small fp64 vector, which contains:

* flags for a failed replica and for a replica that waits to join;
* the loss and the squared gradient norm, which also show if a value is not finite;
* the number of tokens and the hash of this global batch, and the number of tokens of the next
  global batch, which divides the losses of the next step;
* requests to save or to stop;
* hashes of tensors that must be equal on all replicas;
* the measurements of every rank in the previous step, in one row for each rank.

All decisions depend only on this vector, so all ranks take the same decisions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.device import sent_to
from parallel2d.base.launcher_environment import HAS_STORE
from parallel2d.base.metering import control_traffic
from parallel2d.base.replicas import current, is_joining, present_ranks
from parallel2d.parallel.gradients import squared_norm_share
from parallel2d.parallel.mesh import axis_positions, mesh_shape, sharding_mesh
from parallel2d.parallel.sync.comparison import ReplicaComparison
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.updates import outer_sync, replicated_tensors
from parallel2d.training.progress import RankReport, StepOutcome


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank in a step."""

    loss: Tensor  # summed loss, fp64, on the device of the rank
    tokens: int  # valid tokens of its share of the global batch
    sample_hash: int  # sum of the hashes of its samples
    upcoming_tokens: int  # valid tokens of its share of the next global batch
    stop_requested: bool
    gives_way: bool  # another start waits for the run directory
    save_is_due: bool
    is_ready: bool  # the rank belongs to a joining replica that computes from the next step on
    replicas_lost_s: float  # seconds lost to failures and joins so far, measured by this replica
    report: RankReport


@dataclass(eq=False)
class StepStatus:
    """The status all-reduce of each step; see [Note: one status all-reduce per step].

    Args:
        model: the parallel model.
        mesh: the mesh of the model.
    """

    model: InitVar[nn.Module]
    mesh: InitVar[DeviceMesh]
    _parameters: Sequence[nn.Parameter]  # trained parameters
    _device: torch.device
    _compare_every: int  # steps between comparisons of the replicas; 0: never

    def __post_init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        # The replica reducer must know which parameters were used on any rank. If it can defer its
        # own all-reduce of these flags, the status vector carries them.
        self._used = next((each for each in engines_in(model) if each.may_defer_status), None)
        if self._used is not None:
            self._used.defer_status()
        shape = mesh_shape(mesh)
        # With sync=diloco each replica clips its own gradient, so each has a separate norm.
        self._outer = outer_sync(model)
        self._norms = 1
        self._norm_index = 0
        self._ranks_of_replica = dist.get_world_size() // shape.replicate
        if self._outer is not None and shape.replicate > 1:
            self._norms = shape.replicate
            self._norm_index = mesh.get_local_rank("replicate")
        self._comparison: ReplicaComparison | None = None
        if shape.replicate > 1:
            self._comparison = ReplicaComparison(sharding_mesh(mesh), replicated_tensors(model))
        # All context and tensor ranks of a data rank have the same sums, so only the first of them
        # contributes these sums.
        at = axis_positions(mesh)
        self.counts = float(at.get("context", 0) == at.get("tensor", 0) == 0)

    def all_reduce(self, step: int, own: RankStatus) -> Tensor:
        """Return the sum of the status vectors of all ranks, on CPU. The sum is valid only if the
        step is committed. Collective, after the gradients are complete."""
        vector = torch.cat(
            [sent_to(self._device, self._from_host(step, own)), *self._computed(own)]
        )
        with control_traffic():
            dist.all_reduce(vector)
        return vector.cpu()  # in a step, the host waits for the device only here

    def _from_host(self, step: int, own: RankStatus) -> Tensor:
        """Return the values of the vector that are known on the host, as a CPU tensor."""
        # Flags: a replica has failed, a replica waits to join, this rank has the complete state
        about = [0.0, 0.0, 1.0]
        if (replicas := current()) is not None:
            about = [replicas.lost, replicas.joins, not is_joining()]
        store_ends = own.stop_requested and os.environ.get(HAS_STORE) == "1"
        wishes = [own.save_is_due, store_ends, own.gives_way]
        counts = [own.tokens, own.sample_hash, own.upcoming_tokens]
        first = [*about, *wishes, *(count * self.counts for count in counts)]
        # Each rank fills its own row, so the sum contains the reports of all ranks.
        stops = own.stop_requested or own.gives_way
        row = [stops, own.is_ready, own.replicas_lost_s, *own.report.floats()]
        report = torch.tensor(row, dtype=torch.float64)
        reports = torch.zeros(dist.get_world_size(), len(report), dtype=torch.float64)
        reports[dist.get_rank()] = report
        nothing = torch.zeros(0, dtype=torch.float64)
        used = self._used.status_vector() if self._used else nothing
        comparison = None
        if self._compare_every and step % self._compare_every == 0:
            comparison = self._comparison
        hashes = comparison.vector() if comparison else nothing
        self._sizes = [3, 3, 3, reports.numel(), len(used), len(hashes), 2, self._norms]
        return torch.cat(
            [torch.tensor(first, dtype=torch.float64), reports.flatten(), used, hashes]
        )

    def _computed(self, own: RankStatus) -> list[Tensor]:
        """Return the values of the vector that are computed on the device, each as fp64 [1]: the
        loss, the squared norm of the weight change in the last outer step, and the squared gradient
        norms."""
        nothing = torch.zeros(1, dtype=torch.float64, device=self._device)
        change = nothing
        if self._outer is not None and self._outer.squared_change is not None:
            # The change is the same on all replicas.
            change = self._outer.squared_change * self._ranks_of_replica / present_ranks()
        # If the gradients are equal on all replicas, the vector has one norm, and each rank adds
        # its share of the square. Otherwise the vector has one norm for each replica.
        ranks = present_ranks() if self._norms == 1 else self._ranks_of_replica
        squares = [nothing] * self._norms
        share = squared_norm_share(self._parameters, ranks)
        squares[self._norm_index] = sent_to(self._device, share).reshape(1)
        loss = own.loss if self.counts else own.loss * 0.0
        return [loss.reshape(1), change.reshape(1), *squares]

    def conclude(
        self, step: int, summed: Tensor, own: RankStatus, loss_scale: float
    ) -> tuple[StepOutcome, int]:
        """Return the outcome of ``step``, and the number of tokens of the next global batch, from
        ``summed``, the result of `all_reduce` in a committed step. Outcome and number are equal on
        all ranks. ``loss_scale``: the factor by which the gradients are multiplied."""
        about, wishes, counts, rows, used, hashes, sums, squares = summed.split(self._sizes)
        tokens, batch_hash, upcoming_tokens = counts.tolist()
        loss_sum, squared_change = sums.tolist()
        if self._used:
            self._used.apply_status(used)
        live_ranks = about[2].item()  # failed replicas add zeros
        if len(hashes):
            assert self._comparison is not None
            self._comparison.check(hashes, int(live_ranks))
        # If the value of one rank is not finite, the sum is not finite on any rank.
        finite = bool(sums.isfinite().all() and squares.isfinite().all())
        norms = (squares.sqrt() / loss_scale).tolist()
        live_replicas = live_ranks / self._ranks_of_replica if len(norms) > 1 else 1.0
        by_rank = rows.view(dist.get_world_size(), -1)
        asked = by_rank[:, 0].nonzero().flatten().tolist()
        outcome = StepOutcome(
            loss=loss_sum / max(tokens, 1.0) if finite else math.nan,
            grad_norm=sum(norms) / live_replicas if finite else math.nan,
            own_norm=norms[self._norm_index],
            outer_norm=math.sqrt(squared_change) if squared_change and finite else None,
            tokens=int(tokens),
            batch_hash=int(batch_hash),
            finite=finite,
            preempted=bool(asked),
            save_is_due=wishes[0].item() > 0,
            joins=about[1].item() > 0,
            preempted_ranks=asked,
            ready_ranks=set(by_rank[:, 1].nonzero().flatten().tolist()),
            replicas_lost_s=by_rank[:, 2].max().item(),
            store_ends=wishes[1].item() > 0,
            gives_way=wishes[2].item() > 0,
            reports=own.report.of_all(by_rank[:, 3:]),
        )
        return outcome, int(upcoming_tokens)

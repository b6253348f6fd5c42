"""What all ranks learn from each other in a step: `StepStatus`.

[Note: one status all-reduce per step] All of it goes into a single all-reduce of a small fp64
vector: loss, token counts (of this batch and of the next, whose weight is then known before it
begins), the squared gradient norm, the batch's hash, whether anything was not finite, whether some
rank was told to save and stop, hashes of what replicas must have in common, and every rank's report
about the step before, each in a row of its own. Every decision is taken from that vector, so every
rank takes the same one.
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
from parallel2d.base.metering import control_traffic
from parallel2d.base.replicas import current, is_joining, present_ranks
from parallel2d.base.topology import HAS_STORE
from parallel2d.parallel.gradients import squared_norm_share
from parallel2d.parallel.mesh import axis_positions, mesh_shape, sharding_mesh
from parallel2d.parallel.sync.comparison import ReplicaComparison
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.updates import outer_sync, replicated_tensors
from parallel2d.training.progress import RankReport, StepOutcome


@dataclass(frozen=True)
class RankStatus:
    """Holds what one rank brings to a step's agreement."""

    loss: Tensor  # summed, fp64 on its device
    tokens: int  # of its part of the batch, as the hash
    sample_hash: int
    upcoming_tokens: int  # of its part of the next one
    stop_requested: bool
    save_is_due: bool
    report: RankReport


@dataclass(eq=False)
class StepStatus:
    """The agreement of all ranks on each step."""

    model: InitVar[nn.Module]
    mesh: InitVar[DeviceMesh]
    _parameters: Sequence[nn.Parameter]  # those that are trained
    _device: torch.device
    _compare_every: int  # steps between comparisons of the replicas; 0: never

    def __post_init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        # Which parameters were used travels along, where that may wait until here.
        able = [each for each in engines_in(model) if each.may_defer_status]
        self._used = next(iter(able), None)
        if self._used is not None:
            self._used.defer_status()
        shape = mesh_shape(mesh)
        # With sync=diloco: the parameters that replicas share. Each replica clips its own gradient.
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
        # Context and tensor ranks hold copies of their data rank's sums: only the first counts.
        at = axis_positions(mesh)
        self.counts = float(at.get("context", 0) == at.get("tensor", 0) == 0)

    def all_reduce(
        self, step: int, own: RankStatus, loss_scale: float
    ) -> tuple[StepOutcome, int] | None:
        """Returns the outcome of ``step`` and the tokens of the next global batch, on every rank
        alike; None where a replica was lost before all knew. Collective, once gradients are
        complete; they are ``loss_scale`` times as large. See [Note: one status all-reduce per
        step]."""
        replicas = current()
        from_host = sent_to(self._device, self._from_host(step, own))
        vector = torch.cat([from_host, *self._computed(own)])
        with control_traffic():
            dist.all_reduce(vector)
        # The host waits for the device here, and nowhere else in a step.
        summed = vector.cpu()
        is_repeated = not replicas.committed or summed[0] if replicas and replicas.on else False
        if is_repeated:
            return None
        return self.conclude(step, summed, own, loss_scale)

    def _from_host(self, step: int, own: RankStatus) -> Tensor:
        """The numbers that this rank adds to the sum and its host knows, on CPU."""
        # Whether a replica is lost, and one waits to be let in; ranks that have the state
        about = [0.0, 0.0, 1.0]
        if (replicas := current()) is not None:
            about = [replicas.lost, replicas.joins, not is_joining()]
        store_ends = own.stop_requested and os.environ.get(HAS_STORE) == "1"
        wishes = [own.save_is_due, store_ends]
        counts = [own.tokens, own.sample_hash, own.upcoming_tokens]
        first = [*about, *wishes, *(count * self.counts for count in counts)]
        # Each rank's report is in a row of its own: the sum over the ranks holds them all.
        report = torch.tensor([own.stop_requested, *own.report.floats()], dtype=torch.float64)
        reports = torch.zeros(dist.get_world_size(), len(report), dtype=torch.float64)
        reports[dist.get_rank()] = report
        nothing = torch.zeros(0, dtype=torch.float64)
        used = self._used.status_vector() if self._used else nothing
        comparison = None
        if self._compare_every and step % self._compare_every == 0:
            comparison = self._comparison
        hashes = comparison.vector() if comparison else nothing
        self._sizes = [3, 2, 3, reports.numel(), len(used), len(hashes), 2, self._norms]
        return torch.cat(
            [torch.tensor(first, dtype=torch.float64), reports.flatten(), used, hashes]
        )

    def _computed(self, own: RankStatus) -> list[Tensor]:
        """The numbers that this rank adds to the sum and its device computes, fp64 [1] each: the
        loss, the squared norm of the last outer step's change, the squared norms of gradients."""
        nothing = torch.zeros(1, dtype=torch.float64, device=self._device)
        change = nothing
        if self._outer is not None and self._outer.squared_change is not None:
            # All replicas have made the same one.
            change = self._outer.squared_change * self._ranks_of_replica / present_ranks()
        # This rank's share of the squared norms of the gradient: one of which replicas have copies,
        # or where they train on their own one for each.
        ranks = present_ranks() if self._norms == 1 else self._ranks_of_replica
        squares = [nothing] * self._norms
        share = squared_norm_share(self._parameters, ranks)
        squares[self._norm_index] = sent_to(self._device, share).reshape(1)
        loss = own.loss if self.counts else own.loss * 0.0
        return [loss.reshape(1), change.reshape(1), *squares]

    def conclude(
        self, step: int, summed: Tensor, own: RankStatus, loss_scale: float
    ) -> tuple[StepOutcome, int]:
        """As `all_reduce`, from the sum of all ranks' vectors, on CPU. Without communication."""
        about, wishes, counts, rows, used, hashes, sums, squares = summed.split(self._sizes)
        tokens, batch_hash, upcoming_tokens = counts.tolist()
        loss_sum, squared_change = sums.tolist()
        if self._used:
            self._used.apply_status(used)
        # Those of replicas that are lost are zeros.
        ranks_there = about[2].item()
        if len(hashes):
            assert self._comparison is not None
            self._comparison.check(hashes, int(ranks_there))
        # A sum is not finite on any rank where the part of one rank is not.
        finite = bool(sums.isfinite().all() and squares.isfinite().all())
        norms = (squares.sqrt() / loss_scale).tolist()
        replicas_there = ranks_there / self._ranks_of_replica if len(norms) > 1 else 1.0
        by_rank = rows.view(dist.get_world_size(), -1).tolist()
        told = [rank for rank, row in enumerate(by_rank) if row[0]]
        outcome = StepOutcome(
            loss=loss_sum / max(tokens, 1.0) if finite else math.nan,
            grad_norm=sum(norms) / replicas_there if finite else math.nan,
            own_norm=norms[self._norm_index],
            outer_norm=math.sqrt(squared_change) if squared_change and finite else None,
            tokens=int(tokens),
            batch_hash=int(batch_hash),
            finite=finite,
            preempted=bool(told),
            save_is_due=wishes[0].item() > 0,
            joins=about[1].item() > 0,
            preempted_ranks=told,
            store_ends=wishes[1].item() > 0,
            ranks=[own.report.with_floats(row[1:]) for row in by_rank],
        )
        return outcome, int(upcoming_tokens)

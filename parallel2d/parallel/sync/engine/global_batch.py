"""What a model has of the gradients of one global batch (`GlobalBatch`), and the agreement of all
ranks on which parameters any of them has used (`UsedParameterAgreement`).

[Note: unused parameters] Zeros stand in for missing gradients, also inside the shard axis, so that
all ranks reduce the same. An optimizer would take zeros for gradients, decay weights and move by
its momentum. So ranks agree on which parameters any of them has used, and the others have no
gradient afterwards, as in one process. In a loop of one's own that is one small all-reduce at the
end of the last backward pass; the trainer makes it part of its own agreement.

The same sum shows whether a rank cannot go on, whether the ranks of a shard group have issued
different collectives, and which buffers differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.device import current_stream
from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.exchange import all_gather
from parallel2d.base.replicas import is_joining
from parallel2d.parallel.mesh import (
    axis_names,
    axis_positions,
    has_cpu_backend,
    mesh_shape,
    present_data_ranks,
    sum_over_data_ranks,
)
from parallel2d.parallel.sync.comparison import hashes_of
from parallel2d.parallel.sync.engine.buckets import BucketQueue
from parallel2d.parallel.sync.engine.group_state import GroupState, clear_gradients

log = logging.getLogger(__name__)


class ScalarGradient(Protocol):
    """The gradient of a parameter without dimensions: `parallelize.scalars.Scalar`, which says what
    its methods do."""

    @property
    def gradient(self) -> Tensor | None: ...
    def set_mean(self, mean: Tensor | None) -> None: ...
    def discard(self) -> None: ...
    def rest(self) -> None: ...


@dataclass(eq=False)
class GlobalBatch:
    """The gradients of one global batch.

    ``reduced``: the stream in which torch accumulates sharded gradients. ``states``: of the groups,
    in the order in which backward ends them. ``scalars``: parameters
    that are whole on every rank. ``buckets``: None where no gradients cross the replicate axis.
    ``clear_updated``: drops the gradients of the parts that this replica updates.
    """

    device_type: str
    reduced: torch.Stream
    states: Sequence[GroupState]
    scalars: Sequence[ScalarGradient] = ()
    buckets: BucketQueue | None = None
    clear_updated: Callable[[bool], None] | None = None
    pending: bool = False  # whether gradients were added that are not reduced over the replicas
    agreed: bool = True  # whether ranks have agreed on what the gradients hold

    def join_streams(self) -> None:
        """Lets the current stream wait for the reduced gradients."""
        current = current_stream(self.device_type)
        current.wait_stream(self.reduced)
        if self.buckets is not None:
            current.wait_stream(self.buckets.stream)

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients."""
        self._clear(set_to_none)
        self.reset()

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind: sums that are not reduced over all
        data ranks."""
        # Reductions that were started write into gradients until they end.
        if self.buckets is not None:
            self.buckets.cancel()
        self.join_streams()
        # Before the agreement some gradients may be those of this rank alone.
        if not self.agreed:
            self._clear(set_to_none=True)
        self.pending = False
        self.agreed = True
        for state in self.states:
            state.reset()
        for scalar in self.scalars:
            scalar.discard()
            scalar.rest()

    def _clear(self, set_to_none: bool) -> None:
        clear_gradients([state.group for state in self.states], set_to_none)
        if self.clear_updated is not None:
            self.clear_updated(set_to_none)


class IssueOrder(Protocol):
    """The order of the collectives of this rank's shard group:
    `parallelize.collective_order.CollectiveOrder`, which says what its methods do."""

    def end_backward(self) -> None: ...
    def acknowledge(self) -> None: ...
    def digest(self) -> int: ...
    def differing_on_other_hosts(self) -> str: ...


class UsedParameterAgreement:
    """Agrees on the used parameters of ``batch``: at once (`agree`), or as a part of a sum of the
    caller's, who sums `vector` over all ranks and passes it to `agree_on`.

    ``mesh``: the ranks that make the same updates. ``order``: None where nothing is gathered or
    reduced over the shard axis.
    """

    def __init__(self, mesh: DeviceMesh, batch: GlobalBatch, order: IssueOrder | None) -> None:
        self._mesh = mesh
        self._shape = mesh_shape(mesh)
        self._batch = batch
        self._order = order
        self._replica = axis_positions(mesh).get("replicate", 0)
        self._parameters = sum(len(state.used) for state in batch.states)
        # Why this rank cannot go on; empty when it can.
        self.fault = ""
        # Whether the caller sums `vector`.
        self.deferred = False
        self.buffers: Mapping[str, tuple[nn.Module, str]] = {}  # by FQN, with the key there
        self._were_named = False
        self.agreements = 0
        self.updates = 0  # since the last agreement
        self._compared_updates = 0

    def defer(self) -> None:
        """Leaves the agreement to the caller, after each backward pass that ends a global batch. A
        caller whose tensors have no storage, and so no values to agree on, may omit it."""
        self.deferred = True

    def vector(self) -> Tensor:
        """fp64 [1 + parameters + 3 * (replicas + 1 + buffers)], on CPU: whether this rank
        cannot go on, for each parameter whether it used it, then what `_digests` returns."""
        used = chain.from_iterable(state.used for state in self._batch.states)
        own = torch.tensor([bool(self.fault), *used], dtype=torch.float64)
        return torch.cat([own, self._digests()])

    def agree_on(self, summed: Tensor) -> None:
        """Removes the gradients of parameters that no rank used, and calls the hooks of the others.

        ``summed``: the sum of `vector` over all ranks. Raises `ConfigError`, with the same message
        on all ranks, when one cannot go on, and when ranks of a shard group differ. Collective over
        the data ranks then.
        """
        message = self._failure_in(summed)
        if message is not None:
            # That of the first rank that has one
            for axis in ("shard", "replicate"):
                if axis in axis_names(self._mesh):
                    messages = all_gather(message, self._mesh.get_group(axis))
                    message = next(filter(None, messages), "")
            if self._order is not None:
                self._order.acknowledge()
            self._batch.reset()
            raise ConfigError(message)
        used = iter((summed[1 : 1 + self._parameters] > 0).tolist())
        for state in self._batch.states:
            state.apply_used(list(islice(used, len(state.used))))
        self._batch.agreed = True
        names = list(compress(self.buffers, self._differing(summed)[self._shape.replicate + 1 :]))
        if not names or self._were_named:
            return
        self._were_named = True
        if dist.get_rank() == 0:
            log.warning(
                "%s: buffers that differ between ranks, as each writes what its own samples give; "
                "checkpoints hold one rank's. Write parallel2d.reduce(value), unless it is a cache",
                first_five(names, ", "),
            )

    def agree(self) -> None:
        """Sums `vector` and the gradients of scalars over the data ranks in one all-reduce, and
        applies both. Collective over the data ranks."""
        vector, scalars = self.vector(), self._batch.scalars
        own = torch.zeros(len(scalars), 2, dtype=torch.float64)
        for row, scalar in zip(own, scalars, strict=True):
            gradient = scalar.gradient
            if gradient is not None:
                # One without elements adds nothing.
                row[0] = gradient.double().sum().cpu()
                row[1] = 1.0  # it was used
        device = "cpu" if has_cpu_backend() else self._mesh.device_type
        # One all-reduce for all: such small ones cost their latency.
        parts = torch.cat([vector, own.flatten()]).to(device)
        summed = sum_over_data_ranks(parts, self._mesh).cpu()
        self.agree_on(summed[: len(vector)])
        totals = summed[len(vector) :].view(-1, 2)
        for scalar, (total, users) in zip(scalars, totals, strict=True):
            scalar.set_mean(total / present_data_ranks(self._mesh) if users > 0 else None)
            scalar.rest()

    def abandon(self, error: ConfigError) -> BaseException:
        """Takes part in what the other ranks still do in this global batch, with zeros, so that
        none of them waits forever; returns the error that all ranks then raise."""
        # The trainer's agreement tells the others.
        if self.deferred:
            return error
        if self._batch.buckets is not None:
            self._batch.buckets.finish(with_zeros=True)
        self.fault = str(error)
        try:
            self.agree()
        except ConfigError as agreed:
            return agreed
        return error

    def _digests(self) -> Tensor:
        """fp64 [3 * (replicas + 1 + buffers)]: one, a hash and its square: of what was issued in
        the row of this replica, then of the updates, then of each buffer that is compared in this
        step.

        Hashes are equal if the sum of their squares is that of equal numbers.
        """
        hashes = dict(enumerate(self._hashes_of_buffers(), self._shape.replicate + 1))
        digests = torch.zeros(self._shape.replicate + 1 + len(hashes), 3, dtype=torch.float64)
        if is_joining():
            hashes = {}  # its buffers come with the state
        self._compared_updates, self.updates = self.updates, 0
        hashes[self._shape.replicate] = self._compared_updates
        if self._order is not None:
            hashes[self._replica] = self._order.digest()
        for row, value in hashes.items():
            value %= 2**20  # so that fp64 adds the squares of up to 8,192 ranks exactly
            digests[row] = torch.tensor([1, value, value**2], dtype=torch.float64)
        return digests.flatten()

    def _hashes_of_buffers(self) -> list[int]:
        """After the global batches 1, 2, 4, 8 and so on; none after others."""
        self.agreements += 1
        if self.agreements & (self.agreements - 1):
            return []
        hashes: list[int] = []
        for module, key in self.buffers.values():
            each = module._buffers.get(key)
            if type(each) is Tensor and each.layout == torch.strided:
                hashes += hashes_of([each])
            else:
                hashes.append(0)  # without bits of its own
        return hashes

    def _differing(self, summed: Tensor) -> Tensor:
        """For each row of `_digests` whether ranks have different hashes."""
        ranks, total, squares = summed[1 + self._parameters :].view(-1, 3).unbind(1)
        return squares * ranks != total**2

    def _failure_in(self, summed: Tensor) -> str | None:
        """What this rank knows of why ranks cannot go on, perhaps nothing; None: all can."""
        if summed[0] > 0:
            return self.fault
        different = self._differing(summed)[: self._shape.replicate + 1]
        if not different.any():
            return None
        if different[-1]:
            return self._out_of_step()
        # The ranks of a replica without differences have no message of their own.
        if self._order is not None and different[self._replica]:
            return self._order.differing_on_other_hosts()
        return ""

    def _out_of_step(self) -> str:
        """The message, on all ranks alike, for ranks that have made different numbers of updates.
        Collective over the data ranks."""
        counts = [(dist.get_rank(), self._compared_updates)]
        for axis in ("shard", "replicate"):
            if axis in axis_names(self._mesh):
                counts = list(chain.from_iterable(all_gather(counts, self._mesh.get_group(axis))))
        rank, updates = counts[0]
        other, different = next(each for each in counts if each[1] != updates)
        return (
            f"between the backward passes {self.agreements - 1} and {self.agreements} that ended a "
            f"global batch, rank {rank} called optimizer.step() {updates} times and rank {other} "
            f"{different} times: a rank has left out a backward pass or an update. All ranks must "
            "run as many of both; parallel2d.accumulate(model, micro_batches) makes one global "
            "batch of any number of micro-batches"
        )

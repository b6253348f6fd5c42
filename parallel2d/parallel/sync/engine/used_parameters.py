"""The status all-reduce at the end of a step: used parameters and faults (`UsedParameters`).

[Note: unused parameters] A rank replaces missing gradients by zeros, so that all ranks run the same
reductions. For a parameter that no rank has used, an optimizer would treat these zeros as a
gradient, and would apply weight decay and momentum. Therefore ranks agree on the parameters that
any rank has used, and all other parameters get no gradient, as in a single process. In a custom
training loop the ranks agree by one small all-reduce at the end of the last backward pass. The
trainer adds the same vector to its status all-reduce.

The sum also shows if a rank has a fault, if the ranks of a shard group have issued different
collectives, if ranks have made different numbers of updates, and which buffers differ.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.exchange import all_gather
from parallel2d.base.replicas import is_joining
from parallel2d.parallel.mesh import (
    axis_names,
    axis_positions,
    has_cpu_backend,
    is_first_of,
    live_data_ranks,
    mesh_shape,
    sum_over_data_ranks,
)
from parallel2d.parallel.weights.hashes import hashes_of

log = logging.getLogger(__name__)


class ScalarGradient(Protocol):
    """The gradient of a parameter without dimensions; `parallelize.scalars.Scalar` documents it."""

    @property
    def gradient(self) -> Tensor | None: ...
    def set_mean(self, mean: Tensor | None) -> None: ...
    def discard(self) -> None: ...
    def rest(self) -> None: ...


class IssueOrder(Protocol):
    """The collective order of this rank's shard group.

    `parallelize.collective_order.CollectiveOrder` documents the methods.
    """

    def end_backward(self) -> None: ...
    def acknowledge(self) -> None: ...
    def digest(self) -> int: ...
    def differing_on_other_hosts(self) -> str: ...
    def meet(self, point: str) -> None: ...
    @property
    def differs_at_point(self) -> bool: ...
    @property
    def others_agree(self) -> bool: ...


def _row_of(value: int) -> Tensor:
    """Return [1, h, h * h] for the lowest 20 bits h of ``value``; see `_digests`."""
    value %= 2**20  # fp64 adds the squares of up to 8,192 numbers of 20 bits exactly
    return torch.tensor([1, value, value**2], dtype=torch.float64)


class UsedParameters:
    """Builds this rank's vector for the status all-reduce, and interprets the sum.

    The class does not access gradients of sharded parameters.

    Args:
        mesh: the ranks that make equal updates.
        parameters: number of parameters in all FSDP groups.
        order: the order of collectives of the shard group; None: not checked.
    """

    def __init__(self, mesh: DeviceMesh, parameters: int, order: IssueOrder | None) -> None:
        self._mesh = mesh
        self._shape = mesh_shape(mesh)
        self._order = order
        self._replica = axis_positions(mesh).get("replicate", 0)
        self._parameters = parameters
        # FQN of a buffer -> (module, name of the attribute)
        self.buffers: Mapping[str, tuple[nn.Module, str]] = {}
        self._were_named = False
        self.reductions = 0
        self.updates = 0  # optimizer steps since the last status all-reduce
        self._compared_updates = 0

    def vector(self, used: Sequence[bool], fault: str) -> Tensor:
        """Return this rank's vector: fp64 [1 + parameters + 3 * (replicas + 1 + buffers)], on CPU.

        The entries are: 1 if this rank has a fault, 1 for each parameter that this rank has used,
        and `_digests`.
        """
        own = torch.tensor([bool(fault), *used], dtype=torch.float64)
        return torch.cat([own, self._digests()])

    def used_in(self, summed: Tensor, fault: str) -> list[bool]:
        """Return True for each parameter that any rank used.

        Args:
            summed: the sum of `vector` over all ranks.
            fault: message of this rank's fault; empty: no fault.

        Raises:
            ConfigError: a rank has a fault, or ranks differ in their collectives or updates. The
                message is equal on all ranks. In this case the call is collective over the data
                ranks.
        """
        message = self._failure_in(summed, fault)
        if message is not None:
            # All ranks raise the message of the first rank that has a message. Two all-gathers
            # reach all data ranks: over the shard axis each replica selects a message, and over the
            # replicate axis all replicas select the same message. All ranks run these collectives,
            # because all ranks have the same sum.
            for axis in ("shard", "replicate"):
                if axis in axis_names(self._mesh):
                    messages = all_gather(message, self._mesh.get_group(axis))
                    message = next(filter(None, messages), "")
            if self._order is not None:
                self._order.acknowledge()
            raise ConfigError(message)
        # In a step that does not compare buffers, the sum has no rows for them.
        names = list(compress(self.buffers, self._differing(summed)[self._shape.replicate + 1 :]))
        if names and not self._were_named:
            self._were_named = True
            if is_first_of(self._mesh):
                log.warning(
                    "%s: these buffers differ between ranks, because each rank writes values of "
                    "its own samples; checkpoints save one rank's. Write parallel2d.reduce(value), "
                    "unless the buffer is a cache",
                    first_five(names, ", "),
                )
        used: list[bool] = (summed[1 : 1 + self._parameters] > 0).tolist()
        return used

    def agree_outside_of_step(self, fault: str) -> None:
        """Send a ``fault`` of this rank to all ranks, outside of a step.

        The size of this all-reduce does not depend on the model. Collective over the data ranks.
        Raises `ConfigError` like `used_in`.
        """
        rows = torch.zeros(self._shape.replicate + 1, 3, dtype=torch.float64)
        if self._order is not None:
            rows[self._replica] = _row_of(self._order.digest())
        device = "cpu" if has_cpu_backend() else self._mesh.device_type
        own = torch.cat([torch.tensor([bool(fault)], dtype=torch.float64), rows.flatten()])
        summed = sum_over_data_ranks(own.to(device), self._mesh).cpu()
        unused = torch.zeros(self._parameters, dtype=torch.float64)
        self.used_in(torch.cat([summed[:1], unused, summed[1:]]), fault)

    def sum_with(self, vector: Tensor, scalars: Sequence[ScalarGradient]) -> tuple[Tensor, Tensor]:
        """Return the sums of ``vector`` and of the gradients of ``scalars`` over the data ranks.

        The second sum is [scalars, 2]: the sum of gradients, and the number of ranks with a
        gradient. Collective over the data ranks.
        """
        own = torch.zeros(len(scalars), 2, dtype=torch.float64)
        for row, scalar in zip(own, scalars, strict=True):
            gradient = scalar.gradient
            if gradient is not None:
                # A parameter without elements adds nothing.
                row[0] = gradient.double().sum().cpu()
                row[1] = 1.0  # the parameter was used
        device = "cpu" if has_cpu_backend() else self._mesh.device_type
        # One all-reduce for both: the cost of a small all-reduce is its latency.
        parts = torch.cat([vector, own.flatten()]).to(device)
        summed = sum_over_data_ranks(parts, self._mesh).cpu()
        return summed[: len(vector)], summed[len(vector) :].view(-1, 2)

    def set_means(self, totals: Tensor, scalars: Sequence[ScalarGradient]) -> None:
        """Set the mean gradients of ``scalars`` from their sums; see `sum_with`."""
        for scalar, (total, users) in zip(scalars, totals, strict=True):
            scalar.set_mean(total / live_data_ranks(self._mesh) if users > 0 else None)
            scalar.rest()

    def _digests(self) -> Tensor:
        """Return fp64 [3 * (replicas + 1 + buffers)]: rows of [1, h, h * h] for a hash h.

        There is one row for the collectives of each replica (a rank sets only the row of its
        replica), one row for the number of updates, and one row for each buffer that this step
        compares. The sums over ranks show if all hashes of a row are equal: their variance is then
        zero.
        """
        hashes = dict(enumerate(self._hashes_of_buffers(), self._shape.replicate + 1))
        digests = torch.zeros(self._shape.replicate + 1 + len(hashes), 3, dtype=torch.float64)
        if hashes and is_joining():
            hashes = {}  # a joining replica receives its buffers with the state
        self._compared_updates, self.updates = self.updates, 0
        hashes[self._shape.replicate] = self._compared_updates
        if self._order is not None:
            hashes[self._replica] = self._order.digest()
        for row, value in hashes.items():
            digests[row] = _row_of(value)
        return digests.flatten()

    def _hashes_of_buffers(self) -> list[int]:
        """Return the hashes of all buffers after the global batches 1, 2, 4, 8 and so on; after
        other global batches an empty list."""
        self.reductions += 1
        if self.reductions & (self.reductions - 1):
            return []
        hashes: list[int] = []
        for module, key in self.buffers.values():
            each = module._buffers.get(key)
            if type(each) is Tensor and each.layout == torch.strided:
                hashes += hashes_of([each])
            else:
                hashes.append(0)  # None, a tensor subclass or a sparse tensor: not compared
        return hashes

    def _differing(self, summed: Tensor) -> Tensor:
        """Return True for each row of `_digests` with different hashes."""
        ranks, total, squares = summed[1 + self._parameters :].view(-1, 3).unbind(1)
        return squares * ranks != total**2

    def _failure_in(self, summed: Tensor, fault: str) -> str | None:
        """Return None if all ranks can continue; else this rank's error message, which may
        be ""."""
        if summed[0] > 0:
            return fault
        different = self._differing(summed)[: self._shape.replicate + 1]
        if not different.any():
            return None
        if different[-1]:
            return self._out_of_step()
        # The difference may be in another replica, whose ranks then have the message.
        if self._order is not None and different[self._replica]:
            return self._order.differing_on_other_hosts()
        return ""

    def _out_of_step(self) -> str:
        """Return the error message for ranks with different numbers of updates.

        The message is equal on all ranks. Collective over the data ranks.
        """
        counts = [(dist.get_rank(), self._compared_updates)]
        for axis in ("shard", "replicate"):
            if axis in axis_names(self._mesh):
                counts = list(chain.from_iterable(all_gather(counts, self._mesh.get_group(axis))))
        rank, updates = counts[0]
        other, different = next(each for each in counts if each[1] != updates)
        return (
            f"between the backward passes {self.reductions - 1} and {self.reductions} that ended a "
            f"global batch, rank {rank} called optimizer.step() {updates} times and rank {other} "
            f"{different} times: a rank has left out a backward pass or an update. All ranks must "
            "run as many of both; parallel2d.accumulate(model, micro_batches) makes one global "
            "batch of any number of micro-batches"
        )

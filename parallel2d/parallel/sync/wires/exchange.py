"""Averages values over replicas that send them rounded, and add them unrounded.

[Note: rounded exchange] An all-reduce in a narrow dtype rounds every partial sum, the more often
the more replicas there are. Here each replica sends its rounded contribution to the one that owns
a piece (all-to-all), the owner adds them in fp32 at least, in the order of the replicas, rounds the
mean and sends it to all (all-gather). Each contribution and the mean are rounded once, all replicas
get the same bits, and as many bytes are sent as by a ring all-reduce. Two replicas exchange their
whole contributions and add them locally, which costs the same bytes and one rounding less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.parallel.sync.wires import Coder, Wire
from parallel2d.parallel.sync.wires.blocks import (
    MEAN_STAGE,
    Piece,
    RoundingKeys,
    contribution_stage,
)
from parallel2d.parallel.weights.geometry import Region, as_real, pieces_of


class Exchange:
    """One average over the replicas of ``group``, begun when it is made. Collective: all replicas
    make them, and call their methods, in the same order.

    ``tensors``: this replica's values. `finish` writes the mean into ``results``, which may be the
    same. ``keeps_rest``: what rounding takes away stays in ``tensors``, for the next message.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        coder: Coder,
        tensors: Sequence[Tensor],
        results: Sequence[Tensor],
        *,
        keeps_rest: bool = False,
    ) -> None:
        self._group = group
        self._coder = coder
        self._results = results
        self._replicas = group.size()
        self._replica = group.rank()
        self._dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        # Whether the means are on their way to all replicas; two replicas send none.
        self._means_sent = self._replicas == 2
        rows = coder.rows(tensors)
        self._count = len(rows)
        if self._replicas != 2:
            # Every replica owns a piece of the same number of rows.
            rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % self._replicas))
        sent = coder.encode(rows, 0, contribution_stage(self._replica))
        if keeps_rest:
            rest = rows - coder.decode(sent, rows.dtype)
            coder.put_back(rest[: self._count], tensors)
        if self._replicas == 2:
            self._received = sent.new_empty(2 * len(sent), sent.shape[1])
            self._work = dist.all_gather_single(self._received, sent, group=group, async_op=True)
        else:
            self._received = torch.empty_like(sent)
            self._work = dist.all_to_all_single(self._received, sent, group=group, async_op=True)

    def send_means(self) -> None:
        """Waits for the contributions to this replica's piece, and begins to send their mean."""
        if self._means_sent:
            return
        self._means_sent = True
        self._work.wait()
        first = self._replica * len(self._received) // self._replicas
        sent = self._coder.encode(self._mean_of_received(), first, MEAN_STAGE)
        # The contributions have been read: their memory takes the means.
        self._work = dist.all_gather_single(self._received, sent, group=self._group, async_op=True)

    def finish(self) -> None:
        """Waits for the mean and writes it into the results."""
        self.send_means()
        self._work.wait()
        if self._replicas == 2:
            mean = self._mean_of_received()
        else:
            mean = self._coder.decode(self._received, self._dtype)
        self._coder.put_back(mean[: self._count], self._results)

    def _mean_of_received(self) -> Tensor:
        """The mean of what the replicas have sent of the same rows."""
        contributions = self._received.chunk(self._replicas)
        total = self._coder.decode(contributions[0], self._dtype)
        # One after the other, in the same order everywhere: the sum has the same bits everywhere.
        for contribution in contributions[1:]:
            total += self._coder.decode(contribution, self._dtype)
        return total.div_(self._replicas)


class ExactMean:
    """A mean by one all-reduce in the dtype of the values."""

    def __init__(
        self, group: dist.ProcessGroup, tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        self._results = results
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._work = dist.all_reduce(self._flat, dist.ReduceOp.AVG, group=group, async_op=True)

    def send_means(self) -> None:
        """Does nothing: there is one message alone."""

    def finish(self) -> None:
        """Waits, and writes the mean."""
        self._work.wait()
        values = pieces_of(self._flat, [result.shape for result in self._results])
        for result, value in zip(self._results, values, strict=True):
            result.copy_(value)


PendingMean = Exchange | ExactMean  # a mean over the replicas that has begun


@torch.no_grad()
def expected_mean(
    values: Sequence[Tensor],
    wire: Wire,
    cut: Sequence[Region],
    keys: RoundingKeys,
    name: str,
    *,
    sent_back: bool = True,
) -> Tensor:
    """Computes in one process what an `Exchange` writes into its results: the mean of ``values``,
    one from each replica, of the whole parameter ``name``. For proofs.

    ``cut``: the parts of it that the ranks of a replica hold, on which the blocks of a code depend;
    ``sent_back``: whether owners send the mean, rounded. What ``wire`` keeps stays in ``values``.
    """
    mean = torch.empty_like(values[0])
    for region in cut:
        parts = [as_real(value[region.slices]) for value in values]
        coder = None
        if wire.rounds:
            piece = Piece(keys.of(name), region.position_in(mean.shape))
            coder = wire.coder(parts[:1], [piece])
        total = torch.zeros_like(parts[0])
        for replica, part in enumerate(parts):
            sent = _as_read(coder, part, contribution_stage(replica))
            total += sent
            if wire.keeps_rest:
                part -= sent
        total /= len(parts)
        if sent_back and len(parts) > 2:
            total = _as_read(coder, total, MEAN_STAGE)
        as_real(mean[region.slices]).copy_(total)
    return mean


def _as_read(coder: Coder | None, values: Tensor, stage: int) -> Tensor:
    """``values`` as other replicas read them."""
    if coder is None:
        return values
    found = torch.empty_like(values)
    sent = coder.encode(coder.rows([values]), 0, stage)
    coder.put_back(coder.decode(sent, values.dtype), [found])
    return found

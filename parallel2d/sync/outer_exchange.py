"""Means over replicas that are begun in one step and used in a later one: `begin_mean`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.sync.blocks import BITS, BlockNoise, Piece
from parallel2d.sync.rounded_exchange import Exchange
from parallel2d.sync.wire import BlockWire, CastWire
from parallel2d.weights.geometry import pieces_of


class PendingMean(Protocol):
    """A mean over the replicas that has begun."""

    def send_means(self) -> None:
        """Does what can be done before `finish`. Collective."""

    def finish(self) -> None:
        """Waits, and writes the mean into the tensors that were given. Collective."""


def begin_mean(
    wire: str,
    group: dist.ProcessGroup,
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    pieces: Sequence[Piece],
) -> PendingMean:
    """Begins to average ``tensors`` over the replicas of ``group``, written as ``sync.wire`` says,
    into ``results``. ``pieces``: for the random numbers of each tensor. Collective.

    With ``int4`` what is not sent stays in ``tensors``.
    """
    if wire == "bf16":
        return Exchange(group, CastWire(torch.bfloat16), tensors, results)
    if wire in BITS:
        numels = [tensor.numel() for tensor in tensors]
        noise = BlockNoise(pieces, numels, tensors[0].device)
        # What rounding takes of a contribution in 4 bits is sent later. So it may be rounded to the
        # nearest code, which takes half as much as rounding at random.
        is_coarse = wire == "int4"
        coded = BlockWire(BITS[wire], noise, nearest=is_coarse)
        return Exchange(group, coded, tensors, results, keeps_rest=is_coarse)
    return ExactMean(group, tensors, results)


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

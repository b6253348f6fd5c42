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

from parallel2d.parallel.sync.wires.blocks import (
    BITS,
    MEAN_STAGE,
    BlockCode,
    BlockNoise,
    Piece,
    RoundingKeys,
    contribution_stage,
    from_blocks,
    to_blocks,
)
from parallel2d.parallel.weights.geometry import Region, as_real, pieces_of

# The dtypes that stand for the words of ``sync.wire`` where gradients are sent
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
# Words of ``sync.wire`` where what rounding takes of a contribution is sent later
KEEPS_REST = ("int4",)


class CastWire:
    """Values in another dtype, one a row."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """[values, 1]."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])[:, None]

    def encode(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """The rows in this wire's dtype."""
        return rows.to(self._dtype)

    def decode(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows in ``dtype``."""
        return sent.to(dtype)

    def put_back(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies the values in their order."""
        values = pieces_of(rows[:, 0], [tensor.shape for tensor in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


class BlockWire:
    """Blocks of 256 values with one scale each; see [Note: block codes].

    ``noise``: for the stochastic rounding of the tensors that are sent; ``nearest``: contributions
    are rounded to the nearest code instead.
    """

    def __init__(self, bits: int, noise: BlockNoise, nearest: bool = False) -> None:
        self._code = BlockCode(bits)
        self._noise = noise
        self._nearest = nearest

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """[blocks, 256]."""
        return to_blocks(tensors)

    def encode(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """uint8 [blocks, bytes of a block]."""
        if self._nearest and stage != MEAN_STAGE:
            # Added before rounding down
            noise = torch.full_like(rows, 0.5, dtype=torch.float32)
        else:
            noise = self._noise.numbers(first, first + len(rows), stage)
        return self._code.encode(rows, noise)

    def decode(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """The blocks in ``dtype``."""
        return self._code.decode(sent, dtype)

    def put_back(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies the blocks' values."""
        from_blocks(rows, tensors)


# What turns values into rows and rows into what is sent. Each row is decoded without the others, so
# that rows can be dealt out to replicas. In `encode`, ``first`` is the number of the first row,
# ``stage`` tells several roundings of one value apart; rows after the last are padding.
Wire = CastWire | BlockWire


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
    coded = wire_of(wire, tensors, pieces)
    if coded is None:
        return ExactMean(group, tensors, results)
    return Exchange(group, coded, tensors, results, keeps_rest=wire in KEEPS_REST)


def wire_of(wire: str, tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Wire | None:
    """How ``tensors`` are written; None where they are not rounded."""
    if wire == "bf16":
        return CastWire(torch.bfloat16)
    if wire in BITS:
        numels = [tensor.numel() for tensor in tensors]
        noise = BlockNoise(pieces, numels, tensors[0].device)
        # What is sent later may be rounded to the nearest code, which takes half as much as
        # rounding at random.
        return BlockWire(BITS[wire], noise, nearest=wire in KEEPS_REST)
    return None


class Exchange:
    """One average over the replicas of ``group``, begun when it is made. Collective: all replicas
    make them, and call their methods, in the same order.

    ``tensors``: this replica's values. `finish` writes the mean into ``results``, by default into
    ``tensors``. ``keeps_rest``: what rounding takes from this replica's values stays in
    ``tensors``, for its next message.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wire: Wire,
        tensors: Sequence[Tensor],
        results: Sequence[Tensor] | None = None,
        *,
        keeps_rest: bool = False,
    ) -> None:
        self._group = group
        self._wire = wire
        self._results = tensors if results is None else results
        self._replicas = group.size()
        self._replica = dist.get_group_rank(group, dist.get_rank())
        self._dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        # Whether the means are on their way to all replicas; two replicas send none.
        self._means_sent = self._replicas == 2
        rows = wire.rows(tensors)
        self._count = len(rows)
        if self._replicas != 2:
            # Every replica owns a piece of the same number of rows.
            rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % self._replicas))
        sent = wire.encode(rows, 0, contribution_stage(self._replica))
        if keeps_rest:
            rest = rows - wire.decode(sent, rows.dtype)
            wire.put_back(rest[: self._count], tensors)
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
        sent = self._wire.encode(self._mean_of_received(), first, MEAN_STAGE)
        # The contributions have been read: their memory takes the means.
        self._work = dist.all_gather_single(self._received, sent, group=self._group, async_op=True)

    def finish(self) -> None:
        """Waits for the mean and writes it into the results."""
        self.send_means()
        self._work.wait()
        if self._replicas == 2:
            mean = self._mean_of_received()
        else:
            mean = self._wire.decode(self._received, self._dtype)
        self._wire.put_back(mean[: self._count], self._results)

    def _mean_of_received(self) -> Tensor:
        """The mean of what the replicas have sent of the same rows."""
        contributions = self._received.chunk(self._replicas)
        total = self._wire.decode(contributions[0], self._dtype)
        # One after the other, in the same order everywhere: the sum has the same bits everywhere.
        for contribution in contributions[1:]:
            total += self._wire.decode(contribution, self._dtype)
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
    wire: str,
    cut: Sequence[Region],
    keys: RoundingKeys,
    name: str,
    *,
    sent_back: bool = True,
) -> Tensor:
    """Computes in one process what `begin_mean` writes into its results: the mean of ``values``,
    one from each replica, of the whole parameter ``name``. For proofs.

    ``cut``: the parts of it that the ranks of a replica hold, on which the blocks of a code depend;
    ``sent_back``: whether owners send the mean to all, rounded. With ``int4`` what is not sent
    stays in ``values``.
    """
    mean = torch.empty_like(values[0])
    for region in cut:
        parts = [as_real(value[region.slices]) for value in values]
        piece = Piece(keys.of(name), region.position_in(mean.shape))
        coded = wire_of(wire, parts[:1], [piece])
        total = torch.zeros_like(parts[0])
        for replica, part in enumerate(parts):
            sent = _as_read(coded, part, contribution_stage(replica))
            total += sent
            if wire in KEEPS_REST:
                part -= sent
        total /= len(parts)
        if sent_back and len(parts) > 2:
            total = _as_read(coded, total, MEAN_STAGE)
        as_real(mean[region.slices]).copy_(total)
    return mean


def _as_read(wire: Wire | None, values: Tensor, stage: int) -> Tensor:
    """``values`` as other replicas read them."""
    if wire is None:
        return values
    found = torch.empty_like(values)
    sent = wire.encode(wire.rows([values]), 0, stage)
    wire.put_back(wire.decode(sent, values.dtype), [found])
    return found

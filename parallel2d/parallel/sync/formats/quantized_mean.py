"""Averages over replicas with rounded messages and unrounded sums.

[Note: rounded exchange] An all-reduce in a narrow dtype rounds every partial sum, and more replicas
make more partial sums. Here each block of values has an owner: one of the replicas. Each replica
rounds its contribution and sends each block to the block's owner (all-to-all). The owner adds the
contributions in fp32 or wider, in the order of the replicas, rounds the mean and sends it to all
replicas (all-gather). The contributions and the mean are rounded once, and all replicas get the
same bits. The exchange sends as many bytes as a ring all-reduce. With two replicas, each replica
sends its full contribution to the other replica, and both replicas compute the mean. This exchange
also sends as many bytes as a ring all-reduce, and the mean is not rounded.

With error feedback, each replica stores the rounding error of its contribution. An owner also
stores the rounding error of its means, multiplied by the number of replicas, so that the next mean
contains this error once. Each replica owns an equal part of every tensor, so the sharding of the
error feedback does not depend on buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.base import metering
from parallel2d.base.device import sent_to
from parallel2d.base.replicas import position_over_replicas
from parallel2d.parallel.sync.formats import CommunicationFormat, Quantizer, put_back
from parallel2d.parallel.sync.formats.quantize import (
    BLOCK,
    MEAN_STAGE,
    BlockQuantizer,
    Piece,
    RoundingKeys,
    blocks_of,
    contribution_stage,
    owners_of,
)
from parallel2d.parallel.weights.geometry import Region, as_real, pieces_of


@dataclass(eq=False)
class QuantizedPart:
    """The values of a `QuantizedMean` that have the same communication format."""

    quantizer: Quantizer
    rows: Tensor  # this replica's values as blocks of ``quantizer``; may be overwritten
    results: Sequence[Tensor]  # tensors that receive the mean
    keep: Callable[[Tensor], None] | None = None  # is called with the rounding errors, as blocks

    def __post_init__(self) -> None:
        self._count = len(self.rows)
        self._dtype = torch.promote_types(self.rows.dtype, torch.float32)
        # Permutation of the blocks; None: no permutation
        self._places: Tensor | None = None

    def contribution(self, replica: int, owners: int) -> Tensor:
        """Return this replica's quantized message as [owners, bytes or values per owner]."""
        rows = self.rows if owners == 1 else self._dealt(owners)
        del self.rows
        sent = self.quantizer.quantize(rows, 0, contribution_stage(replica))
        if self.keep is not None:
            rows -= self.quantizer.dequantize(sent, rows.dtype)
            self._errors = rows
        self._row_length = sent.shape[1]
        return sent.view(owners, -1)

    def _dealt(self, owners: int) -> Tensor:
        """Return the blocks sorted by owner, with padding, so that all owners have equally many."""
        if self.keep is None:
            missing = -len(self.rows) % owners
            return torch.nn.functional.pad(self.rows, (0, 0, 0, missing)) if missing else self.rows
        assert isinstance(self.quantizer, BlockQuantizer)
        places, most = self.quantizer.places(owners)
        self._places = sent_to(self.rows.device, places)
        dealt = self.rows.new_zeros(owners * most, BLOCK)
        return dealt.index_copy_(0, self._places, self.rows)

    def _collected(self, rows: Tensor) -> Tensor:
        """Undo the permutation of `_dealt`."""
        return rows[: self._count] if self._places is None else rows[self._places]

    def mean_of(self, received: Tensor) -> Tensor:
        """Return the mean of ``received`` [replicas, values], the contributions of all replicas.

        ``received`` may be overwritten.
        """
        # Added in the order of the replicas, so that the result has the same bits on all replicas.
        return self.quantizer.mean(received.unflatten(1, (-1, self._row_length)), self._dtype)

    def own_mean(self, received: Tensor, replica: int) -> Tensor:
        """Return the quantized mean of the blocks that ``replica``, this rank's replica, owns."""
        mean = self.mean_of(received)
        first = replica * len(mean)
        sent = self.quantizer.quantize(mean, first, MEAN_STAGE)
        if self.keep is not None:
            mean -= self.quantizer.dequantize(sent, self._dtype)
            self._errors[first : first + len(mean)] += mean.mul_(len(received))
        return sent.view(-1)

    def keep_errors(self) -> None:
        """Call ``keep`` with the rounding errors, if error feedback is used."""
        if self.keep is not None:
            self.keep(self._collected(self._errors))
            del self._errors

    def means(self, received: Tensor) -> Tensor:
        """Return ``received`` [replicas, values], the quantized means of all owners, as blocks."""
        return self.quantizer.dequantize(received.reshape(-1, self._row_length), self._dtype)

    def put_back(self, mean: Tensor) -> None:
        """Write ``mean`` into ``results``."""
        put_back(self.quantizer, self._collected(mean), self.results)


class QuantizedMean:
    """One average over the replicas of ``group``. The constructor starts the communication.

    Collective: all replicas must build these objects, and call their methods, in the same order.
    All ``parts`` are sent in one message and must have the same communication dtype.
    """

    def __init__(self, group: dist.ProcessGroup, parts: Sequence[QuantizedPart]) -> None:
        self._group = group
        self._parts = parts
        self._replica, self._replicas = position_over_replicas(group)
        # True once the means are being sent. With two replicas no means are sent.
        self._means_sent = self._replicas == 2
        owners = 1 if self._means_sent else self._replicas
        sent = []
        for part in parts:
            sent.append(part.contribution(self._replica, owners))
        self._lengths = [each.shape[1] for each in sent]
        message = sent[0] if len(sent) == 1 else torch.cat(sent, dim=1)
        self._received = message.new_empty(self._replicas, message.shape[1])
        if self._means_sent:
            self._keep_errors()
            self._gather(message.view(-1))
        else:
            # The work object keeps `message` alive while the collective reads its memory.
            work = dist.all_to_all_single(self._received, message, group=group, async_op=True)
            assert work is not None  # always set with async_op=True
            self._work = work

    def _gather(self, message: Tensor) -> None:
        received = self._received.view(-1)
        work = dist.all_gather_single(received, message, group=self._group, async_op=True)
        assert work is not None  # always set with async_op=True
        self._work = work

    def _keep_errors(self) -> None:
        for part in self._parts:
            part.keep_errors()

    def _received_by_part(self) -> list[tuple[QuantizedPart, Tensor]]:
        """Wait for the message. Return its values [replicas, values] for each part."""
        metering.wait(self._work, self._group)
        return list(zip(self._parts, self._received.split(self._lengths, dim=1), strict=True))

    def send_means(self) -> None:
        """Wait for the contributions to the blocks of this replica, and start to send their
        mean."""
        if self._means_sent:
            return
        self._means_sent = True
        means = []
        for part, piece in self._received_by_part():
            means.append(part.own_mean(piece, self._replica))
        # The contributions have been read, so the means reuse their memory.
        self._gather(means[0] if len(means) == 1 else torch.cat(means))
        self._keep_errors()

    def finish(self) -> None:
        """Wait for the mean and write it into the results."""
        self.send_means()
        for part, piece in self._received_by_part():
            part.put_back(part.mean_of(piece) if self._replicas == 2 else part.means(piece))


class ExactMean:
    """A mean by one all-reduce in the dtype of the values."""

    def __init__(
        self, group: dist.ProcessGroup, tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        self._group, self._results = group, results
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._work = dist.all_reduce(self._flat, dist.ReduceOp.AVG, group=group, async_op=True)

    def send_means(self) -> None:
        """Do nothing, because an exact mean is one all-reduce."""

    def finish(self) -> None:
        """Wait for the mean and write it into the results."""
        metering.wait(self._work, self._group)
        values = pieces_of(self._flat, [result.shape for result in self._results])
        torch._foreach_copy_(list(self._results), list(values))


PendingMean = QuantizedMean | ExactMean  # a mean over the replicas that has started


@torch.no_grad()
def expected_mean(
    values: Sequence[Tensor],
    comm_format: CommunicationFormat,
    cut: Sequence[Region],
    keys: RoundingKeys,
    name: str,
    *,
    sent_back: bool = True,
) -> Tensor:
    """Compute the result of a `QuantizedMean` in one process, for parity checks.

    Args:
        values: the unsharded contribution of each replica. With error feedback, they are
            overwritten by the rounding errors.
        comm_format: the communication format.
        cut: the local shards of the ranks of a replica, because blocks are made per local shard.
        keys: keys of stochastic rounding.
        name: FQN of the parameter.
        sent_back: True if owners round the mean and send it to all replicas.
    """
    mean = torch.empty_like(values[0])
    for region in cut:
        parts = []
        for value in values:
            parts.append(as_real(value[region.slices]))
        quantizer = None
        if comm_format.rounds:
            piece = Piece(keys.of(name), region.position_in(mean.shape))
            quantizer = comm_format.quantizer(parts[:1], [piece])
        total = torch.zeros_like(parts[0])
        for replica, part in enumerate(parts):
            sent = _as_read(quantizer, part, contribution_stage(replica))
            total += sent
            if comm_format.has_error_feedback:
                part -= sent
        total /= len(parts)
        if sent_back and len(parts) > 2:
            mean_read = _as_read(quantizer, total, MEAN_STAGE)
            if comm_format.has_error_feedback:
                # Each replica stores the rounding error of the means that it owns.
                rest = (total - mean_read) * len(parts)
                owners = owners_of(blocks_of(rest.numel()), keys.of(name), len(parts)).repeat(BLOCK)
                of_value = torch.from_numpy(owners[: rest.numel()]).view(rest.shape)
                for replica, part in enumerate(parts):
                    part += torch.where(of_value == replica, rest, 0)
            total = mean_read
        as_real(mean[region.slices]).copy_(total)
    return mean


def _as_read(quantizer: Quantizer | None, values: Tensor, stage: int) -> Tensor:
    """Return ``values`` quantized and dequantized; unchanged if ``quantizer`` is None."""
    if quantizer is None:
        return values
    found = torch.empty_like(values)
    sent = quantizer.quantize(quantizer.rows([values]), 0, stage)
    put_back(quantizer, quantizer.dequantize(sent, values.dtype), [found])
    return found

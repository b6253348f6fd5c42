"""What a rank reads of every global batch (`BatchPlan`), and reading it ahead of the training step
(`BatchFeed`).

A background thread reads the samples and, for a GPU, pins them; numpy releases the interpreter lock
during the copies. The calling thread starts the copies to the device. A fixed number of steps is
read ahead, which bounds memory.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from parallel2d.base.device import current_device, set_device
from parallel2d.base.errors import ConfigError
from parallel2d.training.data.batch import Batch
from parallel2d.training.data.stream import Position, SampleStream

_AUTO_LIMIT = 8  # sequences of an automatic micro-batch


class BatchPlan:
    """The share of one data rank in every global batch. Only data ranks (the replicate and shard
    axes) count: the tensor ranks of one have the same plan and read the same sequences.

    Args:
        global_batch_size: sequences per optimizer step, over all data ranks.
        micro_batch_size: sequences per forward on a rank; ``"auto"`` takes the largest divisor of
            the rank's share up to 8.
        data_rank, data_ranks: this rank's coordinate on, and the size of, the flattened replicate
            and shard axes.
        allow_padding: accept sizes that do not divide (an elastic restart on another number of
            ranks). Every rank runs the same number of micro-batches, and missing sequences have
            position None, which means weight zero.

    Raises `ConfigError` that lists the sizes that divide.
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int | str,
        data_rank: int,
        data_ranks: int,
        allow_padding: bool = False,
    ) -> None:
        assert 0 <= data_rank < data_ranks, (data_rank, data_ranks)
        share = -(-global_batch_size // data_ranks)
        if micro_batch_size == "auto":
            # Padding may cost an eighth, so that micro-batches stay large
            slots = share * 9 // 8 if allow_padding else share
            micro = max(
                size for size in range(1, _AUTO_LIMIT + 1) if -(-share // size) * size <= slots
            )
        else:
            micro = int(micro_batch_size)
        if global_batch_size % (micro * data_ranks) and not allow_padding:
            raise ConfigError(_indivisible(global_batch_size, micro_batch_size, micro, data_ranks))
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro
        self.accumulation = -(-global_batch_size // (micro * data_ranks))
        self.pads = allow_padding
        self._data_rank, self._data_ranks = data_rank, data_ranks

    def positions(self, first: int) -> list[list[Position]]:
        """``micro_batch_size`` positions for each of this rank's micro-batches, in the global batch
        that starts at position ``first``.

        Micro-batch m of all ranks together is one contiguous range, so the union over ranks is
        ``first .. first + global_batch_size - 1`` for every layout.
        """
        batches: list[list[Position]] = []
        for step in range(self.accumulation):
            begin = (step * self._data_ranks + self._data_rank) * self.micro_batch_size
            slots = range(begin, begin + self.micro_batch_size)
            batches.append(
                [first + slot if slot < self.global_batch_size else None for slot in slots]
            )
        return batches


def _indivisible(global_batch: int, asked: int | str, micro: int, ranks: int) -> str:
    product, factors, advice = ranks, f"{ranks} data ranks", ""
    if asked != "auto":
        product = micro * ranks
        factors = f"micro_batch_size {micro} x {ranks} data ranks = {product}"
        # The rank's share has divisors where there is one.
        share, rest = divmod(global_batch, ranks)
        divisors = [str(size) for size in range(1, min(share, 64) + 1) if share % size == 0]
        if not rest:
            advice = f"micro_batch_size may be {' | '.join(divisors)}; "
    below = global_batch // product * product
    # The smaller size may be zero, which is none.
    sizes = [str(size) for size in (below, below + product, below + 2 * product) if size]
    problem = f"train.global_batch_size={global_batch} is not divisible by {factors}"
    return f"{problem}; {advice}global_batch_size may be {', '.join(sizes)}"


class EndOfData(Exception):  # noqa: N818  (not an error, like StopIteration)
    """The last global batch was already given: epochs are finite, or it is a validation split."""


@dataclass(frozen=True)
class StepBatch:
    """What one rank reads for one optimizer step."""

    micro_batches: list[Batch]
    valid_tokens: int  # targets of this rank over all micro-batches
    sample_hash: int  # sum over this rank's samples
    waited_s: float  # seconds that `BatchFeed.next` was blocked
    position: int  # of the first sample after this global batch: what a checkpoint stores


class BatchFeed:
    """Iterates over the global batches of a stream, prepared ``ahead`` steps in advance.

    Args:
        plan: this rank's share.
        device: where the micro-batches are put.
        start: position, in samples, of the first global batch.
        ahead: steps that may wait in memory; each costs micro-batch x accumulation x T x 16 bytes,
            of other samples what they take.

    Raises `ConfigError` if there is not one global batch to give.
    """

    def __init__(
        self,
        stream: SampleStream,
        plan: BatchPlan,
        device: torch.device | str,
        start: int = 0,
        ahead: int = 2,
    ) -> None:
        if stream.ends_before(0, plan.global_batch_size):
            raise ConfigError(
                f"train.global_batch_size={plan.global_batch_size} is more than an epoch has: "
                f"{len(stream)} samples; data.end=drop omits what does not fill a global batch, "
                "pad or wrap would not"
            )
        self._stream, self._plan, self._device = stream, plan, torch.device(device)
        initializer = None
        if self._device.type != "cpu":
            if self._device.index is None:
                self._device = current_device(self._device.type)
            # The current device of the thread: otherwise pinning creates a context on GPU 0
            initializer = functools.partial(set_device, self._device)
        self._reader = ThreadPoolExecutor(1, "parallel2d-data", initializer)
        self._steps: deque[Future[StepBatch]] = deque()
        self._closed = False
        self._ahead = max(1, ahead) + 1  # one is read while ``ahead`` wait
        self.restart(plan, start)

    def restart(self, plan: BatchPlan, start: int) -> None:
        """Goes on from position ``start`` with another share of the global batches."""
        for step in self._steps:
            step.cancel()
        self._steps.clear()
        self._plan, self._position = plan, start
        for _ in range(self._ahead):
            self._read_ahead()

    def next(self) -> StepBatch:
        """This rank's part of the next global batch, on the device.

        Raises `EndOfData` after the last one, and any exception of the background thread. Later
        calls raise the same exception again.
        """
        if self._closed:
            raise RuntimeError("the feed is closed")
        begin = time.perf_counter()
        # It is taken when it is there: an interrupt of the wait loses no step, and an exception
        # stays the first of all that follow.
        step = self._steps[0].result()
        waited = time.perf_counter() - begin
        self._steps.popleft()
        self._read_ahead()
        moved = [batch.to(self._device, non_blocking=True) for batch in step.micro_batches]
        return replace(step, micro_batches=moved, waited_s=waited)

    def close(self) -> None:
        """Stops the thread and discards the batches it prepared. May be called twice."""
        self._closed = True
        self._reader.shutdown(cancel_futures=True)
        self._steps.clear()

    def _read_ahead(self) -> None:
        self._steps.append(self._reader.submit(self._read, self._position))
        self._position += self._plan.global_batch_size

    def _read(self, position: int) -> StepBatch:
        if self._stream.ends_before(position, self._plan.global_batch_size):
            raise EndOfData(f"the data ends before position {position}")
        batches = [self._stream.read(positions) for positions in self._plan.positions(position)]
        if self._device.type != "cpu":
            batches = [batch.pin_memory() for batch in batches]
        return StepBatch(
            batches,
            valid_tokens=sum(batch.valid_tokens for batch in batches),
            sample_hash=sum(batch.hash for batch in batches),
            waited_s=0.0,
            position=position + self._plan.global_batch_size,
        )

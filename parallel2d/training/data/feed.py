"""`BatchPlan` determines a rank's share of every global batch, and `BatchFeed` reads this share
ahead of the training step.

A background thread reads the samples and, for a GPU, copies the samples to pinned memory. NumPy
releases the interpreter lock during copies, so the training thread can run meanwhile. The training
thread starts the copies to the device. The number of steps that are read ahead is fixed, so memory
is bounded.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch

from parallel2d.base.device import current_device, set_device
from parallel2d.base.errors import ConfigError
from parallel2d.training.data.batch import Batch
from parallel2d.training.data.stream import Position, SampleStream

_AUTO_LIMIT = 8  # most sequences in an automatic micro-batch


class BatchPlan:
    """The share of one data rank in every global batch. Data ranks are the positions on the
    replicate and shard axes. All context and tensor ranks of a data rank have the same plan and
    read the same sequences.

    Args:
        global_batch_size: sequences per optimizer step, over all data ranks.
        micro_batch_size: sequences per forward on a rank; ``"auto"`` takes the largest divisor of
            the rank's share up to 8.
        data_rank: this rank's coordinate on the flattened replicate and shard axes.
        data_ranks: the size of these axes.
        allow_padding: accept sizes that do not divide evenly, for an elastic restart on another
            number of ranks. Every rank runs the same number of micro-batches. Missing sequences
            have the position None, and weight zero in the loss.

    Raises `ConfigError` with the sizes that divide evenly.
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
            # Padding may add up to an eighth of the share, so that micro-batches need not become
            # smaller.
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

    @property
    def share(self) -> tuple[int, int]:
        """The data rank, and the number of data ranks."""
        return self._data_rank, self._data_ranks

    def positions(self, first: int, work: Sequence[float] | None = None) -> list[list[Position]]:
        """Return the positions of this rank's micro-batches in the global batch that starts at
        position ``first``. Each micro-batch has ``micro_batch_size`` positions.

        The micro-batches with the same number on all ranks form one contiguous range. Therefore the
        union over ranks is ``first .. first + global_batch_size - 1`` for every layout, and a run
        that continues on another layout reads every sample exactly once. With ``work``, the cost of
        each position, the same positions are distributed so that all ranks have about the same cost
        in each micro-batch.
        """
        if work is not None:
            return self._balanced(first, work, self._data_rank)
        batches: list[list[Position]] = []
        for step in range(self.accumulation):
            begin = (step * self._data_ranks + self._data_rank) * self.micro_batch_size
            slots = range(begin, begin + self.micro_batch_size)
            batches.append(
                [first + slot if slot < self.global_batch_size else None for slot in slots]
            )
        return batches

    def _balanced(self, first: int, work: Sequence[float], rank: int) -> list[list[Position]]:
        """Return the positions of one rank. Positions are sorted by decreasing cost. In each turn
        every rank takes one position; every second turn goes through the ranks in reverse order."""
        order = np.argsort(-np.asarray(work), kind="stable").tolist()
        taken: list[Position] = []
        for turn in range(self.accumulation * self.micro_batch_size):
            place = rank if turn % 2 == 0 else self._data_ranks - 1 - rank
            slot = turn * self._data_ranks + place
            taken.append(first + order[slot] if slot < len(order) else None)
        size = self.micro_batch_size
        found: list[list[Position]] = []
        for begin in range(0, len(taken), size):
            found.append(taken[begin : begin + size])
        return found

    def imbalance(self, work: Sequence[float]) -> float:
        """Return the work of the rank with the most work, divided by the mean over ranks."""
        sums = []
        for rank in range(self._data_ranks):
            taken = chain.from_iterable(self._balanced(0, work, rank))
            sums.append(sum(work[at] for at in taken if at is not None))
        return max(sums) * len(sums) / max(sum(sums), 1)


def _indivisible(global_batch: int, asked: int | str, micro: int, ranks: int) -> str:
    product, factors, advice = ranks, f"{ranks} data ranks", ""
    if asked != "auto":
        product = micro * ranks
        factors = f"micro_batch_size {micro} x {ranks} data ranks = {product}"
        # If the data ranks divide the global batch evenly, the divisors of a rank's share are valid
        # sizes.
        share, rest = divmod(global_batch, ranks)
        divisors = []
        for size in range(1, min(share, 64) + 1):
            if share % size == 0:
                divisors.append(str(size))
        if not rest:
            advice = f"micro_batch_size may be {' | '.join(divisors)}; "
    below = global_batch // product * product
    # The smallest size may be zero, which is not valid.
    sizes = []
    for size in (below, below + product, below + 2 * product):
        if size:
            sizes.append(str(size))
    problem = f"train.global_batch_size={global_batch} is not divisible by {factors}"
    return f"{problem}; {advice}global_batch_size may be {', '.join(sizes)}"


class EndOfData(Exception):  # noqa: N818  (not an error, like StopIteration)
    """The stream has no further global batch."""


@dataclass(frozen=True)
class StepBatch:
    """The data of one rank for one optimizer step."""

    micro_batches: list[Batch]
    valid_tokens: int  # targets of this rank over all micro-batches
    sample_hash: int  # sum over this rank's samples
    waited_s: float  # seconds that `BatchFeed.next` was blocked
    position: int  # position after this global batch, which a checkpoint stores
    # Metrics of the global batch, by key; equal on all ranks
    metrics: Mapping[str, float] = field(default_factory=dict)


class BatchFeed:
    """Reads this rank's share of the global batches of a stream, ``ahead`` steps in advance.

    Args:
        stream: the samples.
        plan: this rank's share.
        device: the device for the micro-batches.
        start: position, in samples, of the first global batch.
        ahead: number of steps that may wait in memory. Each step takes micro-batch x accumulation x
            T x 16 bytes, or the size of its samples if these are not token sequences.

    Raises `ConfigError` if the stream is shorter than one global batch.
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
                f"{len(stream)} samples; data.end=drop omits an incomplete global batch, "
                "pad or wrap would not"
            )
        self._stream, self._device = stream, torch.device(device)
        initializer = None
        if self._device.type != "cpu":
            if self._device.index is None:
                self._device = current_device(self._device.type)
            # Set the current device in the thread, because pinning memory would otherwise create a
            # context on GPU 0.
            initializer = functools.partial(set_device, self._device)
        self._reader = ThreadPoolExecutor(1, "parallel2d-data", initializer)
        self._steps: deque[Future[StepBatch]] = deque()
        self._closed = False
        self._ahead = max(1, ahead) + 1  # one step is being read while ``ahead`` steps wait
        self.restart(plan, start)

    def restart(self, plan: BatchPlan, start: int) -> None:
        """Continue from position ``start`` with the share ``plan`` of the global batches."""
        for step in self._steps:
            step.cancel()
        self._steps.clear()
        self.plan, self._position = plan, start
        for _ in range(self._ahead):
            self._read_ahead()

    def part(self, plan: BatchPlan, start: int, prepared: StepBatch | None) -> StepBatch:
        """Return the share ``plan`` of the global batch at position ``start``. Later calls of
        `next` continue after this global batch. ``prepared``: the batch that `next` has already
        returned for this position, or None.
        """
        if prepared is not None and plan.share == self.plan.share:
            return prepared
        self.restart(plan, start)
        return self.next()

    def next(self) -> StepBatch:
        """Return this rank's share of the next global batch, on the device.

        Raises `EndOfData` after the last global batch, and any exception of the background thread.
        Later calls raise the same exception again.
        """
        if self._closed:
            raise RuntimeError("the feed is closed")
        begin = time.perf_counter()
        # The step leaves the queue only after its result is available. If a signal interrupts the
        # wait, the step is still first in the queue, so that no global batch is skipped. After an
        # exception, every later call finds the same failed step and raises the same exception.
        step = self._steps[0].result()
        waited = time.perf_counter() - begin
        self._steps.popleft()
        self._read_ahead()
        moved = []
        for batch in step.micro_batches:
            moved.append(batch.to(self._device, non_blocking=True))
        return replace(step, micro_batches=moved, waited_s=waited)

    def close(self) -> None:
        """Stop the thread and discard the batches that it has prepared. May be called twice."""
        self._closed = True
        self._reader.shutdown(cancel_futures=True)
        self._steps.clear()

    def _read_ahead(self) -> None:
        self._steps.append(self._reader.submit(self._read, self._position))
        self._position += self.plan.global_batch_size

    def _read(self, position: int) -> StepBatch:
        if self._stream.ends_before(position, self.plan.global_batch_size):
            raise EndOfData(f"the data ends before position {position}")
        plan, work = self.plan, None
        metrics: dict[str, float] = {}
        loads = self._stream.loads(position, plan.global_batch_size)
        if loads is not None:
            work, tokens = loads[0].tolist(), int(loads[1].sum())
            slots = plan.global_batch_size * self._stream.shape.targets_per_sample
            metrics = {
                "padding": 1 - tokens / slots,
                "imbalance": plan.imbalance(work),
            }
        batches = []
        for each in plan.positions(position, work):
            batches.append(self._stream.read(each, filler=position))
        if self._device.type != "cpu":
            batches = [batch.pin_memory() for batch in batches]
        return StepBatch(
            batches,
            valid_tokens=sum(batch.valid_tokens for batch in batches),
            sample_hash=sum(batch.hash for batch in batches),
            waited_s=0.0,
            position=position + plan.global_batch_size,
            metrics=metrics,
        )

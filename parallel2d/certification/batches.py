"""The global batches of a certification: `batches_of`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parallel2d.data import EndOfData, StepBatch
from parallel2d.data.batch import IGNORED, Batch

# Micro-batches of the global batch that starts at a position, in samples
Read = Callable[[int], list[Batch]]


def batches_of(
    read: Read, global_batch_size: int, steps: int, data_rank: int, data_ranks: int
) -> list[StepBatch]:
    """What one data rank reads in ``steps`` steps; every data rank must be asked alike.

    Of every four steps the first and the last are as training has them. The second joins two global
    batches, so that gradients are accumulated; the third joins them in the other order, and its
    last micro-batch has fewer targets than the others, on each data rank another number, on the
    last none.
    """
    found: list[StepBatch] = []
    position = 0
    for step in range(steps):
        first = read(position)
        kind = step % 4
        if kind in (1, 2):
            second = read(position + global_batch_size)
            micro_batches = [*first, *second]
            if kind == 2:
                micro_batches.reverse()
                micro_batches[-1] = _with_fewer_targets(
                    micro_batches[-1], (data_rank + 1) / data_ranks
                )
            # The third step reads what the second has read.
            position += 0 if kind == 1 else 2 * global_batch_size
        else:
            micro_batches = first
            position += global_batch_size
        found.append(_step_batch(micro_batches, position))
    return found


def is_as_configured(step: int) -> bool:
    """Whether ``step``, from 1, has as many micro-batches as training has."""
    return (step - 1) % 4 in (0, 3)


class ListedFeed:
    """Hands out the batches of a list as `parallel2d.data.BatchFeed` does."""

    def __init__(self, batches: list[StepBatch]) -> None:
        self._remaining = iter(batches)

    def next(self) -> StepBatch:
        """Raises `EndOfData` after the last one."""
        for batch in self._remaining:
            return batch
        raise EndOfData("the batches of the certification are used up")


def _step_batch(micro_batches: list[Batch], position: int) -> StepBatch:
    return StepBatch(
        micro_batches,
        valid_tokens=sum(batch.valid_tokens for batch in micro_batches),
        sample_hash=sum(batch.hash for batch in micro_batches),
        waited_s=0.0,
        position=position,
    )


def _with_fewer_targets(batch: Batch, share: float) -> Batch:
    """The first ``share`` of each sequence, or of the images, has no target."""
    targets = batch.targets.clone()
    if targets.dim() > 1:
        targets[:, : round(targets.shape[1] * share)] = IGNORED
    else:
        targets[: round(len(targets) * share)] = IGNORED
    return replace(batch, targets=targets, valid_tokens=int((targets != IGNORED).sum()))

"""Reads samples by position: `SampleStream`, the only source of batches in training.

A stream is an infinite or finite sequence of samples, addressed by position. The sample at a
position depends only on the data, the size of a sample and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from parallel2d.base.errors import ConfigError
from parallel2d.training.data.batch import IGNORED, Batch, SampleHash
from parallel2d.training.data.packing import Array, FittedSamples, Samples
from parallel2d.training.data.sample_order import Order, Schedule

Position = int | None
# Positions that are permuted together: permuting many costs little more than permuting one.
_BLOCK = 1024


@dataclass(frozen=True)
class End:
    """The end of a finite stream, and the treatment of an incomplete last global batch."""

    positions: int  # number of samples in the stream
    # drop omits the batch, pad gives missing samples weight zero, wrap fills from the next epoch
    policy: str


class SampleStream:
    """Samples addressed by position.

    Args:
        components: the lists of samples, all of one shape; several make a mixture.
        schedule: the component of each position.
        seed, name: choose the order; streams with other names are independent of this stream.
        intra_document_masking: batches contain document ids.
        context: number of positions at the start of every sequence whose targets are ignored.
        epochs: number of epochs; 0 reads epoch after epoch without end.
        end: the policy of `End`.
    """

    def __init__(
        self,
        components: Sequence[Samples],
        schedule: Schedule,
        *,
        seed: int,
        name: str = "train",
        intra_document_masking: bool = False,
        context: int = 0,
        epochs: int = 0,
        end: str = "wrap",
    ) -> None:
        lengths = list(map(len, components))
        self._components, self._schedule = components, schedule
        self._orders = [Order(size, seed, f"{name}/{n}") for n, size in enumerate(lengths)]
        self._length = schedule.positions_before_repeat(lengths)
        self.shape = components[0].shape
        self._prepare: Callable[[Batch], Batch] | None = None
        self._vocab_size: int | None = None
        self._with_ids, self._context = intra_document_masking, context
        self._width = 1024
        # Positions that are read together lie in few blocks of the order.
        self._block = lru_cache(maxsize=4 * len(components))(self._compute_block)
        self.end = End(epochs * self._length, end) if epochs else None
        # Positions from here on have no samples.
        self._limit = epochs * self._length if epochs and end != "wrap" else math.inf

    def __len__(self) -> int:
        """The samples in one epoch; for a mixture, the positions until a component is exhausted."""
        return self._length

    def global_batches(self, global_batch_size: int) -> int | None:
        """Return the number of global batches until the end; None for an infinite stream."""
        if self.end is None:
            return None
        whole, rest = divmod(self.end.positions, global_batch_size)
        return whole + bool(rest and self.end.policy != "drop")

    def ends_before(self, position: int, global_batch_size: int) -> bool:
        """True if no global batch exists at ``position``."""
        if self.end is None:
            return False
        if self.end.policy == "drop":
            return position + global_batch_size > self.end.positions
        return position >= self.end.positions

    def known_state(self) -> dict[str, Any]:
        """Return the part of a run's state that finds positions faster; empty for random access."""
        return {}

    def collect(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `known_state` at the position in the ``state`` of a run. Collective."""
        return self.known_state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the ``state`` of a run with `known_state`."""

    def weigh(self, width: int) -> None:
        """Have `loads` estimate the FLOPs of a model with hidden states of this width."""
        self._width = width

    def loads(self, first: int, count: int) -> tuple[Array, Array] | None:
        """Return the estimated FLOPs and the tokens of ``count`` positions from ``first``, both up
        to one factor; None for samples that are not fitted documents.

        A block of a transformer takes about 24 d² FLOPs per token, and attention to n earlier
        tokens 4 d n, half of them on average.
        """
        if not all(isinstance(each, FittedSamples) for each in self._components):
            return None
        work, tokens = np.zeros(count, np.int64), np.zeros(count, np.int64)
        where = np.arange(first, int(min(first + count, self._limit)))
        for row, (component, index) in enumerate(self._locate(where)):
            sizes: Array = component.sizes(index)  # type: ignore[attr-defined]
            tokens[row] = sizes.sum()
            work[row] = (sizes * (12 * self._width + sizes)).sum()
        return work, tokens

    def prepare_by(self, prepare: Callable[[Batch], Batch]) -> None:
        """Pass every batch through ``prepare`` after it has been read."""
        self._prepare = prepare

    def check_ids(self, vocab_size: int) -> None:
        """Have `read` raise `ConfigError` for token ids that are not below ``vocab_size``."""
        self._vocab_size = vocab_size

    def read(self, positions: Sequence[Position], filler: int = 0) -> Batch:
        """Read the samples at ``positions`` into host memory.

        A position that is None, or behind the end of a stream with the policy pad or drop, has no
        valid target. Its inputs are those of position ``filler`` in the same global batch, so that
        it uses no module that this global batch does not use. Raises the exception of a component
        for a sample that cannot be read.
        """
        rows = []
        for row, at in enumerate(positions):
            if at is not None and at < self._limit:
                rows.append(row)
        where = np.array([positions[row] for row in rows], dtype=np.int64)
        batch = self._batch(len(positions), rows, where, filler)
        return batch if self._prepare is None else self._prepare(batch)

    @cached_property
    def _hash(self) -> SampleHash:
        return SampleHash(self.shape)

    def _batch(self, count: int, rows: list[int], where: Array, filler: int) -> Batch:
        """Return ``count`` rows of tokens. ``rows`` are the numbers of the rows with a position,
        and ``where`` are their positions; the other rows have the inputs of position ``filler``."""
        shape: Any = self.shape
        inputs = np.empty((count, *shape.inputs.shape), np.int64)
        targets = np.empty((count, *shape.targets.shape), np.int64)
        ids = np.empty_like(targets) if self._with_ids else None
        missing = sorted(set(range(count)) - set(rows))
        if missing:
            where = np.append(where, filler)
        for row, (component, index) in zip(rows + missing[:1], self._locate(where), strict=True):
            component.read(index, inputs[row], targets[row], None if ids is None else ids[row])
        # Checked on the host, because a kernel on a GPU would end the process without a reason.
        if self._vocab_size is not None and rows:
            largest = int(max(inputs[rows].max(), targets[rows].max()))
            if largest >= self._vocab_size:
                raise ConfigError(
                    f"the data have the token id {largest}, and the model's embedding has "
                    f"{self._vocab_size} rows: another tokenizer has made them, or the model needs "
                    f"a vocabulary of {largest + 1} at least"
                )
        if missing:
            inputs[missing], targets[missing] = inputs[missing[0]], IGNORED
            if ids is not None:
                ids[missing] = ids[missing[0]]
        if self._context:
            # These positions see fewer than ``context`` earlier tokens.
            targets[:, : self._context] = IGNORED
        # Rows without a position are not hashed. If all rows have a position, no copy is needed.
        hashed = rows if missing else slice(None)
        hashes = self._hash(inputs[hashed], targets[hashed], where[: len(rows)])
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            None if ids is None else torch.from_numpy(ids),
            hash=int(hashes.sum()),
            valid_tokens=int(np.count_nonzero(targets != IGNORED)),
        )

    def _locate(self, positions: Array) -> Iterator[tuple[Samples, int]]:
        """Yield the component of each position, and the index of the sample in the component."""
        chosen, local = self._schedule.locate(positions)
        for number, place in zip(chosen.tolist(), local.tolist(), strict=True):
            block, offset = divmod(place, _BLOCK)
            yield self._components[number], int(self._block(number, block)[offset])

    def _compute_block(self, number: int, block: int) -> Array:
        """Return the sample indices of one block of positions in a component."""
        return self._orders[number].index(np.arange(block * _BLOCK, (block + 1) * _BLOCK))

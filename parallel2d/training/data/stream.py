"""`SampleStream` reads samples by position. All batches in training come from a `SampleStream`.

A stream is a finite or infinite sequence of samples, and a position is an index in this sequence.
The sample at a position depends only on the data, the size of a sample and the seed.
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
# Number of positions that are permuted together, because this costs little more than permuting one
# position
_BLOCK = 1024


@dataclass(frozen=True)
class End:
    """The end of a finite stream, and the treatment of an incomplete last global batch."""

    positions: int  # number of samples in the stream
    # "drop" omits the batch, "pad" gives missing samples weight zero, "wrap" takes samples from the
    # next epoch
    policy: str


class SampleStream:
    """A sequence of samples that are read by position.

    Args:
        components: lists of samples of the same shape. Several lists form a mixture.
        schedule: the component of each position.
        seed, name: determine the order. Streams with different names have independent orders.
        intra_document_masking: batches contain document ids.
        context: number of token positions at the start of every sequence whose targets are ignored.
        epochs: number of epochs; 0: no end.
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
        # Positions that are read together belong to few blocks, so a small cache suffices.
        self._block = lru_cache(maxsize=4 * len(components))(self._compute_block)
        self.end = End(epochs * self._length, end) if epochs else None
        # Positions from here on have no samples.
        self._limit = epochs * self._length if epochs and end != "wrap" else math.inf

    def __len__(self) -> int:
        """Number of samples in one epoch. For a mixture: the number of positions before a component
        starts its second epoch."""
        return self._length

    def global_batches(self, global_batch_size: int) -> int | None:
        """Return the number of global batches until the end; None for an infinite stream."""
        if self.end is None:
            return None
        whole, rest = divmod(self.end.positions, global_batch_size)
        return whole + bool(rest and self.end.policy != "drop")

    def ends_before(self, position: int, global_batch_size: int) -> bool:
        """True if the stream has no global batch at ``position``."""
        if self.end is None:
            return False
        if self.end.policy == "drop":
            return position + global_batch_size > self.end.positions
        return position >= self.end.positions

    def known_state(self) -> dict[str, Any]:
        """Return the state with which a resumed run finds its position quickly; empty if samples
        can be read at any position directly."""
        return {}

    def collect(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `known_state` for the position in ``state``, the state of a run. Collective."""
        return self.known_state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, the state of a run, which contains a `known_state`."""

    def weigh(self, width: int) -> None:
        """Set the width of the model's hidden states, by which `loads` estimates FLOPs."""
        self._width = width

    def loads(self, first: int, count: int) -> tuple[Array, Array] | None:
        """Return the estimated FLOPs, in arbitrary units, and the number of tokens of each of
        ``count`` positions from ``first``. Return None unless the samples are `FittedSamples`.

        A transformer block takes about 24 d² FLOPs per token. Attention to n earlier tokens takes
        another 4 d n FLOPs; on average, a token attends to half of its document.
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
        """Apply ``prepare`` to every batch that is read from now on."""
        self._prepare = prepare

    def check_ids(self, vocab_size: int) -> None:
        """From now on, `read` raises `ConfigError` for token ids that are not below
        ``vocab_size``."""
        self._vocab_size = vocab_size

    def read(self, positions: Sequence[Position], filler: int = 0) -> Batch:
        """Read the samples at ``positions`` into host memory.

        A row has no valid targets if its position is None, or after the end of a stream with the
        policy "pad" or "drop". This row gets the inputs of position ``filler`` in the same global
        batch, so that it uses no modules (such as experts) that the global batch does not use. If a
        sample cannot be read, the exception is raised.
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
        """Return ``count`` rows of tokens. ``rows``: indices of the rows with a position;
        ``where``: the positions of these rows. All other rows get the inputs of position
        ``filler``."""
        shape: Any = self.shape
        inputs = np.empty((count, *shape.inputs.shape), np.int64)
        targets = np.empty((count, *shape.targets.shape), np.int64)
        ids = np.empty_like(targets) if self._with_ids else None
        missing = sorted(set(range(count)) - set(rows))
        if missing:
            where = np.append(where, filler)
        for row, (component, index) in zip(rows + missing[:1], self._locate(where), strict=True):
            component.read(index, inputs[row], targets[row], None if ids is None else ids[row])
        # The ids are checked on the host, because on a GPU an invalid id ends the process without a
        # clear message.
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
            # The model has no output for the targets of the first ``context`` positions.
            targets[:, : self._context] = IGNORED
        # Only rows with a position are hashed. If all rows have a position, a slice avoids a copy.
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

"""Packs documents into samples of a fixed length: `PackedSamples`, `PaddedSamples`,
`FittedSamples`."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from parallel2d.parallel.parallelize.layout import SampleShape
from parallel2d.training.data.batch import IGNORED, token_sequences

Array = NDArray[np.int64]
_FITTED_TOGETHER = 4096  # number of consecutive documents that `FittedSamples` fits at one time


class Samples(Protocol):
    """A list of samples in storage order."""

    shape: SampleShape

    def __len__(self) -> int: ...

    def read(self, index: int, inputs: Array, targets: Array, document_ids: Array | None) -> None:
        """Write the sample at ``index`` to the arrays, which have the shapes in `shape`.
        Thread-safe."""


class _TokenSamples:
    # ``split``: a `TokenSplit`, or an object with the same method ``ids``
    def __init__(self, split: Any, seq_len: int, end_id: int) -> None:
        self._split, self.seq_len, self._end_id = split, seq_len, end_id
        self.shape = token_sequences(seq_len)

    def _fill(self, start: int, count: int, inputs: Array, targets: Array) -> None:
        """Copy ``count`` tokens from ``start`` to ``inputs``, and the token after each to
        ``targets``. Pad inputs with the end id, and targets with ignored targets."""
        tokens = self._split.ids(start, count + 1)
        inputs[:count], targets[:count] = tokens[:-1], tokens[1:]
        inputs[count:], targets[count:] = self._end_id, IGNORED
        if self._split.masked:
            targets[:count][~self._split.may_be_target(start + 1, count)] = IGNORED


class PackedSamples(_TokenSamples):
    """Sample i has the tokens i·T .. (i+1)·T of the split. Each token except the first is a target
    exactly once.

    The last sample is padded with the end id, and the targets of the padding are ignored. With
    ``intra_document_masking`` the first token of each document is not a target, because it would be
    predicted from another document.
    """

    def __init__(
        self, split: Any, seq_len: int, end_id: int, intra_document_masking: bool = False
    ) -> None:
        super().__init__(split, seq_len, end_id)
        self._respect_documents = intra_document_masking

    def __len__(self) -> int:
        return -(-max(0, self._split.tokens - 1) // self.seq_len)

    def read(self, index: int, inputs: Array, targets: Array, document_ids: Array | None) -> None:
        start = index * self.seq_len
        count = min(self.seq_len, self._split.tokens - 1 - start)
        self._fill(start, count, inputs, targets)
        if self._respect_documents:
            # Positions in this sample at which a further document starts, from 1 to count
            ends = self._split.document_ends(start, count) - start
            targets[ends - 1] = IGNORED
            if document_ids is not None:
                starts = np.zeros(self.seq_len, np.int64)
                starts[ends[ends < self.seq_len]] = 1
                np.cumsum(starts, out=document_ids)


class PaddedSamples(_TokenSamples):
    """Sample i is document i, cut to T + 1 tokens and padded with the end id. The targets of the
    padding are ignored."""

    def __len__(self) -> int:
        return self._split.documents

    def read(self, index: int, inputs: Array, targets: Array, document_ids: Array | None) -> None:
        begin, end = self._split.document_span(index)
        count = min(self.seq_len, end - begin - 1)
        self._fill(begin, count, inputs, targets)
        if document_ids is not None:
            document_ids[:count], document_ids[count:] = 0, 1


class FittedSamples(_TokenSamples):
    """Sample i is a row with one or more documents. Each document is cut to T + 1 tokens, and the
    row is padded with the end id.

    Rows are filled by best-fit decreasing, separately for each block of consecutive documents. The
    result depends only on the sizes of the documents.
    """

    def __init__(self, split: Any, seq_len: int, end_id: int) -> None:
        super().__init__(split, seq_len, end_id)
        rows: list[list[int]] = []
        for first in range(0, split.documents, _FITTED_TOGETHER):
            count = min(_FITTED_TOGETHER, split.documents - first)
            rows += _fitted(split.document_sizes(first, count) - 1, first, seq_len)
        self._starts = np.cumsum([0, *map(len, rows)])
        self._documents = np.fromiter(chain.from_iterable(rows), np.int64, int(self._starts[-1]))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def sizes(self, index: int) -> Array:
        """Return the number of tokens of each document in the row ``index``."""
        spans = list(map(self._split.document_span, self._row(index)))
        return np.array([min(end - begin - 1, self.seq_len) for begin, end in spans], np.int64)

    def _row(self, index: int) -> list[int]:
        return self._documents[self._starts[index] : self._starts[index + 1]].tolist()

    def read(self, index: int, inputs: Array, targets: Array, document_ids: Array | None) -> None:
        at = number = 0
        for number, document in enumerate(self._row(index), 1):
            begin, end = self._split.document_span(document)
            count = min(self.seq_len, end - begin - 1)
            self._fill(begin, count, inputs[at:], targets[at:])
            if document_ids is not None:
                document_ids[at : at + count] = number - 1
            at += count
        if document_ids is not None:
            document_ids[at:] = number


def _fitted(sizes: Array, first: int, most: int) -> list[list[int]]:
    """Return rows of document numbers, filled by best-fit decreasing: in the order from the largest
    to the smallest document, each document goes to the fullest row with enough space. ``first``:
    number of the first document."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = min(int(sizes[index]), most)
        if size < 1:  # a single token predicts nothing
            continue
        place = bisect_left(rooms, (size, -1))
        if place == len(rooms):
            room, row = most, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(first + index)
        insort(rooms, (room - size, row))
    return rows

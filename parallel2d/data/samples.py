"""Turns documents into samples of a fixed length: rows of inputs, targets and document ids.

`PackedSamples` cuts the sequence of all documents into rows without gaps. `PaddedSamples` puts each
document into a row of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parallel2d.data.batch import IGNORED, token_sequences
from parallel2d.data.token_shards import TokenSplit

Row = NDArray[np.int64]


class PackedSamples:
    """Sample i reads tokens i·T .. (i+1)·T of the split: each token but the first is a target
    exactly once.

    The last sample is padded with the end id, without targets. With ``intra_document_masking`` the
    first token of a document is not a target either: it would be predicted from another document.
    """

    def __init__(
        self, split: TokenSplit, seq_len: int, end_id: int, intra_document_masking: bool = False
    ) -> None:
        self._split, self.seq_len, self._end_id = split, seq_len, end_id
        self.shape = token_sequences(seq_len)
        self._respect_documents = intra_document_masking
        self._length = -(-max(0, split.tokens - 1) // seq_len)

    def __len__(self) -> int:
        return self._length

    def read(self, index: int, inputs: Row, targets: Row, document_ids: Row | None) -> None:
        """Fills int64 [T] rows with sample ``index``."""
        start = index * self.seq_len
        count = min(self.seq_len, self._split.tokens - 1 - start)
        parts = self._split.slices(start, count + 1)
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        inputs[:count], targets[:count] = tokens[:-1], tokens[1:]
        if count < self.seq_len:
            inputs[count:], targets[count:] = self._end_id, IGNORED
        if self._split.masked:
            targets[:count][~self._split.may_be_target(start + 1, count)] = IGNORED
        if self._respect_documents:
            # In 1 .. count: where the next document starts
            ends = self._split.document_ends(start, count) - start
            targets[ends - 1] = IGNORED
            if document_ids is not None:
                starts = np.zeros(self.seq_len, np.int64)
                starts[ends[ends < self.seq_len]] = 1
                np.cumsum(starts, out=document_ids)


class PaddedSamples:
    """Sample i is document i, cut to T + 1 tokens. The rest of the row is padded with the end id,
    without targets."""

    def __init__(self, split: TokenSplit, seq_len: int, end_id: int) -> None:
        self._split, self.seq_len, self._end_id = split, seq_len, end_id
        self.shape = token_sequences(seq_len)

    def __len__(self) -> int:
        return self._split.documents

    def read(self, index: int, inputs: Row, targets: Row, document_ids: Row | None) -> None:
        """Fills int64 [T] rows with sample ``index``."""
        begin, end = self._split.document_span(index)
        count = min(self.seq_len, end - begin - 1)
        tokens = np.concatenate(self._split.slices(begin, count + 1))
        inputs[:count], targets[:count] = tokens[:-1], tokens[1:]
        inputs[count:], targets[count:] = self._end_id, IGNORED
        if self._split.masked:
            targets[:count][~self._split.may_be_target(begin + 1, count)] = IGNORED
        if document_ids is not None:
            document_ids[:count], document_ids[count:] = 0, 1

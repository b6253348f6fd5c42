"""What a forward pass reads: token ids, targets, and a hash that identifies them.

Arrays of a sample stream flow in, tensors flow out. The hash of a batch is the sum of its samples' hashes, so
the sum over data ranks names a global batch whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from parallel2d.data.order import mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio, odd: spreads consecutive numbers
IGNORED = -100  # the target that torch's cross-entropy leaves out


@dataclass(frozen=True)
class Batch:
    """Sequences of one forward pass, n sequences of T tokens.

    ``hash`` is below 2**53 for up to two million sequences, so sums over ranks survive an fp64 all-reduce
    exactly.
    """

    inputs: torch.Tensor  # int64 [n, T]
    targets: torch.Tensor  # int64 [n, T]; -100 is not a target
    document_ids: torch.Tensor | None  # int64 [n, T], counted from 0 in each sequence; None: attention crosses documents
    hash: int  # sum of the 32-bit hashes of the sequences that have a position
    valid_tokens: int  # targets that are not -100

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on a device; ``non_blocking`` overlaps the copy if the memory is pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which copies to a GPU run in the background."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        ids = None if self.document_ids is None else change(self.document_ids)
        return replace(self, inputs=change(self.inputs), targets=change(self.targets), document_ids=ids)


class SampleHash:
    """A 32-bit hash of each sequence of T tokens, its targets and its position: universal hashing by a random
    vector modulo 2**64 (Dietzfelbinger 1996), then mixed with the position.
    """

    def __init__(self, seq_len: int) -> None:
        words = mix(np.arange(1, 2 * seq_len + 1, dtype=np.uint64) * _GOLDEN)
        self._input_factors, self._target_factors = words[:seq_len], words[seq_len:]

    def __call__(self, inputs: NDArray[np.int64], targets: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """uint64 [n], each below 2**32, of int64 [n, T] inputs and targets and int64 [n] positions."""
        words = inputs.view(np.uint64) @ self._input_factors + targets.view(np.uint64) @ self._target_factors
        return mix(words + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN) >> np.uint64(32)

"""`Batch`, the input of a forward pass: the model's inputs, the targets, and a hash of its samples.

The hash of a batch is the sum of the hashes of its samples. Therefore the sum over the data ranks
identifies a global batch, and does not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from parallel2d.parallel.parallelize.layout import SampleShape, TensorShape
from parallel2d.training.data.sample_order import mix

# 2**64 divided by the golden ratio, odd: spreads consecutive numbers over all 64-bit words
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
IGNORED = -100  # the target that torch's cross-entropy ignores


def token_sequences(seq_len: int) -> SampleShape:
    """Return the shape of sequences of ``seq_len`` token ids with a target for each position."""
    return SampleShape("tokens", TensorShape((seq_len,)), TensorShape((seq_len,)))


@dataclass(frozen=True)
class Batch:
    """The samples of one forward pass: n sequences of T tokens, or samples of a custom data set."""

    inputs: Any  # int64 [n, T]; for custom data, a tensor, a tuple, or a dict by parameter name
    targets: torch.Tensor | None  # int64 [n, T], or custom; -100 is ignored
    # int64 [n, T], the number of the document in its sequence, from 0; None: no document masking
    document_ids: torch.Tensor | None
    # Sum of the 32-bit hashes of all samples, except samples without a position. An fp64 all-reduce
    # is exact for sums below 2**53, that is up to two million samples.
    hash: int
    # Number of targets that are not ignored; the weight of the batch in a mean loss
    valid_tokens: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device; copies from pinned memory may be ``non_blocking``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory, so that copies to a GPU run in the background."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors = (self.inputs, self.targets, self.document_ids)
        inputs, targets, ids = tree_map_only(torch.Tensor, change, tensors)
        return replace(self, inputs=inputs, targets=targets, document_ids=ids)


class SampleHash:
    """A 32-bit hash of the tokens, targets and position of each sequence. Tokens and targets are
    hashed by a scalar product with a random vector modulo 2**64 (universal hashing, Dietzfelbinger
    1996), and the result is mixed with the position."""

    def __init__(self, shape: SampleShape) -> None:
        inputs, targets = math.prod(shape.inputs.shape), shape.targets_per_sample
        words = mix(np.arange(1, inputs + targets + 1, dtype=np.uint64) * _GOLDEN)
        self._input_factors, self._target_factors = words[:inputs], words[inputs:]

    def __call__(
        self, inputs: NDArray[np.int64], targets: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Return the hashes of n samples at int64 [n] positions: uint64 [n], each below 2**32."""
        words = _products(inputs, self._input_factors) + _products(targets, self._target_factors)
        return mixed_with(words, positions)


def _products(values: NDArray[np.int64], factors: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the scalar product of each row with the factors, uint64 [n], modulo 2**64."""
    return values.reshape(len(values), len(factors)).view(np.uint64) @ factors


def mixed_with(words: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Combine the hashes of samples' contents with their positions. Returns uint64 [n], each below
    2**32."""
    return mix(words + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN) >> np.uint64(32)

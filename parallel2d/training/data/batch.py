"""`Batch`, the input of a forward pass: token ids or images, targets, and a hash of its samples.

The hash of a batch is the sum of its samples' hashes. The sum over data ranks therefore identifies
a global batch, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from parallel2d.training.data.order import mix

# 2**64 divided by the golden ratio, odd: spreads consecutive numbers
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
IGNORED = -100  # the target that torch's cross-entropy ignores


@dataclass(frozen=True)
class SampleShape:
    """What one sample is made of. Targets are always int64."""

    noun: str  # tokens or images: what is counted
    inputs: tuple[int, ...]  # of one sample: (T,) or (C, H, W)
    targets: tuple[int, ...]  # of one sample: (T,) or ()
    dtype: torch.dtype  # of the inputs

    @property
    def targets_per_sample(self) -> int:
        """T, or 1 for an image."""
        return math.prod(self.targets)

    def example(
        self, samples: int, device: torch.device | str, floating: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros as inputs and targets. ``floating``: dtype of inputs that are not whole numbers."""
        dtype = floating if self.dtype.is_floating_point else self.dtype
        targets = torch.zeros(samples, *self.targets, dtype=torch.int64, device=device)
        return torch.zeros(samples, *self.inputs, dtype=dtype, device=device), targets

    def describe(self, samples: int) -> str:
        """The size of a batch of ``samples``, as text for messages."""
        each = f"x {self.targets_per_sample} " if self.targets else ""
        return f"{samples} {each}{self.noun}"


def token_sequences(seq_len: int) -> SampleShape:
    """Sequences of ``seq_len`` token ids, each position with a target."""
    return SampleShape("tokens", (seq_len,), (seq_len,), torch.int64)


def labelled_images(channels: int, size: int) -> SampleShape:
    """Square images of ``size`` pixels a side, each with one class as its target."""
    return SampleShape("images", (channels, size, size), (), torch.float32)


@dataclass(frozen=True)
class Batch:
    """Samples of one forward pass: n sequences of T tokens, or n images.

    ``hash`` is below 2**53 for up to two million samples, so an fp64 all-reduce sums it exactly.
    """

    inputs: torch.Tensor  # int64 [n, T], or float32 [n, C, H, W]
    targets: torch.Tensor  # int64 [n, T], or [n]; -100 is not a target
    # int64 [n, T], counted from 0 in each sequence; None: attention crosses documents
    document_ids: torch.Tensor | None
    hash: int  # sum of the 32-bit hashes of the samples that have a position
    valid_tokens: int  # targets that are not -100

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on a device; ``non_blocking`` copies from pinned memory are asynchronous."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from which copies to a GPU run in the background."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        ids = None if self.document_ids is None else change(self.document_ids)
        return replace(
            self, inputs=change(self.inputs), targets=change(self.targets), document_ids=ids
        )


class SampleHash:
    """A 32-bit hash of each sample's inputs, its targets and its position: universal hashing by a
    random vector modulo 2**64 (Dietzfelbinger 1996), then mixed with the position.

    Each value is hashed as one word: an int64 as it is, a float32 as its 32 bits. So every change
    of a value changes its product, also with an even factor.
    """

    def __init__(self, shape: SampleShape) -> None:
        inputs, targets = math.prod(shape.inputs), shape.targets_per_sample
        words = mix(np.arange(1, inputs + targets + 1, dtype=np.uint64) * _GOLDEN)
        self._input_factors, self._target_factors = words[:inputs], words[inputs:]

    def __call__(
        self, inputs: NDArray[Any], targets: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """uint64 [n], each below 2**32, of n samples at int64 [n] positions."""
        words = _products(inputs, self._input_factors) + _products(targets, self._target_factors)
        return mix(words + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN) >> np.uint64(32)


def _products(values: NDArray[Any], factors: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64 [n], modulo 2**64."""
    rows = values.reshape(len(values), len(factors))
    if rows.dtype == np.int64:
        return rows.view(np.uint64) @ factors
    assert rows.dtype == np.float32, rows.dtype
    # Widened one sample at a time, which takes twice the memory of a sample, not of the batch
    bits = rows.view(np.uint32)
    return np.array([row.astype(np.uint64) @ factors for row in bits], dtype=np.uint64)

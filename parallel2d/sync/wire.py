"""How values are written for other replicas.

A `Wire` turns values into rows and rows into what is sent. Each row is decoded without the others,
so that rows can be dealt out to replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from parallel2d.sync.blocks import BlockCode, BlockNoise, from_blocks, to_blocks
from parallel2d.sync.noise import MEAN_STAGE
from parallel2d.weights.geometry import pieces_of

# The dtypes that stand for the words of ``sync.wire`` where gradients are sent
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class Wire(Protocol):
    """How values are written for other replicas."""

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """[rows, values] of all ``tensors``, in their dtype."""

    def encode(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """[rows, units] to send. ``first``: the number of the first of these rows; ``stage``: tells
        several roundings of one value apart. Rows after the last are padding."""

    def decode(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """What `encode` was given, rounded, in ``dtype``."""

    def put_back(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies ``rows`` into ``tensors``, which are like those that `rows` was given."""


class CastWire:
    """Values in another dtype, one a row."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """[values, 1]."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])[:, None]

    def encode(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """The rows in this wire's dtype."""
        return rows.to(self._dtype)

    def decode(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows in ``dtype``."""
        return sent.to(dtype)

    def put_back(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies the values in their order."""
        values = pieces_of(rows[:, 0], [tensor.shape for tensor in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


class BlockWire:
    """Blocks of 256 values with one scale each; see [Note: block codes].

    ``noise``: for the stochastic rounding of the tensors that are sent; ``nearest``: contributions
    are rounded to the nearest code instead.
    """

    def __init__(self, bits: int, noise: BlockNoise, nearest: bool = False) -> None:
        self._code = BlockCode(bits)
        self._noise = noise
        self._nearest = nearest

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """[blocks, 256]."""
        return to_blocks(tensors)

    def encode(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """uint8 [blocks, bytes of a block]."""
        if self._nearest and stage != MEAN_STAGE:
            # Added before rounding down
            noise = torch.full_like(rows, 0.5, dtype=torch.float32)
        else:
            noise = self._noise.numbers(first, first + len(rows), stage)
        return self._code.encode(rows, noise)

    def decode(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """The blocks in ``dtype``."""
        return self._code.decode(sent, dtype)

    def put_back(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies the blocks' values."""
        from_blocks(rows, tensors)

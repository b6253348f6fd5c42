"""The forms in which replicas send values: the table `FORMATS`, one row for each.

A new one is a word of ``sync.wire`` with the methods that take it (`base/config/parallel.py`), a
row here, and code next to `quantize.py` if it is neither a dtype nor blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel2d.parallel.sync.formats.quantize import (
    BlockFormat,
    BlockNoise,
    BlockQuantizer,
    Piece,
    blocks_of,
    mean_of,
)
from parallel2d.parallel.weights.geometry import pieces_of

# What a replica did not send is added to its next message, times this (error feedback; SparseLoCo)
ERROR_FEEDBACK_DECAY = 0.95


@dataclass(frozen=True)
class CastQuantizer:
    """Codes values by casting them to ``dtype``: one value a row."""

    dtype: torch.dtype

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """[values, 1], a view of one tensor alone."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        return (torch.cat(flat) if len(flat) > 1 else flat[0])[:, None]

    def quantize(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """The rows in this quantizer's dtype."""
        return rows.to(self.dtype)

    def dequantize(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows in ``dtype``."""
        return sent.to(dtype)

    def mean(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean, in ``dtype``, of ``sent`` [replicas, rows, length], the contributions to the
        same rows. They may be overwritten."""
        if sent.device.type != "cpu":
            return sent.sum(0, dtype=dtype).div_(len(sent))
        # One after the other: a sum of torch has another order for some sizes.
        return mean_of([self.dequantize(each, dtype) for each in sent])

    def values(self, rows: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
        """Views of the values, by tensor."""
        return pieces_of(rows[:, 0], shapes)


# What turns values into rows and rows into what is sent. Each row is decoded without the others, so
# that rows can be dealt out to replicas. In `quantize`, ``first`` is the number of the first row,
# ``stage`` tells several roundings of one value apart; rows after the last are padding.
Quantizer = CastQuantizer | BlockQuantizer


def put_back(quantizer: Quantizer, rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Writes decoded ``rows`` into the ``tensors`` of which they are."""
    values = quantizer.values(rows, [tensor.shape for tensor in tensors])
    torch._foreach_copy_(list(tensors), list(values))


@dataclass(frozen=True)
class CommunicationFormat:
    """One communication format."""

    name: str
    bits: int  # of a value; blocks add their scales
    dtype: torch.dtype | None = None  # of a value as it is sent; None: blocks of codes, as bytes
    # The bound of a parity check relative to the mean norm of the contributions: another rounding
    # of a sum may change a whole unit of the code. The first where ranks run one process's kernels.
    bound: tuple[float, float] = (0.0, 0.0)
    has_error_feedback: bool = (
        False  # error feedback: the rounding error is sent with the next message
    )
    finer: str = ""  # the row for gradients of all but hidden matrices; empty: this one

    @property
    def rounds(self) -> bool:
        """Whether values are rounded, and so exchanged and added in fp32, not all-reduced."""
        return self.bits < 32

    @property
    def item_bytes(self) -> int:
        """Bytes of the dtype that is sent, one of codes."""
        return max(1, self.bits // 8)

    def bytes_of(self, shapes: Iterable[torch.Size]) -> int:
        """Bytes of tensors of these shapes; each begins a block of its own."""
        if self.dtype is not None:
            return self.dtype.itemsize * sum(shape.numel() for shape in shapes)
        row = BlockFormat(self.bits).row_bytes
        return row * sum(blocks_of(shape.numel()) for shape in shapes)

    def of_gradient(self, *, hidden: bool) -> CommunicationFormat:
        """In which a gradient is sent every step. ``hidden``: it is that of a hidden matrix."""
        return self if hidden or not self.finer else FORMATS[self.finer]

    def quantizer(self, tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Quantizer:
        """What codes ``tensors``. ``pieces``: for the random numbers of each; a cast needs none."""
        if self.dtype is not None:
            return CastQuantizer(self.dtype)
        numels = [tensor.numel() for tensor in tensors]
        # What is sent later may be rounded to the nearest, which takes half as much as at random.
        noise = None if self.has_error_feedback else BlockNoise(pieces, numels, tensors[0].device)
        return BlockQuantizer(BlockFormat(self.bits), noise, pieces, numels)


FORMATS = {
    row.name: row
    for row in (
        CommunicationFormat("fp64", 64, torch.float64),
        CommunicationFormat("fp32", 32, torch.float32),
        CommunicationFormat("bf16", 16, torch.bfloat16, bound=(2e-4, 1e-3)),
        CommunicationFormat("fp16", 16, torch.float16),
        CommunicationFormat("int8", 8, bound=(8e-4, 4e-3)),
        CommunicationFormat("int4", 4, bound=(5e-3, 3e-2), has_error_feedback=True, finer="int8"),
    )
}


def format_of(dtype: torch.dtype) -> CommunicationFormat:
    """The format that casts to ``dtype``."""
    return next(row for row in FORMATS.values() if row.dtype == dtype)

"""Communication formats of replicas: the table `FORMATS`, one row per format.

A new format needs a value of ``sync.wire`` with the methods that support it
(`base/config/parallel.py`), a row here, and code next to `quantize.py` if it is neither a dtype nor
blocks.
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

# Weight of the rounding error of one message in the next message (error feedback; SparseLoCo)
ERROR_FEEDBACK_DECAY = 0.95


@dataclass(frozen=True)
class CastQuantizer:
    """Quantizer that casts values to ``dtype``; a block is one value."""

    dtype: torch.dtype

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the values as [values, 1]; a view if there is one tensor."""
        flat = []
        for tensor in tensors:
            flat.append(tensor.reshape(-1))
        return (torch.cat(flat) if len(flat) > 1 else flat[0])[:, None]

    def quantize(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """Return the blocks in the quantizer's dtype."""
        return rows.to(self.dtype)

    def dequantize(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the blocks in ``dtype``."""
        return sent.to(dtype)

    def mean(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mean in ``dtype`` of ``sent`` [replicas, blocks, length].

        ``sent`` may be overwritten.
        """
        if sent.device.type != "cpu":
            return sent.sum(0, dtype=dtype).div_(len(sent))
        # Add in sequence, because torch's sum uses another order for some sizes.
        return mean_of([self.dequantize(each, dtype) for each in sent])

    def values(self, rows: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
        """Yield views of the values, by tensor."""
        return pieces_of(rows[:, 0], shapes)


# A quantizer turns values into blocks and blocks into messages. Each block is dequantized
# independently, so blocks can be distributed over replicas. Arguments of `quantize`: ``first`` is
# the number of the first block, ``stage`` distinguishes several roundings of one value, and blocks
# after the last are padding.
Quantizer = CastQuantizer | BlockQuantizer


def put_back(quantizer: Quantizer, rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the dequantized blocks ``rows`` into their ``tensors``."""
    values = quantizer.values(rows, [tensor.shape for tensor in tensors])
    torch._foreach_copy_(list(tensors), list(values))


@dataclass(frozen=True)
class CommunicationFormat:
    """One communication format."""

    name: str
    bits: int  # per value, without the scales of blocks
    dtype: torch.dtype | None = None  # communication dtype; None: blocks of codes, as bytes
    # Bound of a parity check relative to the mean norm of the contributions: another rounding of a
    # sum may change a code by one. The first number is for ranks with the kernels of the reference
    # run.
    bound: tuple[float, float] = (0.0, 0.0)
    has_error_feedback: bool = False  # True with error feedback
    finer: str = ""  # format of gradients other than hidden matrices; empty: this format

    @property
    def rounds(self) -> bool:
        """True for rounded values, which are exchanged and summed in fp32, not all-reduced."""
        return self.bits < 32

    @property
    def item_bytes(self) -> int:
        """Bytes of an element in communication; one for codes."""
        return max(1, self.bits // 8)

    def bytes_of(self, shapes: Iterable[torch.Size]) -> int:
        """Return bytes of tensors of these shapes; each tensor starts a new block."""
        if self.dtype is not None:
            return self.dtype.itemsize * sum(map(torch.Size.numel, shapes))
        row = BlockFormat(self.bits).row_bytes
        return row * sum(blocks_of(shape.numel()) for shape in shapes)

    def of_gradient(self, *, hidden: bool) -> CommunicationFormat:
        """Return the format of a gradient. ``hidden``: True for a hidden matrix."""
        return self if hidden or not self.finer else FORMATS[self.finer]

    def quantizer(self, tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Quantizer:
        """Return the quantizer of ``tensors``.

        ``pieces``: sources of the random numbers of each tensor; a cast needs none.
        """
        if self.dtype is not None:
            return CastQuantizer(self.dtype)
        numels = list(map(Tensor.numel, tensors))
        # Error feedback sends the rounding error later, so rounding to the nearest is unbiased over
        # steps, and its error is half the error of stochastic rounding.
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
    """Return the format that casts to ``dtype``."""
    return next(row for row in FORMATS.values() if row.dtype == dtype)

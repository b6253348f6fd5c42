"""The communication formats of replicas: `FORMATS`.

To add a format, add its name and the methods that support it to ``sync.wire`` in
`base/config/parallel.py`, and an entry to `FORMATS`. A format that is neither a cast to a dtype nor
block quantization also needs a quantizer.
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

# Error feedback: factor of the rounding error of a message in the next message (from SparseLoCo)
ERROR_FEEDBACK_DECAY = 0.95


@dataclass(frozen=True)
class CastQuantizer:
    """Quantizer that casts values to ``dtype``. Each value is a separate block."""

    dtype: torch.dtype

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the values as [values, 1]; a view if there is one tensor."""
        flat = []
        for tensor in tensors:
            flat.append(tensor.reshape(-1))
        return (torch.cat(flat) if len(flat) > 1 else flat[0])[:, None]

    def quantize(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """Return ``rows`` in the dtype of the quantizer. ``first`` and ``stage`` have no effect."""
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
        """Yield one view of ``rows`` per tensor, with the shapes ``shapes``."""
        return pieces_of(rows[:, 0], shapes)


# A quantizer turns the values of tensors into blocks (`rows`), and blocks into messages
# (`quantize`). A block can be dequantized without the other blocks, so blocks can be distributed
# over replicas. In `quantize`, ``first`` is the number of the first block of ``rows``, and
# ``stage`` makes the random numbers differ if the same value is rounded several times. Blocks after
# the last block of the tensors are padding.
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
    dtype: torch.dtype | None = None  # communication dtype; None: block quantization, as bytes
    # Allowed difference in a parity check, relative to the mean norm of the contributions: if a sum
    # is rounded differently, a code may change by one. The first number holds if all ranks run the
    # same kernels as the reference run, the second number otherwise.
    bound: tuple[float, float] = (0.0, 0.0)
    has_error_feedback: bool = False  # True if rounding errors are added to the next message
    finer: str = ""  # format of gradients other than hidden matrices; empty: this format

    @property
    def rounds(self) -> bool:
        """True if values are rounded. Rounded values are averaged by `QuantizedMean`, not
        all-reduced."""
        return self.bits < 32

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of a message: of the dtype, or 1 for block quantization."""
        return max(1, self.bits // 8)

    def bytes_of(self, shapes: Iterable[torch.Size]) -> int:
        """Return the bytes of a message with tensors of these shapes. Each tensor starts a
        block."""
        if self.dtype is not None:
            return self.dtype.itemsize * sum(map(torch.Size.numel, shapes))
        row = BlockFormat(self.bits).row_bytes
        return row * sum(blocks_of(shape.numel()) for shape in shapes)

    def of_gradient(self, *, hidden: bool) -> CommunicationFormat:
        """Return the format of a gradient. ``hidden``: True for a hidden matrix."""
        return self if hidden or not self.finer else FORMATS[self.finer]

    def quantizer(self, tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Quantizer:
        """Return the quantizer of ``tensors``.

        ``pieces`` are the sources of the random numbers of each tensor; a cast does not use them.
        """
        if self.dtype is not None:
            return CastQuantizer(self.dtype)
        numels = list(map(Tensor.numel, tensors))
        # Error feedback adds the rounding error to the next message. Rounding to the nearest code
        # is then unbiased over several steps, and has half the error of stochastic rounding.
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

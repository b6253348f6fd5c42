"""Quantization of gradients in blocks of 256 values: one scale per block, 8 or 4 bits per value.

[Note: block codes] The scale of a block is its largest finite magnitude divided by the largest
code. A value is rounded to one of the two codes around it, at random, so that the mean of the
result is the value (stochastic rounding). The error of a value is below the scale of its block. The
codes above the largest code represent infinities and NaN, so that a step with non-finite gradients
is detected and skipped.

A message holds one row of bytes per block: the scale in fp32, then the codes. The random numbers
depend only on a key and a position. The numbers are equal on CPU and GPU and for every split of a
tensor. A generator would have a state, and could not guarantee this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy
import torch
from torch import Tensor

from parallel2d.base.device import sent_to
from parallel2d.parallel.sync.formats import fused_quantize

BLOCK = 256  # values; `HALF` of the fused kernels is half a block
_SCALE_BYTES = 4  # of one fp32


@dataclass(frozen=True)
class BlockFormat:
    """The format of a block."""

    bits: int  # per value, 8 or 4

    @property
    def largest(self) -> int:
        """The largest finite code: 126 or 6. The next code, of either sign, is infinity."""
        return 2 ** (self.bits - 1) - 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one block."""
        return _SCALE_BYTES + BLOCK * self.bits // 8

    def quantize(self, blocks: Tensor, noise: Tensor | float) -> Tensor:
        """Return uint8 [blocks, row_bytes] for ``blocks`` [blocks, 256] of any floating dtype.

        ``noise``: fp32 of the same shape, in [0, 1), or 0.5 for the nearest code.
        """
        magnitudes = blocks.abs()
        largest = magnitudes.amax(1, keepdim=True)
        finite = None
        # The check is cheap on a CPU. On a GPU the host would wait, so masks are always used.
        if blocks.device.type != "cpu" or not largest.isfinite().all():
            finite = blocks.isfinite()
            largest = torch.where(finite, magnitudes, 0).amax(1, keepdim=True)
        scale = largest.div_(self.largest).to(torch.float32)
        # A block of zeros has the scale 0, which cannot be a divisor.
        divisor = torch.where(scale == 0, 1, scale)
        codes = blocks.div(divisor).add_(noise).floor_()
        codes.clamp_(-self.largest, self.largest)
        if finite is not None:
            # Infinities were clamped above; NaN values were not.
            infinite = blocks.sign().mul_(self.largest + 1)
            not_finite = torch.where(blocks.isnan(), -self.largest - 2, infinite)
            codes = torch.where(finite, codes, not_finite)
        packed = codes.to(torch.int8).view(torch.uint8)
        if self.bits == 4:
            # Two codes share a byte: the first half of a block uses the low bits.
            low, high = (packed & 0xF).chunk(2, dim=1)
            packed = low | (high << 4)
        return torch.cat([scale.view(torch.uint8), packed], dim=1)

    def dequantize(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [blocks, 256] in ``dtype`` for the result of `quantize`."""
        scale = rows[:, :_SCALE_BYTES].contiguous().view(torch.float32).to(dtype)
        packed = rows[:, _SCALE_BYTES:].contiguous()
        codes = packed.view(torch.int8)
        if self.bits == 4:
            # A right shift of signed numbers repeats the sign bit.
            codes = torch.cat([packed << 4, packed], dim=1).view(torch.int8) >> 4
        values = codes.to(dtype).mul_(scale)
        if rows.device.type == "cpu":
            least, most = codes.aminmax() if codes.numel() else (0, 0)
            if -self.largest <= least and most <= self.largest:
                return values
        values.masked_fill_(codes == -self.largest - 2, torch.nan)
        values.masked_fill_(codes == self.largest + 1, torch.inf)
        return values.masked_fill_(codes == -self.largest - 1, -torch.inf)


@dataclass(frozen=True)
class Piece:
    """Source of the random numbers of one tensor."""

    key: int  # key of its parameter
    # Position of its first value in the unsharded parameter, so that ranks of a shard group use
    # different numbers.
    start: int


class BlockQuantizer:
    """Quantizer with one scale per block of 256 values; see [Note: block codes].

    Args:
        block_format: the format of a block.
        noise: random numbers for stochastic rounding; None: round to the nearest code.
        pieces: sources of the random numbers of each tensor.
        numels: number of values of each tensor.
    """

    def __init__(
        self,
        block_format: BlockFormat,
        noise: BlockNoise | None,
        pieces: Sequence[Piece],
        numels: Sequence[int],
    ) -> None:
        self._format = block_format
        self._pieces = pieces
        self._noise = noise
        self._counts = list(map(blocks_of, numels))
        self.rows = to_blocks

    def quantize(self, rows: Tensor, first: int, stage: int) -> Tensor:
        """Return uint8 [blocks, bytes of a block]."""
        if fused_quantize.is_fused(rows, rows.dtype):
            places = None if self._noise is None else self._noise.places
            return fused_quantize.quantize(rows, places, first, stage, self._format.bits)
        if self._noise is None:
            # Adding 0.5 before rounding down rounds to the nearest code.
            return self._format.quantize(rows, 0.5)
        return self._format.quantize(rows, self._noise.numbers(first, first + len(rows), stage))

    def dequantize(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [blocks, 256] in ``dtype``."""
        return self.mean(sent[None], dtype)

    def mean(self, sent: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mean of contributions; see `CastQuantizer.mean`."""
        if fused_quantize.is_fused(sent, dtype):
            return fused_quantize.dequantize_mean(sent, self._format.bits)
        return mean_of([self._format.dequantize(each, dtype) for each in sent])

    def places(self, replicas: int) -> tuple[Tensor, int]:
        """Return the permutation that distributes the blocks to ``replicas``; see `owners_of`.

        Returns the new position of each block, and the number of positions per replica.
        """
        dealt_to: list[numpy.ndarray] = []
        for count, piece in zip(self._counts, self._pieces, strict=True):
            dealt_to.append(owners_of(count, piece.key, replicas))
        owners = numpy.concatenate(dealt_to)
        dealt = owners.argsort(kind="stable")
        counts = numpy.bincount(owners, minlength=replicas)
        begins = counts.cumsum() - counts
        places = numpy.empty_like(owners)
        places[dealt] = owners[dealt] * counts.max() + numpy.arange(len(owners))
        places -= begins[owners]
        return torch.from_numpy(places), int(counts.max())

    def values(self, rows: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
        """Yield views of the blocks' values, by tensor."""
        counts = list(map(blocks_of, map(torch.Size.numel, shapes)))
        for part, shape in zip(rows.split(counts), shapes, strict=True):
            yield part.view(-1)[: shape.numel()].view(shape)


def mean_of(contributions: Sequence[Tensor]) -> Tensor:
    """Return the mean of all replicas' values, added in order. The first may be overwritten."""
    total, *others = contributions
    for contribution in others:
        total += contribution
    return total.div_(len(contributions)) if others else total


def owners_of(rows: int, key: int, replicas: int) -> numpy.ndarray:
    """Return the owner of each of the ``rows`` blocks of one tensor.

    The ``key`` selects the first owner, so that small tensors do not all belong to one replica.
    """
    return (numpy.arange(rows) * replicas // max(rows, 1) + key) % replicas


def to_blocks(tensors: Sequence[Tensor]) -> Tensor:
    """Return [blocks, 256] of all ``tensors``; each starts a block, and its last is zero-padded."""
    filled: list[Tensor] = []
    zeros = tensors[0].new_zeros(BLOCK - 1)
    for tensor in tensors:
        filled.append(tensor.reshape(-1))
        filled.append(zeros[: -tensor.numel() % BLOCK])
    return torch.cat(filled).view(-1, BLOCK)


class BlockNoise:
    """Random numbers in [0, 1) for the blocks of `to_blocks`, of tensors with ``numels`` values."""

    def __init__(
        self, pieces: Sequence[Piece], numels: Sequence[int], device: torch.device
    ) -> None:
        # numpy arrays on the host, because their values decide sizes.
        counts = numpy.array(list(map(blocks_of, numels)))
        blocks_before = counts.cumsum() - counts
        starts = numpy.array(list(map(attrgetter("start"), pieces))) - blocks_before * BLOCK
        keys = numpy.array(list(map(attrgetter("key"), pieces)), dtype=numpy.int32)
        of_block = starts.repeat(counts) + numpy.arange(counts.sum()) * BLOCK
        # Positions wrap around in int32, like the products in `uniform`.
        pairs = numpy.stack([of_block.astype(numpy.int32), keys.repeat(counts)])
        # int32 [2, blocks]: the position and the key of each block
        self.places = sent_to(device, torch.from_numpy(pairs))

    def numbers(self, begin: int, end: int, stage: int) -> Tensor:
        """Return fp32 [end - begin, 256] for these blocks; zeros for blocks after the last.

        ``stage`` distinguishes several roundings of one value.
        """
        return numbers_of(self.places, begin, end, stage)


def numbers_of(places: Tensor, begin: int, end: int, stage: int) -> Tensor:
    """Return the random numbers of blocks; see `BlockNoise.numbers`."""
    starts, keys = places[:, begin:end, None]
    within = torch.arange(BLOCK, dtype=torch.int32, device=places.device)
    numbers = uniform(keys ^ stage, starts + within)
    missing = end - begin - len(starts)
    return torch.nn.functional.pad(numbers, (0, 0, 0, missing))


def blocks_of(numel: int) -> int:
    """Return the number of blocks for ``numel`` values."""
    return -(-numel // BLOCK)


@dataclass
class RoundingKeys:
    """Keys of a job's random numbers. ``step``: number of the global batch, from 1."""

    seed: int = 0
    step: int = 1

    def of(self, name: str) -> int:
        """Return the key of the parameter ``name`` in this step."""
        return key_of(self.seed, self.step, name)


def key_of(*parts: int | str) -> int:
    """Return a 32-bit number, signed as int32, for ``parts`` such as a seed, step and name."""
    text = "/".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


MEAN_STAGE = key_of("mean")


def contribution_stage(replica: int) -> int:
    """Return the stage of the rounding of ``replica``'s contribution; means: `MEAN_STAGE`."""
    return key_of("contribution", replica)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return fp32 numbers in [0, 1) for pairs of ``keys`` and ``positions``, broadcast int32.

    The hash is the finalizer of MurmurHash3 (Appleby), which mixes all 32 bits.
    """
    # Products of int32 wrap around on every device. The constants of the hash are written as
    # signed numbers; the first is 2**32 over the golden ratio.
    mixed = positions.mul(-1640531527).bitwise_xor(keys)
    mixed ^= _shifted_right(mixed, 16)
    mixed *= -2048144789
    mixed ^= _shifted_right(mixed, 13)
    mixed *= -1028477387
    mixed ^= _shifted_right(mixed, 16)
    # 24 bits, which fp32 represents exactly.
    return (mixed & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """Shift ``values`` right and fill with zeros; torch's shift repeats the sign bit."""
    kept = (1 << (32 - bits)) - 1
    return (values >> bits) & kept


# Operators of `fused` on devices without its kernels


def _quantize(blocks: Tensor, places: Tensor | None, first: int, stage: int, bits: int) -> Tensor:
    noise = 0.5 if places is None else numbers_of(places, first, first + len(blocks), stage)
    return BlockFormat(bits).quantize(blocks, noise)


def _dequantize_mean(sent: Tensor, bits: int) -> Tensor:
    return mean_of([BlockFormat(bits).dequantize(each, torch.float32) for each in sent])


fused_quantize.library.impl("quantize_blocks", _quantize, "CompositeExplicitAutograd")
fused_quantize.library.impl("dequantize_mean", _dequantize_mean, "CompositeExplicitAutograd")

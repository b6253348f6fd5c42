"""Quantization of gradients in blocks of 256 values: one scale per block, 8 or 4 bits per value.

[Note: block codes] A value is sent as an integer code. The receiver multiplies the code by the
scale of the block. The scale is the largest finite magnitude of the block divided by the largest
code. With stochastic rounding, a value is rounded at random to one of the two nearest codes, so
that the expected result is the value. The rounding error is smaller than the scale of the block.
Codes beyond the largest code represent infinities and NaN, so that a step with non-finite gradients
is detected and skipped.

A message has one row of bytes per block: the scale in fp32, then the codes. The random numbers are
a hash of a key and a position. Therefore the random numbers are equal on CPU and GPU and for every
sharding of a tensor. The numbers of a `torch.Generator` would not be equal, because these numbers
depend on the generator's state.
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
    """The format of a quantized block."""

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

        ``noise`` is fp32 of the same shape in [0, 1) for stochastic rounding, or 0.5 to round to
        the nearest code.
        """
        magnitudes = blocks.abs()
        largest = magnitudes.amax(1, keepdim=True)
        finite = None
        # On CPU, skip the masks if all values are finite. On GPU this check would block the host,
        # so the masks are always used.
        if blocks.device.type != "cpu" or not largest.isfinite().all():
            finite = blocks.isfinite()
            largest = torch.where(finite, magnitudes, 0).amax(1, keepdim=True)
        scale = largest.div_(self.largest).to(torch.float32)
        # A block of zeros has the scale 0, which cannot be a divisor.
        divisor = torch.where(scale == 0, 1, scale)
        codes = blocks.div(divisor).add_(noise).floor_()
        codes.clamp_(-self.largest, self.largest)
        if finite is not None:
            # `clamp_` has replaced infinities by the largest code, so set their codes here.
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
    """Determines the random numbers for one tensor: the local shard of a parameter."""

    key: int  # key of the parameter; see `RoundingKeys`
    # Position of the tensor's first value in the unsharded parameter. Ranks of a shard group
    # therefore use different random numbers.
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
        """Return the permutation that sorts the blocks by their owner; see `owners_of`.

        Returns the new position of each block, and the number of positions per replica, which is
        equal for all replicas.
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
        """Yield one view of ``rows`` per tensor, with the shapes ``shapes``."""
        counts = list(map(blocks_of, map(torch.Size.numel, shapes)))
        for part, shape in zip(rows.split(counts), shapes, strict=True):
            yield part.view(-1)[: shape.numel()].view(shape)


def mean_of(contributions: Sequence[Tensor]) -> Tensor:
    """Return the mean of ``contributions``, added in order. The first tensor may be overwritten."""
    total, *others = contributions
    for contribution in others:
        total += contribution
    return total.div_(len(contributions)) if others else total


def owners_of(rows: int, key: int, replicas: int) -> numpy.ndarray:
    """Return the owner of each block of one tensor: the replica that averages the block.

    ``rows`` is the number of blocks. ``key`` selects the first owner, so that small tensors have
    different owners.
    """
    return (numpy.arange(rows) * replicas // max(rows, 1) + key) % replicas


def to_blocks(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of ``tensors`` as [blocks, 256]. Each tensor starts a new block and is
    padded with zeros."""
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
        # Compute on the host with numpy, because sizes depend on the values.
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
        """Return fp32 [end - begin, 256] for the blocks ``begin`` to ``end``; zeros for padding.

        ``stage`` makes the numbers differ if the same value is rounded several times.
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
    """Keys of the random numbers of a job. ``step`` is the number of the global batch, from 1."""

    seed: int = 0
    step: int = 1

    def of(self, name: str) -> int:
        """Return the key of the parameter ``name`` in this step."""
        return key_of(self.seed, self.step, name)


def key_of(*parts: int | str) -> int:
    """Return an int32 hash of ``parts``, such as a seed, a step and a name."""
    text = "/".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


MEAN_STAGE = key_of("mean")


def contribution_stage(replica: int) -> int:
    """Return the stage for the contribution of ``replica``. The stage of means is `MEAN_STAGE`."""
    return key_of("contribution", replica)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return a random fp32 number in [0, 1) for each pair of ``keys`` and ``positions``.

    ``keys`` and ``positions`` are int32 and are broadcast. The numbers are a hash: the finalizer of
    MurmurHash3 (Appleby), which mixes all 32 bits.
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


# Implementation of the operators of `fused_quantize` on devices without kernels


def _quantize(blocks: Tensor, places: Tensor | None, first: int, stage: int, bits: int) -> Tensor:
    noise = 0.5 if places is None else numbers_of(places, first, first + len(blocks), stage)
    return BlockFormat(bits).quantize(blocks, noise)


def _dequantize_mean(sent: Tensor, bits: int) -> Tensor:
    return mean_of([BlockFormat(bits).dequantize(each, torch.float32) for each in sent])


fused_quantize.library.impl("quantize_blocks", _quantize, "CompositeExplicitAutograd")
fused_quantize.library.impl("dequantize_mean", _dequantize_mean, "CompositeExplicitAutograd")

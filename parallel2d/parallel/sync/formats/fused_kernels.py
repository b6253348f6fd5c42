"""Kernels of `fused_quantize.py`. One program processes one block; see [Note: block codes]."""

# Triton kernels have no type annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

HALF = tl.constexpr(128)


@triton.jit
def _noise(column, block, places, first, known, stage, rounds_at_random: tl.constexpr):
    """Return the random numbers of `quantize.uniform`, or 0.5 to round to the nearest code."""
    numbers = tl.full((HALF,), 0.5, tl.float32)
    if rounds_at_random:
        position = first + block
        is_known = position < known
        start = tl.load(places + position, mask=is_known, other=0)
        key = tl.load(places + known + position, mask=is_known, other=0)
        # 32-bit products wrap around.
        mixed = ((start + column) * -1640531527) ^ (key ^ stage)
        mixed = mixed.to(tl.uint32, bitcast=True)
        mixed ^= mixed >> 16
        mixed *= 0x85EBCA6B
        mixed ^= mixed >> 13
        mixed *= 0xC2B2AE35
        mixed ^= mixed >> 16
        numbers = (mixed & 0xFFFFFF).to(tl.float32) * 5.960464477539063e-08
        numbers = tl.where(is_known, numbers, 0.0)
    return numbers


@triton.jit
def _codes(value, finite, divisor, noise, largest):
    code = tl.floor(tl.div_rn(value, divisor) + noise)
    code = tl.minimum(tl.maximum(code, -largest), largest)
    infinite = tl.where(value > 0, largest + 1, -largest - 1)
    special = tl.where(value != value, -largest - 2, infinite)
    return tl.where(finite, code, special).to(tl.int32)


@triton.jit(do_not_specialize=("first", "known", "stage"))
def quantize(
    values, places, sent, scales, first, known, stage,
    rounds_at_random: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """Quantize one block of 256 values to a scale and codes. ``scales`` is ``sent`` as fp32."""
    row_bytes: tl.constexpr = 4 + 32 * bits
    largest: tl.constexpr = 2.0 ** (bits - 1) - 2
    block = tl.program_id(0)
    # int64, for more than 2**31 values
    row = block.to(tl.int64)
    column = tl.arange(0, HALF)
    low = tl.load(values + row * 256 + column)
    high = tl.load(values + row * 256 + HALF + column)
    # NaN also counts as not finite, because a comparison with NaN is false.
    low_finite = tl.abs(low) <= 3.4028234663852886e38
    high_finite = tl.abs(high) <= 3.4028234663852886e38
    most = tl.maximum(
        tl.where(low_finite, tl.abs(low), 0.0), tl.where(high_finite, tl.abs(high), 0.0)
    )
    scale = tl.div_rn(tl.max(most, 0), largest)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    low_noise = _noise(column, block, places, first, known, stage, rounds_at_random)
    high_noise = _noise(column + HALF, block, places, first, known, stage, rounds_at_random)
    low_codes = _codes(low, low_finite, divisor, low_noise, largest)
    high_codes = _codes(high, high_finite, divisor, high_noise, largest)
    tl.store(scales + row * (row_bytes // 4), scale)
    codes = sent + row * row_bytes + 4 + column
    if bits == 8:
        tl.store(codes, (low_codes & 0xFF).to(tl.uint8))
        tl.store(codes + HALF, (high_codes & 0xFF).to(tl.uint8))
    else:
        tl.store(codes, ((low_codes & 0xF) | ((high_codes & 0xF) << 4)).to(tl.uint8))


@triton.jit
def _value(code, scale, largest):
    value = code.to(tl.float32) * scale
    value = tl.where(code == -largest - 2, float("nan"), value)
    value = tl.where(code == largest + 1, float("inf"), value)
    return tl.where(code == -largest - 1, float("-inf"), value)


@triton.jit(do_not_specialize=("replicas", "replica_bytes"))
def dequantize_mean(sent, scales, values, replicas, replica_bytes, bits: tl.constexpr):
    """Average one block over all replicas, in their order. ``scales`` is ``sent`` as fp32."""
    row_bytes: tl.constexpr = 4 + 32 * bits
    largest: tl.constexpr = 2 ** (bits - 1) - 2
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)
    # Start with -0.0: adding it changes no value. 0.0 would change a sum of -0.0.
    low_sum = tl.full((HALF,), -0.0, tl.float32)
    high_sum = tl.full((HALF,), -0.0, tl.float32)
    for replica in range(replicas):
        begin = replica * tl.cast(replica_bytes, tl.int64) + row * row_bytes
        scale = tl.load(scales + begin // 4)
        if bits == 8:
            low = tl.load(sent + begin + 4 + column).to(tl.int8, bitcast=True).to(tl.int32)
            high = tl.load(sent + begin + 4 + HALF + column).to(tl.int8, bitcast=True).to(tl.int32)
        else:
            packed = tl.load(sent + begin + 4 + column).to(tl.int32)
            # A right shift of signed numbers repeats the sign bit.
            low = (packed << 28) >> 28
            high = (packed << 24) >> 28
        low_sum += _value(low, scale, largest)
        high_sum += _value(high, scale, largest)
    tl.store(values + row * 256 + column, tl.div_rn(low_sum, tl.cast(replicas, tl.float32)))
    tl.store(values + row * 256 + HALF + column, tl.div_rn(high_sum, tl.cast(replicas, tl.float32)))

"""Hashes of the bits of tensors, for comparisons between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel2d.parallel.weights.geometry import local_part

# Number of elements that are hashed together, with 8 bytes each. On CPU these fit into the cache.
_PIECE, _PIECE_ON_CPU = 2**22, 2**16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The generator SplitMix64 (Steele, Lea and Flood): its step, and the shifts and factors of its
# finalizer, as signed integers
_STEP = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def hashes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return a signed 64-bit hash of the local shard of each tensor. The hash depends on all
    bits."""
    if not tensors:
        return []
    values = [_hash_of(local_part(tensor.detach())) for tensor in tensors]
    # One copy from the device for all hashes.
    return list(map(int, torch.stack(values).tolist()))


def _hash_of(local: Tensor) -> Tensor:
    """Return the sum, modulo 2**64, of a hash of each element and its position, as int64.

    A sum of element * position would not notice some changes of the highest bits, such as two
    signs.
    """
    # View elements as integers of the same size; a complex128 element becomes two integers.
    integer = _INTEGERS[min(local.element_size(), 8)]
    bits = local.contiguous().view(-1).view(torch.uint8).view(integer)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    length = _PIECE_ON_CPU if local.device.type == "cpu" else _PIECE
    for begin in range(0, len(bits), length):
        piece = bits[begin : begin + length]
        mixed = torch.arange(begin, begin + len(piece), device=local.device)
        mixed.mul_(_STEP).add_(piece)
        for shift, factor in _ROUNDS:
            # torch's right shift fills with the sign bit; the mask replaces these bits by zeros.
            shifted = (mixed >> shift).bitwise_and_(2 ** (64 - shift) - 1)
            mixed.bitwise_xor_(shifted).mul_(factor)
        total += mixed.sum()
    return total

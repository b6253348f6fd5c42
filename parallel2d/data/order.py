"""The order of samples: `Order` computes it as a keyed bijection, so no shuffled index array is
stored.

A position counts the samples that the run has read before. Position p lies in epoch p // size, and
its sample index is a pseudo-random permutation of p % size under a key made of seed, stream name
and epoch. Memory is O(1), any position is computed directly, and nothing depends on ranks. So a run
can resume on any layout.

[Note: cycle walking] A Feistel network permutes 2**bits values. If the size is not a power of two,
the network is applied again while its output is not below the size. The repeated values stay on
one cycle of the permutation and must reach a value below the size, so the restriction is a
bijection too (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). With 2**bits below
twice the size, fewer than two applications are expected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

MAXIMUM_SIZE = 1 << 61  # samples in an epoch; positions are int64
_ROUNDS = 8  # four suffice for ideal round functions (Luby and Rackoff 1988); ours are cheap mixers

Integers = NDArray[np.int64]
_Words = NDArray[np.uint64]
_Permutation = Callable[[_Words, _Words], _Words]


def mix(words: _Words) -> _Words:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that
    spreads every input bit.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Order:
    """The permutations of ``range(size)``, one per epoch, that a seed and a stream name decide.

    Raises ValueError for a size that is not in 1 .. `MAXIMUM_SIZE`.
    """

    def __init__(self, size: int, seed: int, name: str = "train") -> None:
        if not 1 <= size <= MAXIMUM_SIZE:
            raise ValueError(f"an order needs 1 to {MAXIMUM_SIZE} samples, got {size}")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._identity = f"{seed}/{name}"

    def index(self, positions: Integers) -> Integers:
        """The sample index, int64 in [0, size), of each position, int64 [n], not negative."""
        epochs, places = np.divmod(positions, self.size)
        indices = np.empty_like(places)
        for epoch in np.unique(
            epochs
        ):  # two where a batch spans the end of an epoch, otherwise one
            chosen = epochs == epoch
            indices[chosen] = self._walk(places[chosen], int(epoch), self._permute)
        return indices

    def position(self, indices: Integers, epoch: int) -> Integers:
        """The inverse of `index` within one epoch: at which position a sample is read."""
        return epoch * self.size + self._walk(indices, epoch, self._invert)

    def _walk(self, values: Integers, epoch: int, permute: _Permutation) -> Integers:
        """Applies [Note: cycle walking] to each value. Only values still outside are permuted
        again."""
        digest = hashlib.blake2b(
            f"{self._identity}/{epoch}".encode(), digest_size=8 * _ROUNDS
        ).digest()
        keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        words = permute(values.astype(np.uint64), keys)
        outside = np.flatnonzero(words >= self.size)
        while len(outside):
            walked = permute(words[outside], keys)
            words[outside] = walked
            outside = outside[walked >= self.size]
        return words.astype(np.int64)

    def _permute(self, words: _Words, keys: _Words) -> _Words:
        low, high = words & self._low_mask, words >> self._low_bits
        # Each half is changed by a function of the other, so `_invert` undoes it in reverse order
        for turn in range(0, _ROUNDS, 2):
            high = high ^ (_round(low, keys[turn]) & self._high_mask)
            low = low ^ (_round(high, keys[turn + 1]) & self._low_mask)
        return (high << self._low_bits) | low

    def _invert(self, words: _Words, keys: _Words) -> _Words:
        low, high = words & self._low_mask, words >> self._low_bits
        for turn in reversed(range(0, _ROUNDS, 2)):
            low = low ^ (_round(high, keys[turn + 1]) & self._low_mask)
            high = high ^ (_round(low, keys[turn]) & self._high_mask)
        return (high << self._low_bits) | low


def _round(half: _Words, key: np.uint64) -> _Words:
    """The round function: the middle of a keyed square (von Neumann; as a generator: Widynski,
    "Squares", 2020).
    """
    keyed = half + key
    return (keyed * keyed) >> np.uint64(32)

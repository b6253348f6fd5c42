"""The order of samples: `Schedule` selects the component of a mixture for each position, and
`Order` selects the sample in this component.

A position of a `Schedule` is the number of samples that the run has read. A position of an `Order`
is the number of samples that were read from its component. In an `Order`, position p lies in epoch
p // size, and its sample index is a pseudo-random permutation of p % size under a key made of seed,
stream name and epoch. Nothing is stored, any position is computed directly, and the result does not
depend on ranks. Therefore a run can resume on any layout.

[Note: cycle walking] A Feistel network permutes 2**bits values. If the size is not a power of two,
the network is applied again until its output is below the size. The repeated values stay on one
cycle of the permutation and must reach a value below the size, so the restriction is a bijection
too (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Because 2**bits is below
twice the size, fewer than two applications are expected.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from parallel2d.base.errors import ConfigError

MAXIMUM_PERIOD = 1 << 16  # the table of a schedule has one entry per position of a period
MAXIMUM_SIZE = 1 << 61  # samples in an epoch; positions are int64
_ROUNDS = 8  # four suffice for ideal round functions (Luby and Rackoff 1988); ours are cheap mixers

Integers = NDArray[np.int64]
_Words = NDArray[np.uint64]


def mix(words: _Words) -> _Words:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words that
    spreads every input bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Order:
    """The permutations of ``range(size)``, one per epoch, determined by a seed and the name of a
    stream.

    Raises ValueError for a size that is outside 1 .. `MAXIMUM_SIZE`.
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
        """Return the sample index, int64 in [0, size), of each position, int64 [n], >= 0."""
        epochs, places = np.divmod(positions, self.size)
        indices = np.empty_like(places)
        # A batch that spans the end of an epoch has positions of two epochs.
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._walk(places[chosen], int(epoch))
        return indices

    def _walk(self, values: Integers, epoch: int) -> Integers:
        """Apply [Note: cycle walking] to each value. Only values that are still outside are
        permuted again."""
        name = f"{self._identity}/{epoch}".encode()
        digest = hashlib.blake2b(name, digest_size=8 * _ROUNDS).digest()
        keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        words = self._permute(values.astype(np.uint64), keys)
        outside = np.flatnonzero(words >= self.size)
        while len(outside):
            walked = self._permute(words[outside], keys)
            words[outside] = walked
            outside = outside[walked >= self.size]
        return words.astype(np.int64)

    def _permute(self, words: _Words, keys: _Words) -> _Words:
        low, high = words & self._low_mask, words >> self._low_bits
        # Each half changes by a function of the other half, so that the steps can be undone in
        # reverse order: the network is a bijection for any round function.
        for turn in range(0, _ROUNDS, 2):
            high = high ^ (_round(low, keys[turn]) & self._high_mask)
            low = low ^ (_round(high, keys[turn + 1]) & self._low_mask)
        return (high << self._low_bits) | low


def _round(half: _Words, key: np.uint64) -> _Words:
    """Return the middle bits of a keyed square (von Neumann; Widynski, "Squares", 2020)."""
    keyed = half + key
    return (keyed * keyed) >> np.uint64(32)


class Schedule:
    """A periodic sequence of components that follows the weights as closely as any sequence can.

    Weights are taken as exact decimals and scaled to the smallest whole numbers in the same
    proportion; their sum is the period. Each period contains component c exactly weight[c] times.
    After n positions the count of a component differs from n · share[c] by less than 1, so in any
    window by less than 2. The rule is "chairman assignment" (Tijdeman 1980): at each position,
    among the components with a count that may grow, the component with the nearest deadline is
    taken.

    Raises `ConfigError` for weights that are not positive numbers, and for a period above
    `MAXIMUM_PERIOD`.
    """

    def __init__(self, weights: list[float]) -> None:
        self.weights = _integer_weights(weights)
        self.period = sum(self.weights)
        self._table = np.zeros(self.period, dtype=np.int64)
        # Position -> number of earlier occurrences of its component in this period
        self._rank = np.zeros(self.period, dtype=np.int64)
        counts = [0] * len(weights)
        for position in range(self.period):
            ready = []
            for n, weight in enumerate(self.weights):
                if weight * (position + 1) > counts[n] * self.period:
                    ready.append(n)
            # The nearest deadline wins; among equal deadlines the first component.
            chosen = min(ready, key=lambda each: Fraction(counts[each] + 1, self.weights[each]))
            self._table[position], self._rank[position] = chosen, counts[chosen]
            counts[chosen] += 1
        assert counts == self.weights
        self._quota = np.array(self.weights, dtype=np.int64)

    def locate(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return (component, position within that component), int64, for each position."""
        period, place = positions // self.period, positions % self.period
        chosen = self._table[place]
        return chosen, period * self._quota[chosen] + self._rank[place]

    def positions_before_repeat(self, lengths: list[int]) -> int:
        """Return the number of positions before any component starts its next epoch."""
        ends = []
        for number, length in enumerate(lengths):
            period, rank = divmod(length, self.weights[number])
            places = np.flatnonzero(self._table == number)
            ends.append(period * self.period + int(places[rank]))
        return min(ends)


def _integer_weights(weights: list[float]) -> list[int]:
    try:
        fractions = list(map(Fraction, map(str, weights)))
    except ValueError:
        fractions = []
    if not fractions or min(fractions) <= 0:
        raise ConfigError(f"the weights of data.mixture must be numbers above 0, got {weights}")
    scale = lcm(*(fraction.denominator for fraction in fractions))
    numbers = []
    for fraction in fractions:
        numbers.append(int(fraction * scale))
    numbers = [number // gcd(*numbers) for number in numbers]
    if sum(numbers) > MAXIMUM_PERIOD:
        raise ConfigError(
            f"the weights {weights} of data.mixture repeat only after {sum(numbers)} samples, at "
            f"most {MAXIMUM_PERIOD} are allowed; round them to fewer digits"
        )
    return numbers

"""The order of samples. For each position, `Schedule` selects a component of the mixture, and
`Order` selects a sample in this component.

A position of a `Schedule` is the number of samples that the run has read before. A position of an
`Order` is the number of samples that were read before from its component. In an `Order`, position p
belongs to epoch p // size. Its sample index is the image of p % size under a pseudo-random
permutation, whose key depends on the seed, the stream's name and the epoch. The index of any
position is computed directly, without stored state, and does not depend on ranks. Therefore a run
can resume on any layout.

[Note: cycle walking] A Feistel network permutes 2**bits values. If the size is not a power of two,
the network is applied again until its output is below the size. All these outputs are on one cycle
of the permutation, and this cycle must reach a value below the size again. The result is therefore
a permutation of the values below the size (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). Because 2**bits is below twice the size, fewer than two applications are expected.
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
# Four suffice for ideal round functions (Luby and Rackoff 1988), but `_round` is not ideal
_ROUNDS = 8

Integers = NDArray[np.int64]
_Words = NDArray[np.uint64]


def mix(words: _Words) -> _Words:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words in
    which every input bit affects all output bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Order:
    """Permutations of ``range(size)``, one for each epoch. They depend on a seed and on the name of
    a stream.

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
        """Return the sample index of each position: int64 [n] in [0, size). ``positions``: int64
        [n], at least 0."""
        epochs, places = np.divmod(positions, self.size)
        indices = np.empty_like(places)
        # A batch that spans the end of an epoch has positions of two epochs.
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._walk(places[chosen], int(epoch))
        return indices

    def _walk(self, values: Integers, epoch: int) -> Integers:
        """Apply the permutation of [Note: cycle walking] to each value."""
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
        # Each turn changes one half by a function of the other half, and can therefore be undone.
        # Thus the network is a bijection for any round function.
        for turn in range(0, _ROUNDS, 2):
            high = high ^ (_round(low, keys[turn]) & self._high_mask)
            low = low ^ (_round(high, keys[turn + 1]) & self._low_mask)
        return (high << self._low_bits) | low


def _round(half: _Words, key: np.uint64) -> _Words:
    """Return the middle bits of a keyed square (von Neumann; Widynski, "Squares", 2020)."""
    keyed = half + key
    return (keyed * keyed) >> np.uint64(32)


class Schedule:
    """A periodic sequence of components whose frequencies follow the weights.

    The weights are read as exact decimals and scaled to the smallest integers in the same
    proportion. The sum of these integers is the period, and each period contains component c
    exactly weight[c] times. After n positions the count of component c differs from n · weight[c] /
    period by less than 1; in any window of positions, by less than 2. The rule is "chairman
    assignment" (Tijdeman 1980). At each position, a component is eligible if its count would not
    become too large. The deadline of a component is the last position for its next occurrence. The
    eligible component with the earliest deadline is taken.

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
            # Take the earliest deadline, and the first component among equal deadlines.
            chosen = min(ready, key=lambda each: Fraction(counts[each] + 1, self.weights[each]))
            self._table[position], self._rank[position] = chosen, counts[chosen]
            counts[chosen] += 1
        assert counts == self.weights
        self._quota = np.array(self.weights, dtype=np.int64)

    def locate(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return two int64 arrays for the positions: the component, and the position in this
        component."""
        period, place = positions // self.period, positions % self.period
        chosen = self._table[place]
        return chosen, period * self._quota[chosen] + self._rank[place]

    def positions_before_repeat(self, lengths: list[int]) -> int:
        """Return the number of positions before the first component starts its second epoch.
        ``lengths``: samples per component."""
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

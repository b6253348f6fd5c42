"""Which component of a mixture is read at a position: `Schedule`.

It is a function of the position alone, so no state is saved. A single component is a mixture of
weight 1.
"""

from __future__ import annotations

from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from parallel2d.errors import ConfigError

MAXIMUM_PERIOD = 1 << 16  # the schedule's table has one entry per position of a period
Array = NDArray[np.int64]


class Schedule:
    """A periodic sequence of components that follows the weights as closely as any sequence can.

    Weights are taken as exact decimals and brought to the smallest whole numbers in the same
    proportion, whose sum is the period. Each period contains component c exactly weight[c] times.
    After n positions its count differs from n · share[c] by less than 1, so in any window by less
    than 2 ("chairman assignment", Tijdeman 1980: at each position, of the components whose count
    may grow, the one whose deadline is nearest).

    Raises `ConfigError` for weights that are not positive numbers, or whose period is above
    `MAXIMUM_PERIOD`.
    """

    def __init__(self, weights: list[float]) -> None:
        self.weights = _whole_numbers(weights)
        self.components, self.period = len(weights), sum(self.weights)
        self._table = np.zeros(self.period, dtype=np.int64)
        # How often the component occurred before, in this period
        self._rank = np.zeros(self.period, dtype=np.int64)
        counts = [0] * self.components
        for position in range(self.period):
            ready = [
                number
                for number, weight in enumerate(self.weights)
                if weight * (position + 1) > counts[number] * self.period
            ]
            # The next deadline of each; of equal ones the first component's.
            deadlines = [
                (Fraction((counts[number] + 1) * self.period, self.weights[number]), number)
                for number in ready
            ]
            chosen = min(deadlines)[1]
            self._table[position], self._rank[position] = chosen, counts[chosen]
            counts[chosen] += 1
        assert counts == self.weights
        self._quota = np.array(self.weights, dtype=np.int64)

    def locate(self, positions: Array) -> tuple[Array, Array]:
        """(component, position within that component), int64, for each position."""
        period, place = positions // self.period, positions % self.period
        chosen = self._table[place]
        return chosen, period * self._quota[chosen] + self._rank[place]

    def positions_before_repeat(self, lengths: list[int]) -> int:
        """How many positions are read before one of the components starts its next epoch."""
        ends = []
        for number, length in enumerate(lengths):
            period, rank = divmod(length, self.weights[number])
            places = np.flatnonzero(self._table == number)
            ends.append(period * self.period + int(places[rank]))
        return min(ends) if self.components > 1 else lengths[0]


def _whole_numbers(weights: list[float]) -> list[int]:
    fractions = []
    for weight in weights:
        try:
            fractions.append(Fraction(str(weight)))
        except ValueError:
            fractions.append(Fraction(0))
    if not fractions or min(fractions) <= 0:
        raise ConfigError(f"the weights of data.mixture must be numbers above 0, got {weights}")
    scale = lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * scale) for fraction in fractions]
    numbers = [number // gcd(*numbers) for number in numbers]
    if sum(numbers) > MAXIMUM_PERIOD:
        raise ConfigError(
            f"the weights {weights} of data.mixture repeat only after {sum(numbers)} samples, at "
            f"most {MAXIMUM_PERIOD} are allowed; round them to fewer digits"
        )
    return numbers

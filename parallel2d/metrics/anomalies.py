"""Warns of what is wrong with the measurements of a run: an axis that moves other bytes than were
predicted (`Deviation`), a rank that is slower than the others for many steps (`Stragglers`)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

TOLERANCE = 0.05  # of the prediction; beyond it the axis is named
# Steps over which the median of a rank's ratio counts, so that single pauses do not
WINDOW = 12
SLOW = 1.5  # times the other ranks' busy time


class Deviation:
    """Warns once per axis that moves more or less than predicted. ``predicted``: bytes by key."""

    def __init__(self, predicted: Mapping[str, float]) -> None:
        self._predicted = dict(predicted)

    def check(self, row: Mapping[str, float]) -> list[str]:
        """The warnings for one row of measurements; each axis is named once in a run."""
        warnings = []
        for key, predicted in list(self._predicted.items()):
            measured, expected = row.get(key, predicted), max(predicted, 1.0)
            if abs(measured - predicted) > TOLERANCE * expected:
                del self._predicted[key]
                axis = key.split("/")[1]
                warnings.append(
                    f"the {axis} axis moves {measured / 1e6:.4g} MB per step and rank, "
                    f"{measured / expected:.2f} times the predicted {predicted / 1e6:.4g} MB: look "
                    "for collectives that the layout does not need"
                )
        return warnings


class Stragglers:
    """Warns once per rank that is slow. ``hosts[rank]``: where a rank runs."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._ratios: list[deque[float]] = [deque(maxlen=WINDOW) for _ in hosts]
        self._named: set[int] = set()

    def check(self, busy_s: Sequence[float]) -> list[str]:
        """``busy_s[rank]``: seconds of the last step in which the rank worked, without its waits
        for others."""
        # Zero stands for a rank that has measured nothing yet.
        if len(busy_s) < 2 or not all(busy_s):
            return []
        warnings = []
        # One median for all ranks: to sort the others of each takes tens of milliseconds with
        # hundreds of ranks. Who is slow is not in the lower half.
        others = statistics.median(sorted(busy_s)[:-1])
        for rank, seconds in enumerate(busy_s):
            ratios = self._ratios[rank]
            ratios.append(seconds / others)
            if len(ratios) < WINDOW or ratios[-1] < SLOW or rank in self._named:
                continue
            ratio = statistics.median(ratios)
            if ratio >= SLOW:
                self._named.add(rank)
                host = self._hosts[rank].split("/")[0]
                warnings.append(
                    f"rank {rank} on {host} is slow: {ratio:.1f} times the busy time of the other "
                    f"ranks over the last {WINDOW} steps; all others wait for it"
                )
        return warnings

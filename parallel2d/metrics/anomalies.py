"""What is wrong with what a run measures: an axis that moves other bytes than predicted
(`Deviation`), a rank that is slower than the others for many steps (`Stragglers`)."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

TOLERANCE = 0.05  # of the prediction; beyond it the axis is named
# Steps over which the median of a rank's ratio counts, so that single pauses do not
WINDOW = 12
SLOW = 1.5  # times the other ranks' busy time


class Deviation:
    """Warns once per axis that moves more or less than predicted. ``predicted``: bytes by key."""

    def __init__(self, predicted: Mapping[str, float]) -> None:
        self._predicted = dict(predicted)

    def check(self, row: Mapping[str, float]) -> list[str]:
        """The warnings for one row of measurements; each axis is named once in a run. They are
        logged as well."""
        found = []
        for key, expected in list(self._predicted.items()):
            measured = row.get(key)
            if measured is None:
                continue
            if abs(measured - expected) <= TOLERANCE * max(expected, 1.0):
                continue
            del self._predicted[key]
            warning = _describe(key, measured, expected)
            found.append(warning)
            log.warning("%s", warning)
        return found


def _describe(key: str, measured: float, expected: float) -> str:
    axis = key.split("/")[1]
    ratio = "not the"
    if expected:
        ratio = f"{measured / expected:.2f} times the"
    return (
        f"the {axis} axis moves {_bytes(measured)} per step and rank, {ratio} predicted "
        f"{_bytes(expected)}: look for collectives that the layout does not need"
    )


def _bytes(value: float) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:.0f} B"


class Stragglers:
    """``hosts[rank]``: where a rank runs. Names each rank once in a run."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = [host.split("/")[0] for host in hosts]
        self._ratios: list[deque[float]] = [deque(maxlen=WINDOW) for _ in hosts]
        self._named: set[int] = set()

    def check(self, busy_s: Sequence[float]) -> list[str]:
        """``busy_s[rank]``: seconds of the last step in which the rank worked, waits for others
        left out."""
        if len(busy_s) < 2:
            return []
        # Zero stands for a rank that has measured nothing yet.
        if not all(busy_s):
            return []
        warnings = []
        for rank, seconds in enumerate(busy_s):
            others = statistics.median([*busy_s[:rank], *busy_s[rank + 1 :]])
            ratios = self._ratios[rank]
            ratios.append(seconds / others)
            if rank in self._named:
                continue
            if len(ratios) < WINDOW:
                continue
            ratio = statistics.median(ratios)
            if ratio >= SLOW:
                self._named.add(rank)
                warnings.append(self._describe(rank, ratio))
        return warnings

    def _describe(self, rank: int, ratio: float) -> str:
        return (
            f"rank {rank} on {self._hosts[rank]} is slow: {ratio:.1f} times the busy time of the "
            f"other ranks over the last {WINDOW} steps; all others wait for it"
        )

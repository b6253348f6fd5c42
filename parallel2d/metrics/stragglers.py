"""Finds ranks that are slower than the others for many steps: `Stragglers`."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

# Steps over which the median of a rank's ratio counts, so that single pauses do not
WINDOW = 12
SLOW = 1.5  # times the other ranks' busy time


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

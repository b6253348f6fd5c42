"""Ranks that are persistently slower than the others. Busy seconds of every rank flow in each step;
one sentence per slow rank flows out."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

# steps; a rank must be slow in the middle one of them to be named, so single pauses never count
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
        if len(busy_s) < 2 or not all(busy_s):
            return []
        said = []
        for rank, seconds in enumerate(busy_s):
            others = statistics.median(value for other, value in enumerate(busy_s) if other != rank)
            ratios = self._ratios[rank]
            ratios.append(seconds / others)
            if (
                len(ratios) == WINDOW
                and rank not in self._named
                and (ratio := statistics.median(ratios)) >= SLOW
            ):
                self._named.add(rank)
                said.append(
                    f"rank {rank} on {self._hosts[rank]} is slow: {ratio:.1f} times the busy time "
                    "of the other ranks over the "
                    f"last {WINDOW} steps; all others wait for it"
                )
        return said

"""The findings and counts of a run on several simulated ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from stream_simulator.simulator import Simulator
from stream_simulator.sources import MODEL, OPTIMIZER, PROJECT
from stream_simulator.stream_operations import Site, operations


class Wait(NamedTuple):
    """The waits of the host for one reason at one place, in one step."""

    source: str
    reason: str
    place: str
    count: int
    # The most operators that one of the waits has waited for
    outstanding: int


@dataclass
class RankResult:
    """The findings and counts of one rank; see the fields of `Simulator`."""

    findings: dict[tuple[str, ...], tuple[str, int]]
    waits: dict[tuple[int, str, str, str], int]
    outstanding: dict[tuple[int, str, str, str], int]
    kernels: dict[tuple[int, str, str, str], int]
    exposed: dict[tuple[int, str], int]
    sequence: list[tuple[int, str]]
    sites: list[Site]
    # Returned by the function
    value: Any

    @classmethod
    def of(cls, simulator: Simulator, value: Any) -> RankResult:
        return cls(
            findings=simulator.all_findings(),
            waits=dict(simulator.waits),
            outstanding=simulator.outstanding,
            kernels=dict(simulator.kernels),
            exposed=dict(simulator.exposed),
            sequence=simulator.sequence,
            sites=list(operations.sites),
            value=value,
        )


class Result:
    """The results of all ranks. Counts are of rank 0."""

    def __init__(self, ranks: list[RankResult]) -> None:
        self.ranks = ranks
        self.first = ranks[0]

    @property
    def findings(self) -> list[str]:
        """One line for each finding of any rank: its kind, how often, and its text."""
        merged: dict[tuple[str, ...], tuple[str, int]] = {}
        for rank in self.ranks:
            for key, (text, count) in rank.findings.items():
                merged[key] = text, count + merged.get(key, ("", 0))[1]
        return [f"{key[0]}, {count} times: {text}" for key, (text, count) in merged.items()]

    @property
    def kinds(self) -> Counter[str]:
        """The number of findings of each kind."""
        keys = {key for rank in self.ranks for key in rank.findings}
        return Counter(key[0] for key in keys)

    @property
    def sites(self) -> list[Site]:
        """The stream operations of the package on any rank, in the order of their first call."""
        return list(dict.fromkeys(site for rank in self.ranks for site in rank.sites))

    def waits(self, step: int | None = None) -> list[Wait]:
        """The waits of the host in one step; None: in the whole run."""
        found = []
        for key, count in self.first.waits.items():
            if step in (None, key[0]):
                found.append(Wait(*key[1:], count, self.first.outstanding[key]))
        return sorted(found, key=lambda wait: -wait.outstanding)

    def host_waits(self, step: int | None = None) -> int:
        return sum(wait.count for wait in self.waits(step))

    def costly_host_waits(self, step: int | None = None) -> int:
        """The waits of the host at places where operators were outstanding."""
        return sum(wait.count for wait in self.waits(step) if wait.outstanding)

    def waits_before_update(self, step: int) -> list[str]:
        """The waits of the host with outstanding operators, between the last forward and the optimizer."""
        events = [event for at, event in self.first.sequence if at == step]
        update = events.index(OPTIMIZER) if OPTIMIZER in events else len(events)
        models = [index for index, event in enumerate(events[:update]) if event == MODEL]
        start = models[-1] if models else 0
        return [event for event in events[start:update] if event.startswith("wait: ")]

    def kernels(self, step: int) -> Counter[str]:
        """The kernels and collectives of one step by their source."""
        found: Counter[str] = Counter()
        for (at, source, _, _), count in self.first.kernels.items():
            if at == step:
                found[source] += count
        return found

    def own_kernels(self, step: int) -> int:
        """The kernels that the package issued outside of its models."""
        return self.kernels(step)[PROJECT]

    def own_kernels_by_file(self, step: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for (at, source, file, _), count in self.first.kernels.items():
            if at == step and source == PROJECT:
                found[file] += count
        return found

    def exposed(self) -> int:
        """The waits of the default stream and of FSDP2's streams for collectives of the package,
        on all ranks.
        """
        return sum(sum(rank.exposed.values()) for rank in self.ranks)

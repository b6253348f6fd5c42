"""Findings about the links between nodes, from what was measured on them: `judge_links`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from parallel2d.cluster_check.finding import Finding
from parallel2d.cluster_check.units import in_rate, in_seconds

SLOW = 0.5  # of the reference: see `slow_links`
LATE, LATE_BY_S = 5.0, 1e-3  # times the median latency, and at least this much above it


@dataclass(frozen=True)
class Link:
    """From node ``source`` to node ``target``: bytes per second that arrived, and seconds one
    way."""

    source: int
    target: int
    bandwidth: float | None
    latency: float | None
    error: str | None = None

    @property
    def was_measured(self) -> bool:
        return self.bandwidth is not None and self.latency is not None

    @property
    def rate(self) -> float:
        """Bytes per second of a link that was measured."""
        return self.bandwidth or 0.0

    @property
    def seconds(self) -> float:
        """The latency of a link that was measured."""
        return self.latency or 0.0

    def better_of(self, other: Link | None) -> Link:
        """The higher bandwidth and the lower latency of two measurements of one link."""
        if other is None or not other.was_measured:
            return self
        if not self.was_measured:
            return other
        rate, seconds = max(self.rate, other.rate), min(self.seconds, other.seconds)
        return Link(self.source, self.target, rate, seconds)


def slow_links(links: Iterable[Link]) -> list[Link]:
    """Links below half the reference in bandwidth, or far above the median in latency.

    The reference is the median over nodes of each node's fastest link. A median over links would
    not do: of three nodes, one slow node spoils four of six links, and the slow ones would be the
    norm.
    """
    measured = [link for link in links if link.was_measured]
    if not measured:
        return []
    lowest = SLOW * reference_bandwidth(measured)
    latency = median(link.seconds for link in measured)
    slow = [link for link in measured if link.rate < lowest]
    return slow + [link for link in late_links(measured, latency) if link not in slow]


def late_links(measured: Iterable[Link], typical: float) -> list[Link]:
    """Those far above the ``typical`` latency."""
    longest = max(LATE * typical, typical + LATE_BY_S)
    return [link for link in measured if link.seconds > longest]


def reference_bandwidth(measured: Iterable[Link]) -> float:
    """See `slow_links`."""
    fastest: dict[int, float] = {}
    for link in measured:
        for node in (link.source, link.target):
            fastest[node] = max(fastest.get(node, 0.0), link.rate)
    return median(fastest.values())


def judge_links(links: Sequence[Link], names: Sequence[str]) -> list[Finding]:
    """Links that broke, slow nodes, other slow links, and late ones. ``names``: of the nodes."""
    found = []
    for link in links:
        if link.error:
            found.append(_about("red", link, names, f"{link.error} while it was measured"))
    measured = [link for link in links if link.was_measured]
    if not measured:
        return found
    found += _slow(measured, names)
    latency = median(link.seconds for link in measured)
    for link in late_links(measured, latency):
        text = f"{in_seconds(link.seconds)} one way, {in_seconds(latency)} is usual"
        found.append(_about("yellow", link, names, text))
    if found:
        return found
    lowest = in_rate(min(link.rate for link in measured))
    text = f"{len(measured)} links measured, {lowest} or more, latency {in_seconds(latency)}"
    return [Finding("green", "links", text)]


def _slow(measured: Sequence[Link], names: Sequence[str]) -> list[Finding]:
    """Nodes whose links are slow, at least two in a direction, and slow links of other nodes."""
    usual = reference_bandwidth(measured)
    slow = [link for link in measured if link.rate < SLOW * usual]
    found = []
    explained: set[Link] = set()
    for node, name in enumerate(names):
        ways = _slow_ways(node, measured, slow)
        if ways:
            found.append(_slow_node(node, name, ways, usual))
        for own in ways.values():
            explained.update(own)
    which = "; with two nodes the measurement cannot tell which end" if len(names) == 2 else ""
    for link in slow:
        if link not in explained:
            text = f"{in_rate(link.rate)}, the usual here is {in_rate(usual)}{which}"
            found.append(_about("yellow", link, names, text))
    return found


def _slow_ways(
    node: int, measured: Sequence[Link], slow: Sequence[Link]
) -> dict[str, Sequence[Link]]:
    """The directions in which all links of ``node``, two at least, are slow, and these links."""
    ways: dict[str, Sequence[Link]] = {
        "sends": [link for link in measured if link.source == node],
        "receives": [link for link in measured if link.target == node],
    }
    found = {}
    for way, own in ways.items():
        if len(own) > 1 and all(link in slow for link in own):
            found[way] = own
    return found


def _slow_node(node: int, name: str, ways: Mapping[str, Sequence[Link]], usual: float) -> Finding:
    figures = []
    for way, own in ways.items():
        figures.append(f"{way} at {in_rate(median(link.rate for link in own))}")
    text = (
        f"{name}: {' and '.join(figures)}, the usual here is {in_rate(usual)}; all its links are "
        "slow, so look at its cable, port or NIC"
    )
    return Finding("yellow", "links", text, (node,))


def _about(level: str, link: Link, names: Sequence[str], text: str) -> Finding:
    pair = f"{names[link.source]} -> {names[link.target]}"
    return Finding(level, "links", f"{pair}: {text}", (link.source, link.target))

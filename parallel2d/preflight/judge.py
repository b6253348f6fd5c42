"""Turns the reports of all nodes and the measured links into findings: `judge`.

The text of a finding names the node and the cause. ``red``: training would fail or train wrongly;
``yellow``: it would be slow, or may fail later; ``green``: neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from parallel2d.launch.processes import CPU_WORKERS
from parallel2d.preflight.facts import Facts, resolves_to_loopback
from parallel2d.preflight.units import in_bytes, in_rate, in_seconds

SLOW = 0.5  # of the reference: see `slow_links`
LATE, LATE_BY_S = 5.0, 1e-3  # times the median latency, and at least this much above it
CLOCK_S = 1.0
FREE_DISK, LOW_DISK = 1 << 30, 10 << 30
SLOW_DISK = 20e6
SMALL_SHM = 1 << 30
GPU_IN_USE = 0.1  # of its memory
LOW_RAM = 0.1
# descriptors: sockets per pair of ranks (store, gloo pairs), and everything else
FILES_PER_PEER, FILES_BESIDE = 4, 256


@dataclass(frozen=True)
class Finding:
    """``level``: green, yellow or red. ``check``: which. ``nodes``: numbers of the nodes it is
    about; none: the whole cluster."""

    level: str
    check: str
    text: str
    nodes: Sequence[int] = ()


@dataclass
class NodeReport:
    """What a node handed in. ``unreachable``: other node -> why. ``clock_offset_s``: how far node
    0's clock is ahead of its own."""

    facts: Facts
    unreachable: dict[int, str] = field(default_factory=dict)
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    sees_token: bool = True
    intra_bandwidth: float | None = None
    intra_latency: float | None = None
    gpu_copy_bandwidth: float | None = None


@dataclass(frozen=True)
class Link:
    """From node ``source`` to node ``target``: bytes per second that arrived, and seconds one
    way."""

    source: int
    target: int
    bandwidth: float | None
    latency: float | None
    error: str | None = None

    def better_of(self, other: Link | None) -> Link:
        """The higher bandwidth and the lower latency of two measurements of one link."""
        if other is None or other.bandwidth is None or other.latency is None:
            return self
        if self.bandwidth is None or self.latency is None:
            return other
        return Link(
            self.source,
            self.target,
            max(self.bandwidth, other.bandwidth),
            min(self.latency, other.latency),
        )


def slow_links(links: Iterable[Link]) -> list[Link]:
    """Links below half the reference in bandwidth, or far above the median in latency.

    The reference is the median over nodes of each node's fastest link. A median over links would
    not do: of three nodes, one slow node spoils four of six links, and the slow ones would be the
    norm.
    """
    measured = [link for link in links if link.bandwidth is not None and link.latency is not None]
    if not measured:
        return []
    reference = reference_bandwidth(measured)
    latency = median(link.latency or 0.0 for link in measured)
    return [
        link
        for link in measured
        if (link.bandwidth or 0.0) < SLOW * reference or _is_late(link.latency or 0.0, latency)
    ]


def _is_late(latency: float, typical: float) -> bool:
    return latency > LATE * typical and latency > typical + LATE_BY_S


def reference_bandwidth(links: Iterable[Link]) -> float:
    """See `slow_links`."""
    fastest: dict[int, float] = {}
    for link in links:
        for node in (link.source, link.target):
            fastest[node] = max(fastest.get(node, 0.0), link.bandwidth or 0.0)
    return median(fastest.values()) if fastest else 0.0


def judge(
    reports: Sequence[NodeReport], links: Sequence[Link], ranks_per_node: int | None = None
) -> list[Finding]:
    """All findings, in the order of the checks; ``reports[k]`` is node k's."""
    names = node_names([report.facts.host for report in reports])
    ranks = ranks_per_node or len(reports[0].facts.gpus) or CPU_WORKERS
    return [
        *_versions(reports, names),
        *_names_and_interfaces(reports, names),
        *_reachability(reports, names),
        *_clocks(reports, names),
        *_run_dir(reports, names),
        *_machines(reports, names, ranks),
        *_gpus(reports, names, ranks_per_node),
        *_inside(reports, names),
        *_between(links, names),
    ]


def node_names(hosts: Sequence[str]) -> list[str]:
    """Host names, with the node's number where two nodes have the same."""
    count = Counter(hosts)
    return [host if count[host] == 1 else f"{host}#{node}" for node, host in enumerate(hosts)]


def _odd_ones(values: Sequence[Any]) -> tuple[Any, dict[Any, list[int]]]:
    """The most common value (node 0's among equals), and the nodes of every other."""
    count = Counter(values)
    usual = max(count, key=lambda value: (count[value], value == values[0]))
    others: dict[Any, list[int]] = {}
    for node, value in enumerate(values):
        if value != usual:
            others.setdefault(value, []).append(node)
    return usual, others


def _listed(nodes: Sequence[int], names: Sequence[str]) -> str:
    shown = [names[node] for node in nodes[:8]]
    return ", ".join(shown) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


def _equal(
    check: str,
    level: str,
    what: str,
    values: Sequence[Any],
    names: Sequence[str],
    tell: Callable[[Any], str] = str,
    why: str = "",
) -> list[Finding]:
    usual, others = _odd_ones(values)
    return [
        Finding(
            level,
            check,
            f"{_listed(nodes, names)}: {what} {tell(value)}, the others {tell(usual)}{why}",
            tuple(nodes),
        )
        for value, nodes in others.items()
    ]


def _versions(reports: Sequence[NodeReport], names: Sequence[str]) -> list[Finding]:
    keys = list(dict.fromkeys(key for report in reports for key in report.facts.versions))
    found = []
    for key in keys:
        values = [report.facts.versions.get(key, "none") for report in reports]
        why = " (other files are installed there)" if key == "parallel2d code" else ""
        found += _equal("versions", "red", key, values, names, why=why)
    told = ", ".join(f"{key} {value}" for key, value in reports[0].facts.versions.items())
    return found or [
        Finding("green", "versions", told + (" on all nodes" if len(reports) > 1 else ""))
    ]


def _gloo_on_loopback(facts: Facts) -> bool:
    is_set = "GLOO_SOCKET_IFNAME" in facts.interface_variables
    return resolves_to_loopback(facts) and not is_set


def _loopback_cause(facts: Facts) -> str:
    told = "does not resolve"
    if facts.own_name_addresses:
        told = f"resolves to {facts.own_name_addresses[0]}"
    return (
        f"its own host name {told} there, so gloo would listen on loopback and no other node "
        f"could connect; set GLOO_SOCKET_IFNAME={facts.interface}, or correct /etc/hosts"
    )


def _names_and_interfaces(reports: Sequence[NodeReport], names: Sequence[str]) -> list[Finding]:
    found = []
    for node, (report, name) in enumerate(zip(reports, names, strict=True)):
        if len(reports) > 1 and _gloo_on_loopback(report.facts):
            text = f"{name}: {_loopback_cause(report.facts)}"
            found.append(Finding("red", "interface", text, (node,)))
    # A larger frame than the other end takes is dropped without an error: connections open, then
    # hang.
    found += _equal(
        "interface",
        "yellow",
        "MTU",
        [report.facts.mtu for report in reports],
        names,
        why="; large transfers may hang",
    )
    speeds = [report.facts.link_speed_bits_per_s for report in reports]
    found += _equal(
        "interface",
        "yellow",
        "link speed",
        speeds,
        names,
        lambda speed: f"{speed / 1e9:g} Gbit/s" if speed else "unknown",
    )
    used = Counter(
        f"{report.facts.interface} ({report.facts.interface_reason})" for report in reports
    )
    told = ", ".join(
        f"{use}: {count} nodes" if len(used) > 1 else use for use, count in used.items()
    )
    return found or [Finding("green", "interface", told)]


def _deaf(reports: Sequence[NodeReport]) -> list[int]:
    """Nodes that no other node can connect to; of two nodes none, as the pair says it all."""
    if len(reports) <= 2:
        return []
    failed = Counter(other for report in reports for other in report.unreachable)
    return [node for node in range(len(reports)) if failed[node] == len(reports) - 1]


def _reachability(reports: Sequence[NodeReport], names: Sequence[str]) -> list[Finding]:
    if len(reports) == 1:
        return []
    found = []
    deaf = _deaf(reports)
    for node in deaf:
        reasons = Counter(report.unreachable[node] for k, report in enumerate(reports) if k != node)
        text = (
            f"* -> {names[node]}: {reasons.most_common(1)[0][0]}; no node can connect to "
            f"{reports[node].facts.address}"
        )
        found.append(Finding("red", "reachability", text, (node,)))
    for node, report in enumerate(reports):
        for other, reason in sorted(report.unreachable.items()):
            if other not in deaf:
                text = f"{names[node]} -> {names[other]}: {reason}"
                found.append(Finding("red", "reachability", text, (node, other)))
    pairs = len(reports) * (len(reports) - 1)
    told = f"all {pairs} ordered pairs of nodes connect on ephemeral TCP ports"
    return found or [Finding("green", "reachability", told)]


def _clocks(reports: Sequence[NodeReport], names: Sequence[str]) -> list[Finding]:
    if len(reports) == 1:
        return []
    # Node -> how far it is ahead of node 0. Against the median, a wrong clock on node 0 is found
    # there alone.
    known = {0: 0.0}
    for node, report in enumerate(reports):
        if node > 0 and report.clock_offset_s is not None:
            known[node] = -report.clock_offset_s
    middle = median(known.values()) if len(known) > 2 else 0.0
    found, largest = [], 0.0
    for node, value in known.items():
        largest = max(largest, abs(value - middle))
        if abs(value - middle) > CLOCK_S:
            way = "ahead of" if value > middle else "behind"
            than = "the others" if len(known) > 2 else names[0]
            text = (
                f"{names[node]}: clock {abs(value - middle):.3g} s {way} {than}; logs and timeouts "
                "will mislead: run NTP or chrony"
            )
            found.append(Finding("yellow", "clocks", text, (node,)))
    return found or [Finding("green", "clocks", f"at most {in_seconds(largest)} apart")]


def _run_dir(reports: Sequence[NodeReport], names: Sequence[str]) -> list[Finding]:
    found = []
    for node, (report, name) in enumerate(zip(reports, names, strict=True)):
        if not report.facts.run_dir["writable"]:
            text = f"{name}: not writable ({report.facts.run_dir['error']})"
            found.append(Finding("red", "run dir", text, (node,)))
            continue
        if not report.sees_token and reports[0].facts.run_dir["writable"]:
            text = (
                f"{name}: does not see what {names[0]} writes there; the run directory must be on "
                "a file system that all nodes share"
            )
            found.append(Finding("red", "run dir", text, (node,)))
        found += _disk(report.facts.run_dir, node, name)
    if found:
        return found
    free = min(report.facts.run_dir["free_bytes"] for report in reports)
    rate = min(report.facts.run_dir["write_bytes_per_s"] for report in reports)
    shared = ", shared" if len(reports) > 1 else ""
    told = f"writable{shared}, {in_bytes(free)} free, writes at {in_rate(rate)} or more"
    return [Finding("green", "run dir", told)]


def _disk(disk: Mapping[str, Any], node: int, name: str) -> list[Finding]:
    """Too little space, too slow."""
    found = []
    if disk["free_bytes"] < LOW_DISK:
        level = "red" if disk["free_bytes"] < FREE_DISK else "yellow"
        text = f"{name}: {in_bytes(disk['free_bytes'])} free"
        found.append(Finding(level, "run dir", text, (node,)))
    if disk["write_bytes_per_s"] < SLOW_DISK:
        text = f"{name}: writes at {in_rate(disk['write_bytes_per_s'])}; checkpoints will take long"
        found.append(Finding("yellow", "run dir", text, (node,)))
    return found


def _machines(reports: Sequence[NodeReport], names: Sequence[str], ranks: int) -> list[Finding]:
    found = []
    needed = FILES_PER_PEER * ranks * len(reports) + FILES_BESIDE
    for node, (report, name) in enumerate(zip(reports, names, strict=True)):
        facts = report.facts
        if 0 <= facts.open_files_limit < needed:
            text = (
                f"{name}: at most {facts.open_files_limit} open files (ulimit -n), about {needed} "
                "are needed"
            )
            found.append(Finding("red", "machine", text, (node,)))
        if facts.shm_bytes is not None and facts.shm_bytes < SMALL_SHM:
            text = (
                f"{name}: /dev/shm has {in_bytes(facts.shm_bytes)}; NCCL and data loaders share "
                "memory there (docker: --shm-size)"
            )
            found.append(Finding("yellow", "machine", text, (node,)))
        if facts.ram_available_bytes < LOW_RAM * facts.ram_bytes:
            text = (
                f"{name}: {in_bytes(facts.ram_available_bytes)} of {in_bytes(facts.ram_bytes)} RAM "
                "available"
            )
            found.append(Finding("yellow", "machine", text, (node,)))
        if facts.swap_used_bytes > LOW_RAM * facts.ram_bytes:
            found.append(
                Finding(
                    "yellow",
                    "machine",
                    f"{name}: {in_bytes(facts.swap_used_bytes)} swapped out",
                    (node,),
                )
            )
        if facts.has_infiniband and 0 <= facts.locked_memory_limit < 1 << 30:
            limit = in_bytes(facts.locked_memory_limit)
            text = (
                f"{name}: at most {limit} of locked memory (ulimit -l); InfiniBand needs it "
                "unlimited"
            )
            found.append(Finding("yellow", "machine", text, (node,)))
    found += _equal("machine", "yellow", "CPUs", [report.facts.cpus for report in reports], names)
    found += _equal(
        "machine",
        "yellow",
        "RAM",
        [round(report.facts.ram_bytes / 2**32) * 2**32 for report in reports],
        names,
        in_bytes,
    )
    facts = reports[0].facts
    return found or [
        Finding(
            "green",
            "machine",
            f"{facts.cpus} CPUs, {in_bytes(facts.ram_bytes)} RAM, limits suffice for {ranks} ranks",
        )
    ]


def _gpu_kinds(facts: Facts) -> str:
    """How many of each: ``8 x NAME``."""
    counts = Counter(gpu["name"] for gpu in facts.gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def _gpus(
    reports: Sequence[NodeReport], names: Sequence[str], ranks_per_node: int | None
) -> list[Finding]:
    kinds = [_gpu_kinds(report.facts) for report in reports]
    found = _equal("GPUs", "red", "GPUs:", kinds, names)
    for node, (report, name) in enumerate(zip(reports, names, strict=True)):
        if report.facts.gpus and ranks_per_node and ranks_per_node > len(report.facts.gpus):
            text = (
                f"{name}: {len(report.facts.gpus)} GPUs for --nproc={ranks_per_node}; two ranks "
                "cannot share one"
            )
            found.append(Finding("red", "GPUs", text, (node,)))
        for index, gpu in enumerate(report.facts.gpus):
            if gpu["free_bytes"] < (1 - GPU_IN_USE) * gpu["memory_bytes"]:
                text = (
                    f"{name}: GPU {index} has {in_bytes(gpu['free_bytes'])} of "
                    f"{in_bytes(gpu['memory_bytes'])} free: somebody uses it"
                )
                found.append(Finding("yellow", "GPUs", text, (node,)))
    return found or [
        Finding("green", "GPUs", f"{kinds[0]}{' on every node' if len(reports) > 1 else ''}")
    ]


def _inside(reports: Sequence[NodeReport], names: Sequence[str]) -> list[Finding]:
    """Between two processes of a node, and between its GPUs."""
    found = []
    for what, attribute in (
        ("between its processes", "intra_bandwidth"),
        ("between its GPUs", "gpu_copy_bandwidth"),
    ):
        rates = {
            node: rate
            for node, report in enumerate(reports)
            if (rate := getattr(report, attribute)) is not None
        }
        if not rates:
            continue
        typical = median(rates.values())
        slow = {node: rate for node, rate in rates.items() if rate < SLOW * typical}
        for node, rate in slow.items():
            text = f"{names[node]}: {in_rate(rate)} {what}, {in_rate(typical)} is usual here"
            found.append(Finding("yellow", "inside nodes", text, (node,)))
        if not slow:
            found.append(Finding("green", "inside nodes", f"{in_rate(typical)} {what}"))
    for node, report in enumerate(reports):
        if report.intra_bandwidth is None:
            text = f"{names[node]}: a second process on the node could not be measured"
            found.append(Finding("yellow", "inside nodes", text, (node,)))
    return found


def _between(links: Sequence[Link], names: Sequence[str]) -> list[Finding]:
    """Links that broke, slow nodes, other slow links, and late ones."""
    found = []
    for link in links:
        if link.error:
            found.append(_about("red", link, names, f"{link.error} while it was measured"))
    measured = [link for link in links if link.bandwidth is not None and link.latency is not None]
    if not measured:
        return found
    found += _slow(measured, names)
    latency = median(_seconds(link) for link in measured)
    for link in measured:
        if _is_late(_seconds(link), latency):
            text = f"{in_seconds(_seconds(link))} one way, {in_seconds(latency)} is usual"
            found.append(_about("yellow", link, names, text))
    if found:
        return found
    lowest = in_rate(min(_rate(link) for link in measured))
    text = f"{len(measured)} links measured, {lowest} or more, latency {in_seconds(latency)}"
    return [Finding("green", "links", text)]


def _slow(measured: Sequence[Link], names: Sequence[str]) -> list[Finding]:
    """Nodes whose links are slow, at least two in a direction, and slow links of other nodes."""
    usual = reference_bandwidth(measured)
    slow = [link for link in measured if _rate(link) < SLOW * usual]
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
            text = f"{in_rate(_rate(link))}, the usual here is {in_rate(usual)}{which}"
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
        figures.append(f"{way} at {in_rate(median(_rate(link) for link in own))}")
    text = (
        f"{name}: {' and '.join(figures)}, the usual here is {in_rate(usual)}; all its links are "
        "slow, so look at its cable, port or NIC"
    )
    return Finding("yellow", "links", text, (node,))


def _about(level: str, link: Link, names: Sequence[str], text: str) -> Finding:
    pair = f"{names[link.source]} -> {names[link.target]}"
    return Finding(level, "links", f"{pair}: {text}", (link.source, link.target))


def _rate(link: Link) -> float:
    """Bytes per second of a link that was measured."""
    return link.bandwidth or 0.0


def _seconds(link: Link) -> float:
    """The latency of a link that was measured."""
    return link.latency or 0.0

"""Turns the reports of all nodes and the measured links into findings: `judge`.

The text of a finding names the node and the cause. ``red``: training would fail or train wrongly;
``yellow``: it would be slow, or may fail later; ``green``: neither. `_FAULTS` lists what may be
wrong with a node, `_EQUAL` what should be the same on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from parallel2d.cluster_check.facts import Facts, resolves_to_loopback
from parallel2d.cluster_check.finding import Finding
from parallel2d.cluster_check.links import SLOW, Link, judge_links
from parallel2d.cluster_check.units import in_bytes, in_rate, in_seconds
from parallel2d.launch.processes import CPU_WORKERS

CLOCK_S = 1.0
FREE_DISK, LOW_DISK = 1 << 30, 10 << 30
SLOW_DISK = 20e6
SMALL_SHM = 1 << 30
GPU_IN_USE = 0.1  # of its memory
LOW_RAM = 0.1
LOW_LOCKED_MEMORY = 1 << 30
# descriptors: sockets per pair of ranks (store, gloo pairs), and everything else
FILES_PER_PEER, FILES_BESIDE = 4, 256


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


class Checked(NamedTuple):
    """The nodes of a check, by number. ``ranks``: per node; ``asked``: the same where it was
    given."""

    reports: Sequence[NodeReport]
    names: Sequence[str]
    ranks: int
    asked: int | None


# Level and text of a finding about one node, without its name.
Faults = Iterator[tuple[str, str]]


def _interface_faults(node: NodeReport, checked: Checked) -> Faults:
    facts = node.facts
    is_set = "GLOO_SOCKET_IFNAME" in facts.interface_variables
    if len(checked.reports) > 1 and resolves_to_loopback(facts) and not is_set:
        told = "does not resolve"
        if facts.own_name_addresses:
            told = f"resolves to {facts.own_name_addresses[0]}"
        yield (
            "red",
            f"its own host name {told} there, so gloo would listen on loopback and no other node "
            f"could connect; set GLOO_SOCKET_IFNAME={facts.interface}, or correct /etc/hosts",
        )


def _run_dir_faults(node: NodeReport, checked: Checked) -> Faults:
    disk = node.facts.run_dir
    if not disk["writable"]:
        yield "red", f"not writable ({disk['error']})"
        return
    if not node.sees_token and checked.reports[0].facts.run_dir["writable"]:
        yield (
            "red",
            f"does not see what {checked.names[0]} writes there; the run directory must be on a "
            "file system that all nodes share",
        )
    if disk["free_bytes"] < LOW_DISK:
        level = "red" if disk["free_bytes"] < FREE_DISK else "yellow"
        yield level, f"{in_bytes(disk['free_bytes'])} free"
    if disk["write_bytes_per_s"] < SLOW_DISK:
        rate = in_rate(disk["write_bytes_per_s"])
        yield "yellow", f"writes at {rate}; checkpoints will take long"


def _machine_faults(node: NodeReport, checked: Checked) -> Faults:
    facts = node.facts
    needed = FILES_PER_PEER * checked.ranks * len(checked.reports) + FILES_BESIDE
    if 0 <= facts.open_files_limit < needed:
        limit = facts.open_files_limit
        yield "red", f"at most {limit} open files (ulimit -n), about {needed} are needed"
    if facts.shm_bytes is not None and facts.shm_bytes < SMALL_SHM:
        yield (
            "yellow",
            f"/dev/shm has {in_bytes(facts.shm_bytes)}; NCCL and data loaders share memory there "
            "(docker: --shm-size)",
        )
    if facts.ram_available_bytes < LOW_RAM * facts.ram_bytes:
        left = in_bytes(facts.ram_available_bytes)
        yield "yellow", f"{left} of {in_bytes(facts.ram_bytes)} RAM available"
    if facts.swap_used_bytes > LOW_RAM * facts.ram_bytes:
        yield "yellow", f"{in_bytes(facts.swap_used_bytes)} swapped out"
    if facts.has_infiniband and 0 <= facts.locked_memory_limit < LOW_LOCKED_MEMORY:
        locked = in_bytes(facts.locked_memory_limit)
        yield (
            "yellow",
            f"at most {locked} of locked memory (ulimit -l); InfiniBand needs it unlimited",
        )


def _gpu_faults(node: NodeReport, checked: Checked) -> Faults:
    gpus = node.facts.gpus
    if gpus and checked.asked and checked.asked > len(gpus):
        yield "red", f"{len(gpus)} GPUs for --nproc={checked.asked}; two ranks cannot share one"
    for index, gpu in enumerate(gpus):
        free, memory = gpu["free_bytes"], gpu["memory_bytes"]
        if free < (1 - GPU_IN_USE) * memory:
            told = f"{in_bytes(free)} of {in_bytes(memory)} free: somebody uses it"
            yield "yellow", f"GPU {index} has {told}"


_FAULTS = {
    "interface": _interface_faults,
    "run dir": _run_dir_faults,
    "machine": _machine_faults,
    "GPUs": _gpu_faults,
}


class Same(NamedTuple):
    """What should be the same on all nodes."""

    check: str
    level: str
    what: str
    value: Callable[[Facts], Any]
    shown: Callable[[Any], str] = str
    why: str = ""


_EQUAL = (
    # A larger frame than the other end takes is dropped without an error: connections open, then
    # hang.
    Same("interface", "yellow", "MTU", lambda facts: facts.mtu, why="; large transfers may hang"),
    Same(
        "interface",
        "yellow",
        "link speed",
        lambda facts: facts.link_speed_bits_per_s,
        lambda speed: f"{speed / 1e9:g} Gbit/s" if speed else "unknown",
    ),
    Same("machine", "yellow", "CPUs", lambda facts: facts.cpus),
    Same(
        "machine",
        "yellow",
        "RAM",
        lambda facts: round(facts.ram_bytes / 2**32) * 2**32,
        in_bytes,
    ),
    Same("GPUs", "red", "GPUs:", lambda facts: _gpu_kinds(facts)),
)


def judge(
    reports: Sequence[NodeReport], links: Sequence[Link], ranks_per_node: int | None = None
) -> list[Finding]:
    """All findings, in the order of the checks; ``reports[k]`` is node k's."""
    names = node_names([report.facts.host for report in reports])
    ranks = ranks_per_node or len(reports[0].facts.gpus) or CPU_WORKERS
    checked = Checked(reports, names, ranks, ranks_per_node)
    found = _versions(checked)
    found += _of_nodes("interface", checked) or [_green("interface", _interfaces(checked))]
    if len(reports) > 1:
        found += _reachability(checked)
        found += _clocks(checked)
    found += _of_nodes("run dir", checked) or [_green("run dir", _run_dir(checked))]
    found += _of_nodes("machine", checked) or [_green("machine", _machine(checked))]
    everywhere = " on every node" if len(reports) > 1 else ""
    found += _of_nodes("GPUs", checked) or [
        _green("GPUs", f"{_gpu_kinds(reports[0].facts)}{everywhere}")
    ]
    return found + _inside(checked) + judge_links(links, names)


def node_names(hosts: Sequence[str]) -> list[str]:
    """Host names, with the node's number where two nodes have the same."""
    count = Counter(hosts)
    return [host if count[host] == 1 else f"{host}#{node}" for node, host in enumerate(hosts)]


def _green(check: str, text: str) -> Finding:
    return Finding("green", check, text)


def _of_nodes(check: str, checked: Checked) -> list[Finding]:
    """What `_FAULTS` and `_EQUAL` find in this check."""
    found = []
    for node, report in enumerate(checked.reports):
        for level, text in _FAULTS[check](report, checked):
            found.append(Finding(level, check, f"{checked.names[node]}: {text}", (node,)))
    for same in _EQUAL:
        if same.check == check:
            values = [same.value(report.facts) for report in checked.reports]
            found += _differences(same, values, checked.names)
    return found


def _differences(same: Same, values: Sequence[Any], names: Sequence[str]) -> list[Finding]:
    """A finding for each value that is not the most common one (node 0's among equals)."""
    count = Counter(values)
    usual = max(count, key=lambda value: (count[value], value == values[0]))
    others: dict[Any, list[int]] = {}
    for node, value in enumerate(values):
        if value != usual:
            others.setdefault(value, []).append(node)
    found = []
    for value, nodes in others.items():
        listed = ", ".join(names[node] for node in nodes[:8])
        if len(nodes) > 8:
            listed += f" and {len(nodes) - 8} more"
        told = f"{same.what} {same.shown(value)}, the others {same.shown(usual)}{same.why}"
        found.append(Finding(same.level, same.check, f"{listed}: {told}", tuple(nodes)))
    return found


def _versions(checked: Checked) -> list[Finding]:
    keys = dict.fromkeys(key for report in checked.reports for key in report.facts.versions)
    found = []
    for key in keys:
        values = [report.facts.versions.get(key, "none") for report in checked.reports]
        why = " (other files are installed there)" if key == "parallel2d code" else ""
        same = Same("versions", "red", key, lambda facts: None, why=why)
        found += _differences(same, values, checked.names)
    versions = checked.reports[0].facts.versions
    told = ", ".join(f"{key} {value}" for key, value in versions.items())
    everywhere = " on all nodes" if len(checked.reports) > 1 else ""
    return found or [_green("versions", told + everywhere)]


def _interfaces(checked: Checked) -> str:
    used = Counter(
        f"{report.facts.interface} ({report.facts.interface_reason})" for report in checked.reports
    )
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{use}: {count} nodes" for use, count in used.items())


def _reachability(checked: Checked) -> list[Finding]:
    reports, names = checked.reports, checked.names
    found = []
    # Of two nodes, the pair says it all.
    deaf = _deaf(reports) if len(reports) > 2 else []
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
    return found or [_green("reachability", told)]


def _deaf(reports: Sequence[NodeReport]) -> list[int]:
    """Nodes that no other node can connect to."""
    failed = Counter(other for report in reports for other in report.unreachable)
    return [node for node in range(len(reports)) if failed[node] == len(reports) - 1]


def _clocks(checked: Checked) -> list[Finding]:
    # Node -> how far it is ahead of node 0. Against the median, a wrong clock on node 0 is found
    # there alone.
    known = {0: 0.0}
    for node, report in enumerate(checked.reports):
        if node > 0 and report.clock_offset_s is not None:
            known[node] = -report.clock_offset_s
    middle = median(known.values()) if len(known) > 2 else 0.0
    than = "the others" if len(known) > 2 else checked.names[0]
    found, largest = [], 0.0
    for node, value in known.items():
        off = abs(value - middle)
        largest = max(largest, off)
        if off > CLOCK_S:
            way = "ahead of" if value > middle else "behind"
            text = (
                f"{checked.names[node]}: clock {off:.3g} s {way} {than}; logs and timeouts will "
                "mislead: run NTP or chrony"
            )
            found.append(Finding("yellow", "clocks", text, (node,)))
    return found or [_green("clocks", f"at most {in_seconds(largest)} apart")]


def _run_dir(checked: Checked) -> str:
    disks = [report.facts.run_dir for report in checked.reports]
    free = in_bytes(min(disk["free_bytes"] for disk in disks))
    rate = in_rate(min(disk["write_bytes_per_s"] for disk in disks))
    shared = ", shared" if len(checked.reports) > 1 else ""
    return f"writable{shared}, {free} free, writes at {rate} or more"


def _machine(checked: Checked) -> str:
    facts = checked.reports[0].facts
    ram = in_bytes(facts.ram_bytes)
    return f"{facts.cpus} CPUs, {ram} RAM, limits suffice for {checked.ranks} ranks"


def _gpu_kinds(facts: Facts) -> str:
    """How many of each: ``8 x NAME``."""
    counts = Counter(gpu["name"] for gpu in facts.gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def _inside(checked: Checked) -> list[Finding]:
    """Between two processes of a node, and between its GPUs."""
    found = []
    for what, attribute in (
        ("between its processes", "intra_bandwidth"),
        ("between its GPUs", "gpu_copy_bandwidth"),
    ):
        measured = {node: getattr(report, attribute) for node, report in enumerate(checked.reports)}
        rates = {node: rate for node, rate in measured.items() if rate is not None}
        if not rates:
            continue
        typical = median(rates.values())
        slow = {node: rate for node, rate in rates.items() if rate < SLOW * typical}
        for node, rate in slow.items():
            told = f"{in_rate(rate)} {what}, {in_rate(typical)} is usual here"
            text = f"{checked.names[node]}: {told}"
            found.append(Finding("yellow", "inside nodes", text, (node,)))
        if not slow:
            found.append(_green("inside nodes", f"{in_rate(typical)} {what}"))
    for node, report in enumerate(checked.reports):
        if report.intra_bandwidth is None:
            text = f"{checked.names[node]}: a second process on the node could not be measured"
            found.append(Finding("yellow", "inside nodes", text, (node,)))
    return found

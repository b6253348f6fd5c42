"""Shows the outcome of a check and keeps it: `show` prints a table and the verdict, `to_json` gives
plain values, `write_cluster_file` writes the cluster file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from parallel2d.cluster_check.facts import Facts
from parallel2d.cluster_check.judge import NodeReport, node_names
from parallel2d.cluster_check.links import Link
from parallel2d.cluster_check.units import in_bytes, in_rate, in_seconds

if TYPE_CHECKING:
    from parallel2d.cluster_check.check import CheckOutcome

_ROWS, _MATRIX = 24, 8  # nodes shown line by line; nodes whose links are shown as a square
_MARKS = {"green": "ok", "yellow": "warn", "red": "FAIL"}


def _shown(outcome: CheckOutcome, nodes: int) -> Sequence[int]:
    """The nodes that get a row: all of a small cluster, of a large one those with a finding."""
    if nodes <= _ROWS:
        return range(nodes)
    accused: set[int] = set()
    for finding in outcome.findings:
        if finding.level != "green":
            accused.update(finding.nodes)
    return sorted(accused)[:_ROWS]


def show(outcome: CheckOutcome) -> None:
    """The table of nodes, the links, the findings and the verdict, on standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    names = node_names([report.facts.host for report in outcome.reports])
    shown = _shown(outcome, len(names))
    table = Table(title=f"{len(names)} node{'s' if len(names) > 1 else ''}", title_justify="left")
    for column in (
        "node",
        "address",
        "CPUs",
        "RAM free",
        "GPUs",
        "/dev/shm",
        "run dir",
        "in node",
        "links, slowest",
    ):
        table.add_column(column)
    for node in shown:
        table.add_row(*map(escape, _row(names[node], outcome.reports[node], node, outcome.links)))
    if len(shown) < len(names):
        table.caption = f"{len(names) - len(shown)} nodes not shown"
    console.print(table)
    if 1 < len(names) <= _MATRIX:
        console.print(_matrix(names, outcome.links))
    for finding in outcome.findings:
        console.print(
            f"[{finding.level}]{_MARKS[finding.level]:>4}[/] {finding.check:<13} "
            f"{escape(finding.text)}",
            soft_wrap=True,
        )
    console.print(_verdict(outcome), style="bold", soft_wrap=True)


def _row(name: str, report: NodeReport, node: int, links: Sequence[Link]) -> list[str]:
    facts = report.facts
    own = [
        link.bandwidth
        for link in links
        if node in (link.source, link.target) and link.bandwidth is not None
    ]
    disk = facts.run_dir
    return [
        name,
        f"{facts.address} ({facts.interface})",
        str(facts.cpus),
        f"{in_bytes(facts.ram_available_bytes)} of {in_bytes(facts.ram_bytes)}",
        f"{len(facts.gpus)} x {facts.gpus[0]['name']}" if facts.gpus else "none",
        in_bytes(facts.shm_bytes) if facts.shm_bytes is not None else "none",
        f"{in_rate(disk['write_bytes_per_s'])}, {in_bytes(disk['free_bytes'])} free"
        if disk["writable"]
        else "not writable",
        in_rate(report.intra_bandwidth) if report.intra_bandwidth is not None else "?",
        in_rate(min(own)) if own else "none",
    ]


def _matrix(names: Sequence[str], links: Sequence[Link]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    figures = {(link.source, link.target): link for link in links}
    table = Table(title="links (row sends, column receives; one way)", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(escape(name))
    for source, name in enumerate(names):
        cells = [figures.get((source, target)) for target in range(len(names))]
        told = [
            f"{in_rate(c.bandwidth or 0)}, {in_seconds(c.latency or 0)}"
            if c and c.bandwidth is not None
            else "-"
            for c in cells
        ]
        table.add_row(escape(name), *told)
    return table


def _verdict(outcome: CheckOutcome) -> str:
    count = {
        level: sum(finding.level == level for finding in outcome.findings)
        for level in ("red", "yellow")
    }
    if count["red"]:
        return f"not fit to train: {count['red']} failed, {count['yellow']} warnings"
    return "fit to train" + (f", with {count['yellow']} warnings" if count["yellow"] else "")


def verdict_of_other_node(outcome: CheckOutcome, host: str) -> str:
    """What a node other than 0 prints: the verdict, and the findings that are about it."""
    own = [
        f"{_MARKS[f.level]:>4} {f.check:<13} {f.text}"
        for f in outcome.findings
        if f.level != "green" and outcome.node in f.nodes
    ]
    return "\n".join([*own, f"{host}: {_verdict(outcome)} (the report is on node 0)"])


def to_json(outcome: CheckOutcome) -> dict[str, Any]:
    """Everything that was found, as plain values; rates in bytes per second, times in seconds,
    sizes in bytes."""
    return {
        "fit": outcome.fit,
        "findings": [asdict(finding) for finding in outcome.findings],
        "nodes": [asdict(report) for report in outcome.reports],
        "links": [asdict(link) for link in outcome.links],
    }


def cluster_description(outcome: CheckOutcome, name: str, ranks_per_node: int) -> dict[str, Any]:
    """What the planner needs of this cluster; medians over nodes and links. Bandwidths in bytes per
    second and direction, latencies in seconds one way, memory in bytes per rank. ``inter_node`` is
    None for one node, or where no link could be measured."""
    reports = outcome.reports
    inside = _known(report.gpu_copy_bandwidth for report in reports)
    if not inside:
        inside = _known(report.intra_bandwidth for report in reports)
    measured = [link for link in outcome.links if link.was_measured]
    return {
        "name": name,
        "nodes": len(reports),
        "ranks_per_node": ranks_per_node,
        "hosts": [report.facts.host for report in reports],
        "device": device_of([report.facts for report in reports], ranks_per_node),
        "intra_node": _pair(inside, _known(report.intra_latency for report in reports)),
        "inter_node": _pair([link.rate for link in measured], [link.seconds for link in measured]),
    }


def device_of(nodes: Sequence[Facts], ranks_per_node: int) -> dict[str, Any]:
    """The device of a rank: ``type``, ``name``, ``memory_bytes``. The first GPU with the smallest
    memory of all, or a rank's share of the smallest host."""
    gpus = [gpu for facts in nodes for gpu in facts.gpus]
    if gpus:
        memory = min(gpu["memory_bytes"] for gpu in gpus)
        return {"type": "cuda", "name": gpus[0]["name"], "memory_bytes": memory}
    share = min(facts.ram_bytes for facts in nodes) // ranks_per_node
    return {"type": "cpu", "name": nodes[0].cpu_name, "memory_bytes": share}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _pair(bandwidths: Sequence[float], latencies: Sequence[float]) -> dict[str, float] | None:
    if not bandwidths or not latencies:
        return None
    return {
        "bandwidth_bytes_per_s": round(median(bandwidths)),
        "latency_s": round(median(latencies), 9),
    }


def write_cluster_file(path: str, outcome: CheckOutcome, ranks_per_node: int) -> None:
    """`cluster_description` as YAML, named after the file. Raises OSError."""
    header = (
        f"# Written by python -m parallel2d.preflight on {time.strftime('%Y-%m-%d')}. Bandwidths: "
        "bytes per second in one direction,\n"
        "# 4 TCP streams (between the GPUs of a node: copies from GPU 0 to GPU 1). Latencies: "
        "seconds one way. Memory: bytes per rank.\n"
    )
    description = cluster_description(outcome, Path(path).stem, ranks_per_node)
    Path(path).write_text(header + yaml.safe_dump(description, sort_keys=False))

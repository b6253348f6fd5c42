"""The preflight check: `ClusterCheck`. Every rank runs the same sequence of checks."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from parallel2d.base import files
from parallel2d.base.config import TrainConfig
from parallel2d.base.errors import ConfigError, counted
from parallel2d.base.exchange import all_gather, check_shared
from parallel2d.base.runtime import Runtime
from parallel2d.instruments.preflight.rank_measurement import RankMeasurement
from parallel2d.instruments.preflight.verdict import Finding, NodeFacts, judge_nodes, judge_speeds
from parallel2d.parallel.mesh import build_mesh
from parallel2d.parallel.mesh_sizes import MeshSpec

_MARKS = {"red": "FAIL", "yellow": "warn"}


class ClusterCheck:
    """The check that the command-line arguments ``given`` describe. The findings are equal on all
    ranks, and rank 0 prints them."""

    def __init__(self, runtime: Runtime, given: argparse.Namespace) -> None:
        self._runtime, self._given = runtime, given
        self._findings: list[Finding] = []
        topology, rank = runtime.topology, runtime.identity.rank
        self._own_ranks = topology.ranks_by_host[topology.hosts[rank]]
        # True on the rank that reports the facts about its node
        self._speaks = rank == self._own_ranks[0]

    def run(self, config: TrainConfig) -> int:
        """Check the cluster for the job of ``config``, and return the exit code. Collective.

        Raises:
            ConfigError: on every rank, for a mesh that these ranks cannot form, and for
                measurements that are insufficient for a cluster file.
        """
        given, topology = self._given, self._runtime.topology
        nodes = self._compare_nodes()
        mesh = build_mesh(
            MeshSpec.from_config(config.mesh),
            # With strategy=auto the layout is chosen when the job starts. All possible layouts use
            # the axes of hybrid.
            "hybrid" if config.is_automatic else config.strategy,
            topology=topology,
            allow_cross_node=config.mesh.allow_cross_node,
        )
        largest = given.largest_mib * 2**20
        measured = RankMeasurement(self._runtime, mesh, given.seconds, largest)
        hosts = [host.partition("/")[0] for host in topology.hosts]
        self._add(judge_speeds(hosts, measured.flops, measured.links))
        for axis, link in measured.fits.items():
            speed = f"{link.bytes_per_s / 1e6:.4g} MB/s, {link.latency_s * 1e6:.4g} us a step"
            self._say(f"  ok {axis}: {speed}")
        if given.write:
            keys = measured.cluster_keys(nodes)
            if self._runtime.is_first:
                self._write(keys)
        details = {"nodes": nodes, "flops": measured.flops, "links": measured.links}
        return self._conclude({**details, "axes": measured.samples}, hosts[0])

    def _conclude(self, details: dict[str, Any], first_host: str) -> int:
        failed = [finding.level for finding in self._findings].count("red")
        warnings = len(self._findings) - failed
        fit = f"not fit to train: {failed} failed" if failed else "fit to train"
        verdict = f"{fit}, {counted(warnings, 'warning')}"
        self._say(verdict)
        if self._speaks and not self._runtime.is_first:
            text = f"{socket.gethostname()}: {verdict} (report on {first_host})"
            print(text, file=sys.stderr)
        elif self._given.json and self._runtime.is_first:
            found = []
            for finding in self._findings:
                found.append(finding._asdict())
            report = {"fit": not failed, "findings": found, **details}
            print(json.dumps(report, default=asdict), flush=True)
        return int(failed > 0 or (self._given.strict and warnings > 0))

    def _compare_nodes(self) -> list[NodeFacts]:
        facts = None
        if self._speaks:
            facts = NodeFacts.collect(self._given.run_dir, len(self._own_ranks))
        nodes = list(filter(None, all_gather(facts)))
        # A delay of a rank adds to its time, so the smallest difference of three measurements is
        # used.
        ahead = [self._clocks_ahead() for _ in range(3)]
        self._add(judge_nodes(nodes, [min(each, key=abs) for each in zip(*ahead, strict=True)]))
        # If the first node cannot write to the folder, the check has no file to compare.
        if "run dir" not in map(attrgetter("check"), nodes[0].faults):
            try:
                check_shared(self._given.run_dir)
            except ConfigError as error:
                self._add([Finding("red", "run dir", str(error))])
        return nodes

    def _clocks_ahead(self) -> list[float]:
        """Return the lead of each node's clock over the first node's clock, in seconds."""
        by_rank = all_gather(time.time())  # all ranks call this within milliseconds
        found: list[float] = []
        for ranks in self._runtime.topology.ranks_by_host.values():
            found.append(by_rank[ranks[0]] - by_rank[0])
        return found

    def _add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._findings.append(finding)
            self._say(f"{_MARKS[finding.level]} {finding.check}: {finding.text}")

    def _say(self, text: str) -> None:
        if self._runtime.is_first and not self._given.json:
            print(files.for_terminal(text), flush=True)

    def _write(self, keys: dict[str, Any]) -> None:
        path = self._given.write
        # Four significant digits
        short = json.loads(json.dumps(keys), parse_float=lambda text: float(f"{float(text):.4g}"))
        described = {"name": Path(path).stem, **short}
        text = f"# Measured on {time.strftime('%Y-%m-%d')} by python -m parallel2d.preflight\n"
        text += "defaults: [/schema/cluster@_here_, _self_]\n"
        files.replace(path, text + yaml.safe_dump(described, sort_keys=False))
        print(f"written: {path}; plan with cluster={path}", file=sys.stderr)

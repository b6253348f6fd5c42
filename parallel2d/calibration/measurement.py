"""Measures a cluster as training uses it and writes a cluster file for the planner: `calibrate`.

Once on every node, as `check`. The nodes meet, each starts its ranks (`rank_probe`), and these
measure together over the backend that training uses. Node 0 fits the links (`link_fit`) and writes
the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from parallel2d import files
from parallel2d.calibration.link_fit import CollectiveSample, FittedLink, fit_link
from parallel2d.calibration.rank_probe import RankSettings
from parallel2d.cluster_check.check import NotFit, Request, joined, meet
from parallel2d.cluster_check.facts import Facts
from parallel2d.cluster_check.meeting import PreflightMeeting
from parallel2d.cluster_check.outcome import device_of
from parallel2d.cost.collective_time import GroupPlacement, collective_steps
from parallel2d.cost.collectives import sent_bytes
from parallel2d.launch.network_interface import GLOO, NCCL
from parallel2d.launch.processes import CPU_WORKERS
from parallel2d.store.secret import new_secret
from parallel2d.store.server import StoreServer

_LONGEST_S = 120.0


@dataclass(frozen=True)
class Measured:
    """What the file is made from, on node 0. ``result``: of `rank_probe`."""

    facts: list[Facts]
    ranks_per_node: int
    device_type: str
    result: dict[str, Any]


def calibrate(request: Request, largest_bytes: int) -> Measured | None:
    """What was measured, on node 0; None elsewhere. ``request.seconds``: of each measurement;
    ``largest_bytes``: of a collective.

    Raises `NotFit` where ranks could not measure, `NodeMissing` where nodes do not come, and
    `ConfigError` for arguments that contradict those of other nodes.
    """
    with joined(meet(request), request) as (meeting, facts):
        return _measure_together(meeting, facts, request, largest_bytes)


def _plan(
    everyone: list[dict[str, Any]] | None, address: str
) -> tuple[dict[str, Any] | None, StoreServer | None]:
    """What the leading node tells the others, and the store of the ranks; elsewhere neither."""
    if everyone is None:
        return None, None
    problem = _disagreement(everyone)
    if problem is not None:
        return {"problem": problem}, None
    secret = new_secret()
    server = StoreServer.at(address, 0, secret)
    return {"problem": None, "address": server.address, "secret": secret}, server


def _measure_together(
    meeting: PreflightMeeting, facts: Facts, request: Request, largest_bytes: int
) -> Measured | None:
    ranks = request.ranks_per_node or len(facts.gpus) or CPU_WORKERS
    device_type = "cuda" if facts.gpus else "cpu"
    offer = {"facts": asdict(facts), "ranks": ranks, "device": device_type}
    everyone = meeting.gather("facts", offer)
    plan, server = _plan(everyone, facts.address)
    try:
        plan = meeting.tell(plan)
        if plan["problem"] is not None:
            raise NotFit(plan["problem"])
        result, problem = _run_ranks(
            meeting, plan, facts, ranks, device_type, request, largest_bytes
        )
        problems = meeting.gather("calibration", problem, wait_s=_LONGEST_S)
        first_problem = next(filter(None, problems or []), None)
        told = meeting.tell(first_problem, wait_s=_LONGEST_S)
    finally:
        if server is not None:
            server.close()
    if told is not None:
        raise NotFit(told)
    if everyone is None or result is None:
        return None
    return Measured([Facts(**each["facts"]) for each in everyone], ranks, device_type, result)


def _disagreement(everyone: Sequence[dict[str, Any]]) -> str | None:
    """Why the ranks of these nodes cannot measure together; None where they can."""
    for key, words in (("ranks", "ranks per node"), ("device", "kinds of devices")):
        found = {each["facts"]["host"]: each[key] for each in everyone}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{host} {value}" for host, value in found.items())
            return f"nodes have different {words} ({listed}): give every node the same --nproc"
    for each in everyone:
        gpus = len(each["facts"]["gpus"])
        if gpus and each["ranks"] > gpus:
            return f"--nproc={each['ranks']}, and {each['facts']['host']} has {gpus} GPUs"
    return None


def _run_ranks(
    meeting: PreflightMeeting,
    plan: dict[str, Any],
    facts: Facts,
    ranks: int,
    device_type: str,
    request: Request,
    largest_bytes: int,
) -> tuple[dict[str, Any] | None, str | None]:
    """The result of rank 0, on its node, and why this node's ranks failed if they did."""
    environment = {"OMP_NUM_THREADS": "1", GLOO: facts.interface, NCCL: facts.interface}
    environment |= os.environ
    processes = []
    try:
        for local in range(ranks):
            settings = RankSettings(
                address=plan["address"],
                secret=plan["secret"],
                rank=meeting.node * ranks + local,
                nodes=meeting.nodes,
                ranks_per_node=ranks,
                device_type=device_type,
                largest_bytes=largest_bytes,
                seconds=request.seconds,
            )
            process = subprocess.Popen(
                [sys.executable, "-m", "parallel2d.calibration.rank_probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if settings.rank == 0 else subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(settings)) + "\n")
            process.stdin.flush()
        problem = _wait_for(processes, facts.host)
        if problem is not None or meeting.node != 0:
            return None, problem
        assert processes[0].stdout is not None
        return json.loads(processes[0].stdout.read().splitlines()[-1]), None
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _wait_for(processes: Sequence[subprocess.Popen[str]], host: str) -> str | None:
    """Returns when all have ended, or one has failed, or after `_LONGEST_S`; why, if they did not
    all succeed."""
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = [process for process in processes if process.poll()]
        if failed:
            return f"a rank on {host} failed while it measured: {_reason(failed[0])}"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)
    return f"the ranks on {host} did not finish within {_LONGEST_S:g} s"


def _reason(process: subprocess.Popen[str]) -> str:
    """Why a rank that has ended with an error did so."""
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    if lines:
        return str(json.loads(lines[-1])["problem"])
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}"
    return f"exit code {process.returncode}"


def cluster_of(measured: Measured, name: str) -> tuple[dict[str, Any], list[str]]:
    """The keys of `ClusterConfig`, and the lines of what was measured. Raises `NotFit` for figures
    that fit no link."""
    result = measured.result
    nodes = len(measured.facts)
    device = device_of(measured.facts, measured.ranks_per_node)
    described: dict[str, Any] = {
        "name": name,
        "nodes": nodes,
        "ranks_per_node": measured.ranks_per_node,
        "device": {
            "name": device["name"],
            "type": measured.device_type,
            "memory_gib": round(device["memory_bytes"] / 2**30, 3),
            "memory_gb_per_s": _rounded(result["memory_bytes_per_s"] / 1e9),
            "peak_tflops": {key: _rounded(value) for key, value in result["peak_tflops"].items()},
            "efficiency": _rounded(result["efficiency"]),
            "group_overhead_us": _rounded(result["host_overheads"]["alone"] * 1e6),
            "wait_overhead_us": None,
            "coding_gb_per_s": {
                key: _rounded(value / 1e9) for key, value in result["coding_bytes_per_s"].items()
            },
        },
    }
    lines = []
    fits: dict[str, FittedLink] = {}
    for key in ("inside_node", "between_nodes"):
        rows = result["collectives"].get(key)
        if rows is None:
            continue
        samples = _samples(measured, key, rows)
        try:
            fits[key] = fit_link(samples)
        except ValueError as problem:
            raise NotFit(f"{key}: {problem}; give --seconds more than was given") from None
        gbit = _rounded(fits[key].bytes_per_s * 8 / 1e9)
        latency = _rounded(fits[key].latency_s * 1e6)
        described[key] = {"up_gbit": gbit, "down_gbit": gbit, "latency_us": latency}
        lines.append(f"{key}: the fit is at most {fits[key].worst_error:.0%} off:")
        lines += [
            f"  {sample.collective} of {sample.whole_bytes:,} bytes: {sample.seconds * 1e3:.3f} ms"
            for sample in samples
        ]
    if "between_nodes" in described and "inside_node" not in described:
        # One rank per node: there is no link inside, and no group uses one.
        described["inside_node"] = dict(described["between_nodes"])
        lines.append("inside_node: not measured (one rank per node), as between_nodes")
    if fits:
        overhead = _wait_overhead(measured, fits)
        described["device"]["wait_overhead_us"] = _rounded(overhead * 1e6)
    return described, lines


def _wait_overhead(measured: Measured, fits: Mapping[str, FittedLink]) -> float:
    """Seconds that a collective of the shard axis takes in training, beside those of the fit."""
    overheads = measured.result["host_overheads"]
    key = "inside_node" if measured.ranks_per_node > 1 else "between_nodes"
    expected = 0.0
    # As many as each group had: one for forward and two for backward.
    collectives = ("all_gather", "all_gather", "reduce_scatter")
    whole = measured.result["group_bytes"]
    for sample in _samples(measured, key, [(name, whole, 0.0) for name in collectives]):
        fit = fits[key]
        expected += sample.steps * fit.latency_s + sample.link_bytes / fit.bytes_per_s
    waited = overheads["together"] - overheads["alone"] - expected
    return max(0.0, waited) / len(collectives)


def _samples(
    measured: Measured, key: str, rows: Sequence[tuple[str, int, float]]
) -> list[CollectiveSample]:
    if key == "inside_node":
        place = GroupPlacement(measured.ranks_per_node, 1, 0)
        groups = 1
    else:
        nodes = len(measured.facts)
        place = GroupPlacement(nodes, nodes, measured.ranks_per_node)
        groups = measured.ranks_per_node
    samples = []
    for collective, whole, seconds in rows:
        outer, inner = collective_steps(collective, place, measured.device_type)
        sent = sent_bytes(collective, whole, place.ranks, measured.device_type)
        samples.append(CollectiveSample(collective, whole, outer + inner, groups * sent, seconds))
    return samples


def write_calibrated(path: str, measured: Measured, name: str, command: str) -> None:
    """The file, in one rename. Raises OSError, and `NotFit` as `cluster_of`."""
    described, lines = cluster_of(measured, name)
    hosts = ", ".join(facts.host for facts in measured.facts)
    head = [
        f"Measured on {time.strftime('%Y-%m-%d')} on {hosts} by",
        f"  {command}",
        "All ranks at once, the slowest counts. peak_tflops: sustained products of matrices.",
        "efficiency: the share of it that forward and backward of a small Llama reach in "
        f"{measured.result['trained_dtype']},",
        "without collectives. group_overhead_us: what sharding adds to both for each group of",
        "parameters, collectives not counted; wait_overhead_us: what each of its collectives adds",
        "to the fit. coding_gb_per_s: fp32 written as sync.wire sends it, and read twice. Links:",
        "the latency and bandwidth that fit all collectives best, each the median of five",
        "measurements.",
        *lines,
    ]
    text = "".join(f"# {line}\n" for line in head)
    text += "defaults: [/schema/cluster@_here_, _self_]\n"
    text += yaml.safe_dump(described, sort_keys=False)
    files.replace(path, text)


def _rounded(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")

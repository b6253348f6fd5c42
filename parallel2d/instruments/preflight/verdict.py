"""Collects facts about nodes (`NodeFacts`), and finds faults in facts and measurements
(`judge_nodes`, `judge_speeds`)."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import platform
import socket
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy
import psutil
import torch

import parallel2d
from parallel2d.base.device import accelerator_type, free_and_total_bytes, properties_of_all
from parallel2d.base.errors import first_five
from parallel2d.base.exchange import sendable

# (rank, next rank of its group, bytes per second of the link between them)
RankLink = tuple[int, int, float]

_GIB = 1 << 30
_CLOCK_S = 1.0
# A rank or link below this share of the usual speed is slow. The share for GPUs is higher, because
# the speed of shared processors and networks varies over time.
_SLOW, _SLOW_GPU = 0.5, 0.9


@sendable
class Finding(NamedTuple):
    """One fault."""

    level: str  # red: training fails or is wrong; yellow: training is slow, or may fail later
    check: str
    text: str  # message with the node and the cause


@sendable
@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node. ``required`` must be equal on all nodes of a job."""

    host: str
    ranks: int
    required: dict[str, str]
    device: str  # model of the first GPU, or of the processor
    device_bytes: int  # memory of the smallest GPU, or a rank's share of the node's memory
    faults: list[Finding]  # faults that do not depend on other nodes

    @classmethod
    def collect(cls, run_dir: str, ranks: int) -> NodeFacts:
        """Collect the facts about this node, which has ``ranks`` ranks. Creates ``run_dir`` if it
        does not exist."""
        host, faults = socket.gethostname(), []
        kind, gpus = accelerator_type(), properties_of_all()
        for index, gpu in enumerate(gpus):
            free, whole = free_and_total_bytes(torch.device(kind, index))
            if free < 0.9 * whole:
                text = f"{host}: GPU {index} ({gpu.name}) has {free / _GIB:.3g} GiB free"
                faults.append(Finding("yellow", "devices", f"{text}: another process uses it"))
        ram = psutil.virtual_memory().total
        with contextlib.suppress(OSError, ValueError):  # a container may have less memory
            ram = min(ram, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        try:
            os.makedirs(run_dir, exist_ok=True)
            tempfile.TemporaryFile(dir=run_dir).close()
        except OSError as error:
            text = f"{host}: {run_dir} is not writable ({error.strerror})"
            faults.append(Finding("red", "run dir", text))
        return cls(
            host=host,
            ranks=ranks,
            required=_versions([gpu.name for gpu in gpus]),
            device=gpus[0].name if gpus else platform.processor() or platform.machine(),
            device_bytes=min((gpu.total_memory for gpu in gpus), default=ram // ranks),
            faults=faults,
        )


def _versions(gpus: Sequence[str]) -> dict[str, str]:
    """Return the versions that must be equal on all nodes, because a difference breaks or silently
    changes a run."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        # Two checkouts of one version differ only in their files.
        "parallel2d code": code_digest(),
        "GPUs": ", ".join(gpus) or "none",
    }
    with contextlib.suppress(OSError):
        found["nvidia driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    if accelerator_type() == "cuda":  # NCCL is the library of CUDA and ROCm
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def code_digest() -> str:
    """Return the first 12 digits of the SHA-256 over names and contents of the package's Python and
    YAML files."""
    root = next(iter(parallel2d.__path__))
    digest = hashlib.sha256()
    # conf and models are folders in a wheel, and links in a checkout, which glob follows.
    for name in sorted(glob.glob("**/*", root_dir=root, recursive=True)):
        if name.endswith((".py", ".yaml")):
            digest.update(f"{name}\0".encode())
            digest.update(Path(root, name).read_bytes())
    return digest.hexdigest()[:12]


def judge_nodes(nodes: Sequence[NodeFacts], clocks: Sequence[float]) -> list[Finding]:
    """Return faults and differences of nodes. ``clocks``: seconds that each node is ahead of the
    first node."""
    found = []
    for key in nodes[0].required:
        hosts = defaultdict(list)
        for node in nodes:
            hosts[node.required.get(key, "none")].append(node.host)
        usual = max(
            hosts, key=lambda value: len(hosts[value])
        )  # if two values are equally frequent, the value of the first node
        for value in hosts.keys() - {usual}:
            text = f"{first_five(hosts[value], ', ')}: {key} {value}, the others {usual}"
            found.append(Finding("red", "versions", text))
    # Clocks are compared with the median. Otherwise a wrong clock of the first node would be
    # reported for all other nodes.
    middle = median(clocks) if len(clocks) > 2 else 0.0
    for node, ahead in zip(nodes, clocks, strict=True):
        found += node.faults
        if abs(ahead - middle) > _CLOCK_S:
            text = f"{node.host}: {ahead - middle:+.3g} s from the others: run NTP or chrony"
            found.append(Finding("yellow", "clocks", text))
    return found


def judge_speeds(
    hosts: Sequence[str], flops: Sequence[float], links: Mapping[str, Sequence[RankLink]]
) -> list[Finding]:
    """Return slow ranks and links.

    Args:
        hosts: by rank.
        flops: FLOP/s by rank.
        links: by axis.
    """
    ranks = {}
    for rank, speed in enumerate(flops):
        ranks[f"rank {rank} on {hosts[rank]}"] = speed / 1e12
    found = _slow("ranks", ranks, _SLOW if accelerator_type() == "cpu" else _SLOW_GPU, "TFLOP/s")
    for axis, measured in links.items():
        inside: dict[str, float] = {}
        between: dict[str, float] = defaultdict(float)  # ranks of a node share its link
        for source, target, speed in measured:
            if hosts[source] == hosts[target]:
                inside[f"rank {source} -> rank {target} on {hosts[source]}"] = speed / 1e6
            else:
                between[f"{hosts[source]} -> {hosts[target]}"] += speed / 1e6
        for speeds in (between, inside):
            found += _slow("links", speeds, _SLOW, f"MB/s on {axis}")
    return found


def _slow(check: str, speeds: Mapping[str, float], share: float, unit: str) -> list[Finding]:
    """Return findings for speeds below ``share`` of the usual speed. The usual speed is one that a
    third of all ranks or links reach: in a ring of three nodes, one slow node slows two of the
    three links."""
    found = []
    fastest = sorted(speeds.values(), reverse=True)
    for where, speed in speeds.items():
        usual = fastest[(len(speeds) - 1) // 3]
        if speed < share * usual:
            text = f"{where}: {speed:.3g} {unit}, {usual:.3g} is usual"
            found.append(Finding("yellow", check, text))
    return found

"""What nodes say, `NodeFacts`, and what is wrong: `judge_nodes`, `judge_speeds`."""

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

# Rank, the next rank of its group, bytes per second from the one to the other.
RankLink = tuple[int, int, float]

_GIB = 1 << 30
_CLOCK_S = 1.0
# Of what is usual. Shared processors and networks differ from moment to moment, GPUs do not.
_SLOW, _SLOW_GPU = 0.5, 0.9


@sendable
class Finding(NamedTuple):
    """One fault that a check found."""

    level: str  # red: training would fail or train wrongly; yellow: be slow, or may fail later
    check: str
    text: str  # names the node and the cause


@sendable
@dataclass(frozen=True)
class NodeFacts:
    """One node. ``required`` must be equal on all nodes of a job."""

    host: str
    ranks: int
    required: dict[str, str]
    device: str  # the model of its first GPU, or of the processor
    device_bytes: int  # memory of the smallest GPU, or a rank's share of the node's
    faults: list[Finding]  # whatever other nodes have

    @classmethod
    def collect(cls, run_dir: str, ranks: int) -> NodeFacts:
        """``ranks``: of this node. Makes ``run_dir`` if it is missing."""
        host, faults = socket.gethostname(), []
        kind, gpus = accelerator_type(), properties_of_all()
        for index, gpu in enumerate(gpus):
            free, whole = free_and_total_bytes(torch.device(kind, index))
            if free < 0.9 * whole:
                text = f"{host}: GPU {index} ({gpu.name}) has {free / _GIB:.3g} GiB free"
                faults.append(Finding("yellow", "devices", f"{text}: somebody uses it"))
        ram = psutil.virtual_memory().total
        with contextlib.suppress(OSError, ValueError):  # a container may have less
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
    """Of everything whose difference between nodes breaks or silently changes a run."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        # Two checkouts of one version differ in their files alone.
        "parallel2d code": code_digest(),
        "GPUs": ", ".join(gpus) or "none",
    }
    with contextlib.suppress(OSError):
        found["nvidia driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    if accelerator_type() == "cuda":  # NCCL is the library of CUDA and ROCm
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def code_digest() -> str:
    """First 12 digits of SHA-256 over names and contents of the package's Python and YAML files."""
    root = next(iter(parallel2d.__path__))
    digest = hashlib.sha256()
    # conf and models are links in a checkout, which glob follows, and folders in a wheel.
    for name in sorted(glob.glob("**/*", root_dir=root, recursive=True)):
        if name.endswith((".py", ".yaml")):
            digest.update(f"{name}\0".encode())
            digest.update(Path(root, name).read_bytes())
    return digest.hexdigest()[:12]


def judge_nodes(nodes: Sequence[NodeFacts], clocks: Sequence[float]) -> list[Finding]:
    """What is wrong, or differs. ``clocks``: seconds that each node is ahead of the first."""
    found = []
    for key in nodes[0].required:
        hosts = defaultdict(list)
        for node in nodes:
            hosts[node.required.get(key, "none")].append(node.host)
        usual = max(hosts, key=lambda value: len(hosts[value]))  # the first node's among equals
        for value in hosts.keys() - {usual}:
            text = f"{first_five(hosts[value], ', ')}: {key} {value}, the others {usual}"
            found.append(Finding("red", "versions", text))
    # Against the median, a wrong clock on the first node is found there alone.
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
    """Slow ranks and links. ``hosts``, ``flops`` (per second): by rank; ``links``: by axis."""
    ranks = {f"rank {rank} on {hosts[rank]}": speed / 1e12 for rank, speed in enumerate(flops)}
    found = _slow("ranks", ranks, _SLOW if accelerator_type() == "cpu" else _SLOW_GPU, "TFLOP/s")
    for axis, measured in links.items():
        inside: dict[str, float] = {}
        between: dict[str, float] = defaultdict(float)  # ranks of a node share its way to others
        for source, target, speed in measured:
            if hosts[source] == hosts[target]:
                inside[f"rank {source} -> rank {target} on {hosts[source]}"] = speed / 1e6
            else:
                between[f"{hosts[source]} -> {hosts[target]}"] += speed / 1e6
        for speeds in (between, inside):
            found += _slow("links", speeds, _SLOW, f"MB/s on {axis}")
    return found


def _slow(check: str, speeds: Mapping[str, float], share: float, unit: str) -> list[Finding]:
    """Those below ``share`` of the usual speed, which is what a third of them reach: one slow node
    of three spoils two of the three links of their ring."""
    found = []
    fastest = sorted(speeds.values(), reverse=True)
    for where, speed in speeds.items():
        usual = fastest[(len(speeds) - 1) // 3]
        if speed < share * usual:
            text = f"{where}: {speed:.3g} {unit}, {usual:.3g} is usual"
            found.append(Finding("yellow", check, text))
    return found

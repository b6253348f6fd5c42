"""Facts about one node that it collects without the other nodes: `Facts.collect`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import shutil
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from parallel2d.launch.network_interface import GLOO, NCCL, Interface, is_loopback
from parallel2d.store.address import resolve

_WRITE_TEST_BYTES = 64 << 20


@dataclass
class Facts:
    """One node. Sizes in bytes, rates in bytes per second. ``versions`` must be equal on all nodes
    of a job."""

    host: str
    interface: str
    address: str
    interface_reason: str
    # those of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME that are set
    interface_variables: dict[str, str]
    mtu: int | None
    link_speed_bits_per_s: int | None  # as the driver reports it; virtual interfaces report none
    # what the node's own host name resolves to on it; empty: it does not
    own_name_addresses: list[str]
    versions: dict[str, str]
    cpus: int
    cpu_name: str
    ram_bytes: int
    ram_available_bytes: int
    swap_used_bytes: int
    shm_bytes: int | None
    open_files_limit: int
    locked_memory_limit: int  # -1: unlimited
    has_infiniband: bool
    gpus: list[dict[str, Any]]  # name, memory_bytes, free_bytes
    run_dir: dict[str, Any] = field(default_factory=dict)  # see `probe_run_dir`

    @classmethod
    def collect(cls, interface: Interface, reason: str) -> Facts:
        memory = _memory()
        host = socket.gethostname()
        link = psutil.net_if_stats().get(interface.name)
        return cls(
            host=host,
            interface=interface.name,
            address=interface.address,
            interface_reason=reason,
            interface_variables={
                name: os.environ[name] for name in (GLOO, NCCL) if os.environ.get(name)
            },
            mtu=link.mtu if link else None,
            # 0 where the driver does not say
            link_speed_bits_per_s=link.speed * 10**6 if link and link.speed else None,
            own_name_addresses=_addresses_of(host),
            versions=versions(),
            cpus=len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1,
            cpu_name=_cpu_name(),
            ram_bytes=memory["total"],
            ram_available_bytes=memory["available"],
            swap_used_bytes=memory["swap_used"],
            shm_bytes=_size_of("/dev/shm"),
            open_files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            locked_memory_limit=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
            gpus=_gpus(),
        )


def versions() -> dict[str, str]:
    """Of everything whose difference between nodes breaks or silently changes a run.
    ``parallel2d code`` is a digest of the package's files: two checkouts of one version differ in
    nothing else."""
    import numpy
    import torch

    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
    }
    found["parallel2d code"] = code_digest()
    found["cuda"] = torch.version.cuda or "none"
    found["nvidia driver"] = _driver()
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def code_digest() -> str:
    """First 12 hexadecimal digits of SHA-256 over names and contents of the package's Python and
    YAML files, wherever they are installed."""
    import parallel2d

    root = str(next(iter(parallel2d.__path__)))
    paths: list[Path] = []
    # conf and models are links in a checkout, folders where a wheel was installed.
    for folder, _, names in os.walk(root, followlinks=True):
        paths += [Path(folder, name) for name in names if name.endswith((".py", ".yaml"))]
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def probe_run_dir(path: str) -> dict[str, Any]:
    """``writable``, ``error``, ``free_bytes``, ``write_bytes_per_s`` (64 MiB, flushed to the disk)
    of the folder, made if missing."""
    free, rate, problem = 0, 0.0, None
    scratch = os.path.join(path, f".preflight-{uuid.uuid4().hex}")
    try:
        os.makedirs(path, exist_ok=True)
        free = shutil.disk_usage(path).free
        block = os.urandom(1 << 20)
        size = min(_WRITE_TEST_BYTES, free // 4) >> 20
        began = time.perf_counter()
        with open(scratch, "wb") as file:
            for _ in range(size):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = (size << 20) / (time.perf_counter() - began)
    except OSError as error:
        problem = error.strerror
    finally:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
    return {
        "writable": problem is None,
        "error": problem,
        "free_bytes": free,
        "write_bytes_per_s": rate,
    }


def _addresses_of(host: str) -> list[str]:
    with contextlib.suppress(ValueError):
        return [address for _, address, _ in resolve(host)]
    return []


def resolves_to_loopback(facts: Facts) -> bool:
    """Whether gloo, when no interface is named, would meet its peers on an address that only this
    machine can reach."""
    return not facts.own_name_addresses or is_loopback(facts.own_name_addresses[0])


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> dict[str, int]:
    """Bytes; a container's limit counts where it is below what the machine has."""
    memory = psutil.virtual_memory()
    limit = _number("/sys/fs/cgroup/memory.max") or memory.total
    return {
        "total": min(memory.total, limit),
        "available": min(memory.available, limit),
        "swap_used": psutil.swap_memory().used,
    }


def _size_of(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _driver() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/driver/nvidia/version").read_text().splitlines():
            if line.startswith("NVRM version:"):
                numbers = [word for word in line.split() if word[0].isdigit() and "." in word]
                return numbers[0] if numbers else line
    return "none"


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {"name": torch.cuda.get_device_name(index), "memory_bytes": total, "free_bytes": free}
        )
    return found


def gpu_copy_bandwidth() -> float | None:
    """Bytes per second of copies from GPU 0 to GPU 1 (256 MiB, the fastest of 5); None with fewer
    than two GPUs."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return None
    source = torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    fastest = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        fastest = min(fastest, time.perf_counter() - began)
    return source.numel() / fastest

"""The ground a rank stands on: store, process group, device, seeds. A `Place` flows in, a `Runtime` flows out."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

from parallel2d.config import ConfigError
from parallel2d.launch import Place
from parallel2d.mesh import Topology


def connect(place: Place) -> Any:
    """The rendezvous store of this job. Raises `ConfigError` when the address is taken or does not answer."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=300))))
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
        reason = "is in use by another process" if "EADDRINUSE" in str(error) else f"does not answer ({_short(error)})"
        raise ConfigError(f"MASTER_ADDR:MASTER_PORT={address} {reason}; choose another --master-port") from None
    return store


@dataclass(frozen=True)
class Runtime:
    """What a rank knows about itself and the others."""

    place: Place
    device: torch.device
    topology: Topology

    @property
    def is_first(self) -> bool:
        return self.place.rank == 0


@contextlib.contextmanager
def process_group(place: Place, store: Any, *, timeout_s: float, host_id: str | None) -> Iterator[Runtime]:
    """Joins the default process group; leaves it, and frees what it held, at the end.

    Gloo on CPU; with GPUs NCCL for their tensors and gloo for the rest. Raises `ConfigError` when this node has fewer GPUs
    than ranks.
    """
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        if place.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {place.rank} on {socket.gethostname()}: LOCAL_RANK={place.local_rank}, but this node has "
                f"{torch.cuda.device_count()} GPUs and two ranks cannot share one; start fewer processes per node"
            )
        device, backend = torch.device("cuda", place.local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield Runtime(place, device, Topology.gather(host_id))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seeds what draws numbers while training (dropout); weights and data order have generators of their own."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def check_shared_run_dir(run_dir: str) -> None:
    """Raises `ConfigError`, on every rank, naming the nodes that do not see rank 0's run directory. Collective."""
    token = [uuid.uuid4().hex if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(token)
    path = os.path.join(run_dir, f".shared-{token[0]}")
    if dist.get_rank() == 0:
        with open(path, "w"):
            pass
    dist.barrier()
    _refuse_where(
        not os.path.exists(path),
        f"run directory {run_dir} is not the one that rank 0 sees: it must be shared",
    )
    if dist.get_rank() == 0:
        os.unlink(path)


def check_same_data(fingerprint: str) -> None:
    """Raises `ConfigError`, on every rank, naming the nodes whose data differ from rank 0's. Collective."""
    first = [fingerprint]
    dist.broadcast_object_list(first)
    _refuse_where(fingerprint != first[0], "data differ from those of rank 0 (other files, or another Python's library)")


def _refuse_where(wrong: bool, what: str) -> None:
    answers: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, socket.gethostname() if wrong else None)
    hosts = sorted({host for host in answers if host is not None})
    if hosts:
        raise ConfigError(f"on {', '.join(hosts)}: {what}")


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__

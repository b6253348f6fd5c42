"""The process group of a rank, its store, its device and its seeds. Start at `setup`.

`process_group` serves the train command; `setup`, `teardown`, `limit_waiting`, `barrier` and
`reduce` are for one's own loop and stand on the same functions.

[Note: two timeouts] The first step of a run compiles, connects the ranks of every group and reads
from a cold file system; ranks may wait for each other far longer than in any later step. So groups
start with the longer timeout, and after the first step `limit_waiting` lowers it everywhere, so
that a hang is then noticed early.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import logging
import os
import random
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel2d.config import LaunchConfig
from parallel2d.errors import ConfigError
from parallel2d.exchange import all_gather, broadcast
from parallel2d.rank_environment import PREFIX, STORE, RankIdentity, find_rank
from parallel2d.store.address import join_endpoint
from parallel2d.store.client import StoreClient
from parallel2d.store.secret import VARIABLE, find_secret
from parallel2d.store.server import StoreServer, say_who_came
from parallel2d.topology import Topology

log = logging.getLogger(__name__)


def connect(identity: RankIdentity, settings: LaunchConfig | None = None) -> Any:
    """The store of this job's ranks. Under our own launchers it is the one that they have met at;
    under srun rank 0 opens it at MASTER_ADDR; torchrun brings its own.

    ``settings``: for srun, where the secret is. Raises `ConfigError` when the address is taken or
    does not answer, and under srun without a secret; under our own launchers, which make a new
    store with every start, RuntimeError.
    """
    if identity.launcher in ("self", "nodes"):
        try:
            client = StoreClient(os.environ[STORE], os.environ[VARIABLE])
        except ConfigError as error:
            raise RuntimeError(str(error)) from None
        return dist.PrefixStore(os.environ[PREFIX], client)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if identity.launcher == "srun":
        secret = (
            find_secret(settings.secret_file, settings.insecure) if settings else find_secret(None)
        )
        if identity.rank == 0:
            _servers.append(StoreServer.at(host, port, secret, say_who_came))
        return StoreClient(join_endpoint(host, port), secret)
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=300))))
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
        reason = (
            "is in use by another process"
            if "EADDRINUSE" in str(error)
            else f"does not answer ({_short(error)})"
        )
        raise ConfigError(
            f"MASTER_ADDR:MASTER_PORT={host}:{port} {reason}; choose another --master-port"
        ) from None
    return store


@dataclass(frozen=True)
class Runtime:
    """What a rank knows about itself and the others."""

    identity: RankIdentity
    device: torch.device
    topology: Topology

    @property
    def is_first(self) -> bool:
        return self.identity.rank == 0


# seconds that ranks may wait for each other until `limit_waiting`, unless told otherwise
FIRST_STEP_TIMEOUT = 1800.0
_setups = 0  # of this process; every setup meets under its own keys of the store
_stores: dict[tuple[str, ...], Any] = {}
_servers: list[StoreServer] = []  # under srun, on rank 0, until this process ends
_undo: dict[Callable[[], object], None] = {}  # in the order in which they were given
_hosts: tuple[str, ...] = ()  # by rank, while a process group of ours exists


def setup(
    timeout_s: float = 600.0, first_timeout_s: float | None = None, host_id: str | None = None
) -> Runtime:
    """Joins the ranks that torchrun or srun started into the default process group; without either,
    a group of this process alone.

    Args:
        timeout_s: seconds that a collective may wait for a late rank once
            ``limit_waiting(timeout_s)`` was called.
        first_timeout_s: the same until then; default: the larger of 1800 and ``timeout_s``. See
            [Note: two timeouts].
        host_id: overrides the found host identity, by which `parallel2d.build_mesh` tells which
            ranks share a node.

    Gloo on CPU; with GPUs NCCL for their tensors and gloo for the rest, the GPU of ``LOCAL_RANK``
    chosen. May be called again after `teardown`. The connection to the store is kept between both,
    because its address may not be free again. Collective. Raises `ConfigError` when a process group
    exists, for incomplete environment variables, more ranks than GPUs, or a first timeout below
    ``timeout_s``.
    """
    global _setups
    if dist.is_initialized():
        raise ConfigError(
            "setup: a default process group exists already; leave it to setup, or call teardown() "
            "before a second one"
        )
    if first_timeout_s is not None and first_timeout_s < timeout_s:
        raise ConfigError(
            f"first_timeout_s={first_timeout_s} must be at least timeout_s={timeout_s}"
        )
    identity = find_rank()
    if identity is None:
        identity = RankIdentity(
            rank=0, world_size=1, local_rank=0, node=0, nodes=1, launcher="none"
        )
        store: Any = dist.HashStore()
    else:
        key = tuple(
            os.environ.get(name, "")
            for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        )
        if key not in _stores:
            _stores.clear()
            _stores[key] = connect(identity)
        store = dist.PrefixStore(f"parallel2d/setup/{_setups}", _stores[key])
    _setups += 1
    return _join(identity, store, timeout_s, first_timeout_s, host_id)


def teardown(wait_s: float = 30.0) -> None:
    """Leaves the process group and undoes what this package has put into the process, so that
    `setup` can be called again.

    Waits up to ``wait_s`` seconds for the other ranks to get here, so that none of them loses its
    connection in the middle of something. Then all process groups are destroyed; torch's caches
    that hold meshes, wrapped collective functions and signal handlers of ours are reset; memory is
    returned. Drop your own references to model, optimizer and mesh before: what you hold stays.
    Does nothing without a process group.
    """
    while _undo:
        _undo.popitem()[0]()
    _leave(wait_s)


def on_teardown(undo: Callable[[], object]) -> None:
    """Has `teardown` call ``undo`` once, however often it was given: for whatever is put into the
    process (wrapped functions, signal handlers)."""
    _undo[undo] = None


@contextlib.contextmanager
def process_group(
    identity: RankIdentity,
    store: Any,
    *,
    timeout_s: float,
    host_id: str | None,
    first_timeout_s: float | None = None,
) -> Iterator[Runtime]:
    """As `setup`, on a store that exists; at the end all ranks wait for each other and leave. After
    an exception nobody waits."""
    runtime = _join(identity, store, timeout_s, first_timeout_s, host_id)
    wait_s = 0.0
    try:
        yield runtime
        wait_s = timeout_s
    finally:
        _leave(wait_s)


def _join(
    identity: RankIdentity,
    store: Any,
    timeout_s: float,
    first_timeout_s: float | None,
    host_id: str | None,
) -> Runtime:
    global _hosts
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        if identity.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {identity.rank} on {socket.gethostname()}: "
                f"LOCAL_RANK={identity.local_rank}, but "
                "this node has "
                f"{torch.cuda.device_count()} GPUs and two ranks cannot share one; start fewer "
                "processes per node"
            )
        device, backend = torch.device("cuda", identity.local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    seconds = max(FIRST_STEP_TIMEOUT, timeout_s) if first_timeout_s is None else first_timeout_s
    dist.init_process_group(
        backend,
        store=store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        topology = Topology.gather(host_id)
        _hosts = tuple(host.split("/")[0] for host in topology.hosts)
        return Runtime(identity, device, topology)
    except BaseException:
        _leave(0.0)
        raise


def _leave(wait_s: float) -> None:
    global _hosts
    if dist.is_initialized():
        _await_leaving(wait_s)
        dist.destroy_process_group()
    _hosts = ()
    forget_meshes()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _await_leaving(wait_s: float) -> None:
    """All ranks say that they leave and wait for the others; rank 0, which may host the store,
    waits until they have heard it."""
    store, rank, ranks = (
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        dist.get_world_size(),
    )
    if ranks == 1 or wait_s <= 0:
        return
    try:
        for word in ("leaving", "left"):
            if store.add(f"parallel2d/{word}", 1) == ranks:
                store.set(f"parallel2d/all-{word}", "1")
            if word == "leaving" or rank == 0:
                store.wait([f"parallel2d/all-{word}"], timedelta(seconds=wait_s))
    # somebody is late or gone, or the store is: whoever is here leaves
    except RuntimeError as error:
        log.warning("rank %d did not wait for all others to leave: %s", rank, _short(error))


def forget_meshes() -> None:
    """Empties torch's caches of decisions about `DTensor`s, whose keys hold meshes of groups that
    exist no more."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def limit_waiting(seconds: float) -> None:
    """From now on a collective on any process group that exists waits at most ``seconds`` for a
    late rank.

    Call it after the first step; see [Note: two timeouts]. Groups made later have torch's own
    default again, those of a mesh from `parallel2d.build_mesh` the one of the world.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def barrier(name: str, timeout_s: float | None = None) -> None:
    """Returns when every rank has called it with this ``name``. With a GPU, what was issued to it
    is done by then.

    Runs over the store, on any backend. Raises TimeoutError on every rank that waited longer than
    ``timeout_s`` (default: the world's timeout), naming the late ranks and, after `setup`, their
    hosts. Without a process group it returns at once.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    store, rank, ranks = (
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        dist.get_world_size(),
    )
    seconds = world_timeout() if timeout_s is None else timeout_s
    number = store.add(f"parallel2d/barrier/{name}/calls/{rank}", 1)
    key = f"parallel2d/barrier/{name}/{number}"
    store.set(f"{key}/{rank}", "1")
    if store.add(f"{key}/arrived", 1) == ranks:
        store.set(f"{key}/open", "1")
    try:
        store.wait([f"{key}/open"], timedelta(seconds=seconds))
    except RuntimeError as error:
        late = [other for other in range(ranks) if not store.check([f"{key}/{other}"])]
        if late:
            names = ", ".join(
                f"rank {other}" + (f" on {_hosts[other]}" if _hosts else "") for other in late
            )
            raise TimeoutError(
                f"barrier {name}: rank {rank} waited {seconds:g} s for {names}"
            ) from None
        if not store.check([f"{key}/open"]):
            raise error
    if rank == 0 and number > 1:  # everybody is here, so everybody has left the one before
        before = f"parallel2d/barrier/{name}/{number - 1}"
        for last in (*range(ranks), "arrived", "open"):
            store.delete_key(f"{before}/{last}")


def world_timeout() -> float:
    """Seconds that a collective of the world may wait for a late rank."""
    world = dist.distributed_c10d._get_default_group()
    return world._get_backend(world._device_types[0]).options._timeout.total_seconds()


_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def reduce(
    value: Any, group: dist.ProcessGroup | None = None, op: str | dist.ReduceOp | Any = "mean"
) -> Any:
    """``value`` reduced over the ranks of ``group`` (default: all), a new tensor equal on each of
    them. Collective.

    Args:
        op: ``mean`` (or ``avg``), ``sum``, ``max``, ``min``, ``product``, or one of
            ``dist.ReduceOp``'s.

    ``value`` keeps its dtype, device and contents, with two exceptions: a mean of integers or
    booleans is fp64, because a rounded one is hardly ever meant, and a sum of booleans is int64.
    bf16 and fp16 are added in fp32. What is no tensor is returned as it is; without a process group
    a tensor is returned as a copy. Raises `ConfigError` for another ``op`` and for a `DTensor`.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        raise ConfigError(
            "reduce: a DTensor is one tensor over all its ranks; give its .to_local() or take "
            ".full_tensor()"
        )
    word = op.lower() if isinstance(op, str) else op
    mean = word in ("mean", "avg", dist.ReduceOp.AVG)
    if isinstance(word, str) and not mean and word not in _OPERATIONS:
        near = difflib.get_close_matches(word, ["mean", "avg", *_OPERATIONS], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"reduce: op={op} is not one of mean, avg, {', '.join(_OPERATIONS)}{hint}"
        )
    operation = dist.ReduceOp.SUM if mean else _OPERATIONS[word] if isinstance(word, str) else word
    result, kept = value.detach().clone(), value.dtype
    if not value.is_floating_point() and not value.is_complex():
        result = result.to(torch.float64 if mean else torch.int64 if kept == torch.bool else kept)
        if mean or (kept == torch.bool and operation == dist.ReduceOp.SUM):
            kept = result.dtype
    elif kept in (torch.bfloat16, torch.float16):
        result = result.float()
    if dist.is_initialized():
        result = result.contiguous()
        dist.all_reduce(result, operation, group)
        if mean:
            result /= dist.get_world_size(group)
    return result.to(kept)


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seeds what draws numbers while training (dropout); weights and data order have generators of
    their own."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def check_shared_run_dir(run_dir: str) -> None:
    """Raises `ConfigError`, on every rank, naming the nodes that do not see rank 0's run directory.
    Collective."""
    path = os.path.join(run_dir, f".shared-{broadcast(uuid.uuid4().hex)}")
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
    """Raises `ConfigError`, on every rank, naming the nodes whose data differ from rank 0's.
    Collective."""
    _refuse_where(
        fingerprint != broadcast(fingerprint),
        "data differ from those of rank 0 (other files, or another Python's library)",
    )


def _refuse_where(wrong: bool, what: str) -> None:
    answers = all_gather(socket.gethostname() if wrong else None)
    hosts = sorted({host for host in answers if host is not None})
    if hosts:
        raise ConfigError(f"on {', '.join(hosts)}: {what}")


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__

"""The process group of a rank, its store, its device and its seeds. Start at `setup`.

The train command uses `process_group`. `setup`, `teardown`, `limit_waiting` and `barrier` are for
custom training loops, and share the code of `process_group`.

[Note: two timeouts] In the first step of a run, ranks compile, connect the ranks of every group and
read files that are not cached. The waits of ranks for each other may be far longer than in later
steps. Therefore process groups start with a longer timeout. After the first step `limit_waiting`
lowers the timeout of all groups, so that a hang is noticed early.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import random
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

from parallel2d.base import device as devices
from parallel2d.base import exchange
from parallel2d.base.config import LaunchConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.launcher_environment import (
    AGENT,
    INCARNATION,
    PREFIX,
    STORE,
    RankIdentity,
    find_rank,
)
from parallel2d.base.open_files import prepare_rank
from parallel2d.base.replicas import (
    Quorum,
    current,
    first_rank,
    forget,
    init_world,
    is_present,
    present_ranks,
)
from parallel2d.base.replicas.states import Phase
from parallel2d.base.store.address import join_endpoint
from parallel2d.base.store.client import StoreClient
from parallel2d.base.store.secret import VARIABLE, find_secret
from parallel2d.base.store.server import StoreServer, log_dropped_connection
from parallel2d.base.topology import Topology

log = logging.getLogger(__name__)


def connect(identity: RankIdentity, settings: LaunchConfig | None = None) -> Any:
    """Connect to the store of this job's ranks.

    The launchers of this package provide the rendezvous store, and torchrun provides torch's store.
    Under srun, rank 0 opens a store at MASTER_ADDR.

    Args:
        settings: for srun, the location of the secret.

    Raises:
        ConfigError: if the address is taken or does not answer, or if the secret is missing under
            srun.
        RuntimeError: instead of `ConfigError` if a launcher of this package chose the address.
    """
    if identity.launcher in ("self", "nodes"):
        try:
            client = StoreClient(os.environ[STORE], os.environ[VARIABLE])
        except ConfigError as error:
            # The launcher chose the address, so the error is not in the configuration.
            raise RuntimeError(str(error)) from None
        return dist.PrefixStore(os.environ[PREFIX], client)
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if identity.launcher == "torchrun":
        return _store_of_torchrun(host, port)
    settings = settings or LaunchConfig()
    secret = find_secret(settings.secret_file, settings.insecure)
    if identity.rank == 0:
        _servers.append(StoreServer.at(host, port, secret, log_dropped_connection))
    return StoreClient(join_endpoint(host, port), secret)


def _store_of_torchrun(host: str, port: int) -> Any:
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=300))))
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            reason = "is in use by another process"
        else:
            reason = f"does not answer ({_short(error)})"
        raise ConfigError(
            f"MASTER_ADDR:MASTER_PORT={host}:{port} {reason}; choose another --master-port"
        ) from None
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return store  # without a prefix, because the restart counts of nodes may differ
    # When torchrun restarts ranks, the store still has the addresses of the ended ranks. A prefix
    # per restart separates the keys.
    return dist.PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@dataclass(frozen=True)
class Runtime:
    """This rank in its job: its number, its device, and the hosts of all ranks."""

    identity: RankIdentity
    device: torch.device
    topology: Topology

    @property
    def is_first(self) -> bool:
        return self.identity.rank == first_rank()


_setups = 0  # number of `setup` calls of this process; each call uses separate keys in the store
_stores: dict[tuple[str, ...], Any] = {}  # address -> the latest store of `setup`
_servers: list[StoreServer] = []  # under srun, on rank 0, until this process ends
# its keys are the functions, in the order of the `on_teardown` calls
_undo: dict[Callable[[], object], None] = {}
_patient: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_hosts: tuple[str, ...] = ()  # by rank, while a process group of this package exists


def setup(
    timeout_s: float = 600.0,
    first_timeout_s: float | None = None,
    host_id: str | None = None,
    *,
    replicas: bool = False,
) -> Runtime:
    """Initialize the default process group. Its ranks are the processes that torchrun, srun or
    ``python -m parallel2d.launch run`` started. If no launcher started this process, it is the only
    rank. Collective.

    Without GPUs the backend is gloo. With GPUs the backend is NCCL for GPU tensors and gloo for CPU
    tensors, and the GPU of ``LOCAL_RANK`` becomes the current device. `setup` may be called again
    after `teardown`. `teardown` does not close the store, because another process could take its
    address.

    Args:
        timeout_s: seconds that a collective may wait for a late rank after
            ``limit_waiting(timeout_s)``.
        first_timeout_s: seconds that a collective may wait before the call of ``limit_waiting``;
            default: the larger of 1800 and ``timeout_s``. See [Note: two timeouts].
        host_id: overrides the detected host identity; `parallel2d.build_mesh` derives the ranks of
            each node from it.
        replicas: True if training continues after replicas have failed; see `parallel2d.Replicas`.
            ``launch run`` restarts failed replicas on CPU.

    Raises:
        ConfigError: if a process group exists, if environment variables are missing, if a node has
            more ranks than GPUs, or if ``first_timeout_s`` is below ``timeout_s``.
    """
    global _setups
    if dist.is_initialized():
        raise ConfigError(
            "setup: a default process group exists already; leave it to setup, or call teardown() "
            "before the next setup()"
        )
    if first_timeout_s is not None and first_timeout_s < timeout_s:
        raise ConfigError(
            f"first_timeout_s={first_timeout_s} must be at least timeout_s={timeout_s}"
        )
    identity = find_rank()
    store: Any = dist.HashStore()
    if identity is None:
        identity = RankIdentity(
            rank=0, world_size=1, local_rank=0, node=0, nodes=1, launcher="none"
        )
    else:
        # After a restart of the job, a new store may listen at the same address, so the restart
        # count is part of the key.
        names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        key = tuple(os.environ.get(name, "") for name in names)
        if key not in _stores:
            _stores.clear()
            _stores[key] = connect(identity)
        store = dist.PrefixStore(f"parallel2d/setup/{_setups}", _stores[key])
    together = None
    starts_again = AGENT in os.environ and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
    # With accelerators all ranks restart after a failure.
    if replicas and starts_again and devices.accelerator_type() == "cpu":
        if _setups:
            raise ConfigError("setup(replicas=True) can be called only once in a process")
        # Launchers read the failed replicas from this store.
        together, store = identity.world_size, _stores[key]
    _setups += 1
    return _join(identity, store, timeout_s, first_timeout_s, host_id, together)


def teardown(wait_s: float = 30.0) -> None:
    """Destroy all process groups and remove the hooks and handlers of this package from the
    process, so that `setup` can be called again.

    Waits up to ``wait_s`` seconds for the other ranks to call `teardown`, so that no rank loses its
    connection during a collective. Then this function destroys all process groups, clears torch's
    caches of meshes, and removes the signal handlers and hooks of this package. Delete your
    references to model, optimizer and mesh first, because referenced objects are not freed.
    """
    # In reverse order of registration. Each function is removed before it is called, so that it is
    # not called again after an error.
    while _undo:
        undo, _ = _undo.popitem()
        undo()
    _leave(wait_s)


def on_teardown(undo: Callable[[], object]) -> None:
    """Register ``undo`` for `teardown`, which removes hooks and signal handlers from the process. A
    repeated registration has no effect."""
    _undo[undo] = None


@contextlib.contextmanager
def process_group(
    identity: RankIdentity,
    store: Any,
    *,
    timeout_s: float,
    host_id: str | None,
    first_timeout_s: float | None,
    together: int | None = None,
    replica_backend: str = "gloo",
) -> Iterator[Runtime]:
    """Context with a process group that uses ``store``; see `setup`. At the end the ranks wait for
    each other, except after an exception, and the group is destroyed.

    Args:
        together: number of ranks that start together if replicas may fail; otherwise None.
        replica_backend: backend of collectives across replicas, for tensors on a device.
    """
    runtime = _join(identity, store, timeout_s, first_timeout_s, host_id, together, replica_backend)
    # After an exception the other ranks may never reach the end.
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
    together: int | None = None,
    replica_backend: str = "gloo",
) -> Runtime:
    """Create the default process group and gather the hosts of its ranks. Collective."""
    global _hosts
    device = _choose_device(identity)
    prepare_rank(identity.world_size)
    # With this variable, gloo connects two ranks at their first message. Otherwise each group would
    # connect every rank with all others. For N ranks, this takes N descriptors per rank and group,
    # and the ranks read 8 N^3 bytes of addresses from the store.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    waits = LaunchConfig(timeout=timeout_s, first_step_timeout=first_timeout_s)
    rank, size = identity.rank, identity.world_size
    timeout = timedelta(seconds=waits.longest_wait)
    bound = devices.bound_device(device)
    if together is not None:
        incarnation = int(os.environ.get(INCARNATION, "0"))
        quorum = Quorum(store, rank, together, incarnation, timeout, device, replica_backend)
        init_world(quorum, size, device.type)
    else:
        backend = devices.backend_for(device.type)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=bound,
        )
    try:
        topology = Topology.gather(host_id).completed(size, identity.nodes)
        _refuse_shared_devices(device, topology)
        _hosts = tuple(host.split("/")[0] for host in topology.hosts)
        return Runtime(identity, device, topology)
    except BaseException:
        _leave(0.0)
        raise


def _choose_device(identity: RankIdentity) -> torch.device:
    """Return the device of this rank. The errors of `device.choose_device` also name the rank and
    the host."""
    try:
        return devices.choose_device(identity.local_rank)
    except ConfigError as error:
        host = socket.gethostname()
        raise ConfigError(f"rank {identity.rank} on {host}: {error}") from None


def _refuse_shared_devices(device: torch.device, topology: Topology) -> None:
    """Raise `ConfigError` for two ranks of a host on one accelerator. Collective."""
    if device.type == "cpu":
        return
    first: dict[tuple[str, str], int] = {}
    for rank, identity in enumerate(exchange.all_gather(devices.identity_of(device))):
        place = topology.hosts[rank], identity
        if identity and first.setdefault(place, rank) != rank:
            host = place[0].split("/")[0]
            raise ConfigError(
                f"ranks {first[place]} and {rank} on {host} use one device ({identity}): give each "
                "process a device of its own, or start fewer processes per node"
            )


def _leave(wait_s: float) -> None:
    """Destroy all process groups and free the resources that torch holds for them; see
    `teardown`."""
    global _hosts
    if dist.is_initialized():
        replicas = current()
        if replicas is not None and replicas.on:
            if wait_s > 0 and replicas.phase is not Phase.ENDING:
                replicas.end()
        elif wait_s > 0 and present_ranks() > 1:
            _await_leaving(timedelta(seconds=wait_s))
        dist.destroy_process_group()
    forget()
    _hosts = ()
    release_groups()
    devices.empty_cache(devices.accelerator_type())


def _await_leaving(timeout: timedelta) -> None:
    """Wait until all ranks have called this function. Rank 0 returns last, because it may serve the
    store."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    try:
        _count_in(store, "parallel2d/leaving")
        store.wait(["parallel2d/leaving/all"], timeout)
        # The count is the last message of this rank to the store.
        _count_in(store, "parallel2d/left")
        if rank == 0:
            store.wait(["parallel2d/left/all"], timeout)
    except RuntimeError as error:
        # Another rank is late or has failed, or the store has ended. Leave without waiting longer.
        log.warning("rank %d did not wait for all others to leave: %s", rank, _short(error))


def _count_in(store: Any, key: str) -> None:
    """Count this rank at ``key``; the last rank sets the key that the other ranks wait for."""
    if store.add(f"{key}/arrived", 1) == present_ranks():
        store.set(f"{key}/all", "1")


def release_groups() -> None:
    """Free the resources that torch holds for destroyed process groups: threads and, with GPUs,
    memory. Two kinds of references keep them alive: reference cycles between sharded models and
    their mesh, and torch's caches of `DTensor` sharding decisions, whose keys reference meshes."""
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()


def patient_group(timeout: timedelta, part: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Create a gloo group of all ranks, or of the ranks of ``part``, for collectives that wait for
    disks. `limit_waiting` does not change the ``timeout`` of this group. Collective."""
    # If replicas may fail, only a group with the default backend still works after a failure.
    backend = None if current() is not None else "gloo"
    # Ranks outside of ``part`` do not call this function.
    group = dist.new_group(
        None if part is None else dist.get_process_group_ranks(part),
        backend=backend,
        timeout=timeout,
        use_local_synchronization=part is not None,
    )
    assert isinstance(group, dist.ProcessGroup)  # every rank is a member
    _patient.add(group)
    return group


def limit_waiting(seconds: float) -> None:
    """Set the timeout of all existing process groups: a collective waits at most ``seconds`` for a
    late rank. Call this function after the first step; see [Note: two timeouts]. It does not change
    groups that are created later, and the groups for saving checkpoints keep their timeout. A new
    group has torch's default timeout; groups of a new mesh from `parallel2d.build_mesh` have the
    timeout of the default group."""
    limit = timedelta(seconds=seconds)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in _patient:
            dist.set_timeout(limit, group)


def seconds_to_wait() -> float:
    """Return how long a collective of the default process group waits for a late rank."""
    world = dist.distributed_c10d._get_default_group()
    # All backends of the group, one per device type, have the same timeout.
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    # torch's fake backend has no options: it never waits.
    return math.inf if options is None else options._timeout.total_seconds()


def barrier(name: str, timeout_s: float | None = None) -> None:
    """Block until every rank has called this function with the same ``name``. With a GPU, also wait
    for all issued work of the device.

    The barrier uses the store, so it works with any backend. Without a process group it returns
    immediately.

    Args:
        name: identifies the barrier.
        timeout_s: seconds to wait; default: the timeout of the default process group.

    Raises:
        TimeoutError: on every rank that waited longer than ``timeout_s``, naming the late ranks
            and, after `setup`, their hosts.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    devices.synchronize(devices.accelerator_type())
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    if timeout_s is None:
        timeout_s = seconds_to_wait()
    exchange.meet("calls parallel2d.barrier")

    # Calls with the same name are numbered, equally on all ranks, and use separate keys.
    number = store.add(f"parallel2d/barrier/{name}/calls/{rank}", 1)
    key = f"parallel2d/barrier/{name}/{number}"
    store.set(f"{key}/{rank}", "1")
    _count_in(store, key)
    try:
        store.wait([f"{key}/all"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        late = _absent(store, key, ranks)
        if late:
            raise TimeoutError(
                f"barrier {name}: rank {rank} waited {timeout_s:g} s for {', '.join(late)}"
            ) from None
        # The last rank may have arrived between the end of the wait and this check.
        if not store.check([f"{key}/all"]):
            raise error
    # All ranks have reached this call, so they have left the previous call. Its keys are deleted.
    if rank == 0 and number > 1:
        for last in (*range(ranks), "arrived", "all"):
            store.delete_key(f"parallel2d/barrier/{name}/{number - 1}/{last}")


def _absent(store: Any, key: str, ranks: int) -> list[str]:
    """Return ``rank 3 on node1`` for each rank that has not set its key. The host is omitted if
    `setup` did not create the process group."""
    late = []
    for rank in filter(is_present, range(ranks)):
        if not store.check([f"{key}/{rank}"]):
            late.append(f"rank {rank} on {_hosts[rank]}" if _hosts else f"rank {rank}")
    return late


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed the default generators, which training uses for dropout. Weights and data order use
    separate generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _short(error: BaseException) -> str:
    return str(error).partition("\n")[0][:120] or type(error).__name__

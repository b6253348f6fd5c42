"""Pools of gloo worker processes that stay alive for the test session, so that a multi-rank test
costs tenths of a second.

``run(world_size, function, *args)`` calls a module-level function on every rank, inside one
process group, and returns the list of results by rank. An exception on any rank is raised in the
test with that rank's traceback; the pool is then started afresh, because the other ranks may be
waiting in a collective, unless every rank raised the same.
"""

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

TIMEOUT = 240.0  # seconds a test may take on the workers before they are ended
GRACE_S = 10.0  # for the answers of others, once a rank has failed


def _worker(rank: int, world_size: int, folder: str, connection: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    # Output of native code before it ends the process, and the stack of every thread.
    last_words = os.open(os.path.join(folder, f"stderr.{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(last_words, 2)
    faulthandler.enable(2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT)
    )
    groups = MeshGroups()
    gc.collect()
    gc.freeze()  # imported modules need no search before every test
    connection.send(("ready", None))
    while (task := connection.recv()) is not None:
        function, args, kwargs = task
        groups.forget_others()
        try:
            answer = ("ok", function(*args, **kwargs))
        except BaseException as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
            groups.kept.clear()  # a collective may have been left unfinished on one of them
        connection.send(answer)
    dist.destroy_process_group()


class MeshGroups:
    """The process groups of meshes, made once per pool and set of ranks: equal meshes of later
    tests get the same ones.

    Making them costs as much as a small test. Groups that a test made itself are ended before the
    next one: each has a thread that wakes up a hundred times a second. So are all groups after a
    test that failed.
    """

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed import device_mesh

        self.kept: dict[tuple[Any, ...], Any] = {}
        self._taken: Counter[tuple[Any, ...]] = Counter()  # groups that a test may have only once
        self._make = dist.new_group
        device_mesh.new_group = self._cached_or_new
        dist.new_group = self._cached_or_new

    def _cached_or_new(self, ranks: list[int] | None = None, *args: Any, **options: Any) -> Any:
        from parallel2d.parallel.sync.engine.replica_reducer import GROUP_NAME

        key: tuple[Any, ...] = (tuple(ranks or ()), options.get("backend"))
        name = options.get("group_desc") or ""
        if name == GROUP_NAME:  # one for each model
            self._taken[key] += 1
            key = (*key, self._taken[key])
        elif not name.startswith("mesh_"):
            return self._make(ranks, *args, **options)
        if key not in self.kept:
            self.kept[key] = self._make(ranks, *args, **options)
        return self.kept[key]

    def forget_others(self) -> None:
        """Ends the groups that are not kept. All ranks have answered by now, so none is inside a
        collective.
        """
        import torch.distributed as dist

        from parallel2d.base.runtime import release_groups

        self._taken.clear()
        kept = [dist.group.WORLD, *self.kept.values()]
        earlier = [group for group in dist.distributed_c10d._world.pg_map if group not in kept]
        if not earlier:
            return
        dist.barrier()
        for group in earlier:
            dist.destroy_process_group(group)
        if not self.kept:
            release_groups()
        else:
            gc.collect()


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the message of the `ConfigError` that a call raises."""
    from parallel2d import ConfigError

    try:
        call(*arguments, **options)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


class WorkerError(AssertionError):
    """A test function failed on a rank.

    Attributes:
        kind: class of the exception on the rank.
        message: message of the exception on the rank.
        everywhere: all ranks raised the same, so no rank is left in a collective.
    """

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.kind, self.message, self.everywhere = kind, message, False


class Pool:
    def __init__(self, world_size: int, preload: list[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload)
        self.folder = tempfile.TemporaryDirectory(prefix="parallel2d-test-")
        self.connections = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker, args=(rank, world_size, self.folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self._gather(TIMEOUT)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        for connection in self.connections:
            connection.send((function, args, kwargs))
        return self._gather(TIMEOUT)

    def _gather(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        rank_of = {id(connection): rank for rank, connection in enumerate(self.connections)}
        waiting = list(self.connections)
        failure = None
        errors: list[tuple[str, str]] = []
        while waiting:
            ready = multiprocessing.connection.wait(
                waiting, timeout=GRACE_S if failure else timeout
            )
            if not ready:
                break
            for connection in ready:
                waiting.remove(connection)
                rank = rank_of[id(connection)]
                try:
                    kind, value = connection.recv()
                except EOFError:
                    kind, value = "error", ("EOFError", "the worker process ended", "")
                    self.processes[rank].join(timeout=60)  # its exit code comes a moment later
                if kind == "error":
                    # An ended rank is the cause of the exceptions of the other ranks, in any order
                    # of arrival.
                    if failure is None or (value[0] == "EOFError" != failure.kind):
                        failure = WorkerError(rank, *value)
                    errors.append(value[:2])
                results[rank] = value
        if failure:
            failure.everywhere = (
                len(errors) == len(self.connections)
                and len(set(errors)) == 1
                and failure.kind != "EOFError"
            )
            raise failure
        if waiting:
            late = [rank_of[id(connection)] for connection in waiting]
            raise WorkerError(
                late[0], "TimeoutError", f"ranks {late} did not answer in {timeout} s", ""
            )
        return [results[rank] for rank in range(len(self.connections))]

    def native_fault(self) -> str:
        """Return the output of a worker that was ended by a fault in native code: SIGSEGV, or
        SIGABRT from glibc, which found its heap damaged. Empty for other ends.
        """
        said = []
        for rank, process in enumerate(self.processes):
            if process.exitcode in (-signal.SIGSEGV, -signal.SIGABRT):
                words = Path(self.folder.name, f"stderr.{rank}").read_text(errors="replace")
                said.append(f"rank {rank} ended with {process.exitcode}:\n{words[-4000:]}")
        return "\n".join(said)

    def close(self, kill: bool = False) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            if kill:
                process.kill()
            else:
                connection.send(None)
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


class Pools:
    """One pool per world size, started when first requested. When a test kills a rank or fails on
    some ranks, only that pool restarts: its ranks are forked from a server that has everything
    imported, in a few tenths of a second.
    """

    # Imports of the server before the first rank is forked.
    preload: ClassVar[list[str]] = [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "parallel2d.training.assemble",
    ]

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        if world_size not in self.pools:
            self.pools[world_size] = Pool(world_size, self.preload)
        try:
            return self.pools[world_size].run(function, *args, **kwargs)
        except BaseException as error:
            if getattr(error, "everywhere", False):
                raise
            pool = self.pools.pop(world_size)
            fault = pool.native_fault() if isinstance(error, WorkerError) else ""
            pool.close(kill=True)
            if fault and isinstance(error, WorkerError):
                error.args = (f"{error}\n{fault}",)
            raise

    def close(self) -> None:
        while self.pools:
            self.pools.popitem()[1].close()


@contextlib.contextmanager
def logged(name: str, level: int = logging.INFO) -> Iterator[list[str]]:
    """Return the lines of the logger ``name`` inside the context, from ``level`` on."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)

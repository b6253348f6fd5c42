"""Runs a function on several ranks; each is a process with one simulated device."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from workers import Pools

from stream_simulator.results import RankResult, Result
from stream_simulator.stream_operations import Site, operations

LIMIT_S = 300.0  # for one run


class RankError(AssertionError):
    """A rank has raised an exception; the message is its traceback."""


def run(
    size: int, function: Callable[..., Any], *args: Any, dropped: Iterable[Site] = ()
) -> Result:
    """Call ``function(simulator, *args)`` on every rank, without the stream operations
    ``dropped``.

    The processes are forked from a server that has torch and the package imported, and end after
    the call: the replaced functions of torch live no longer than one run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(Pools.preload)
    with tempfile.TemporaryDirectory(prefix="parallel2d-simulator-") as folder:
        connections, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, folder, theirs, function, args, frozenset(dropped))
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        try:
            return Result(_gather(connections))
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join()


def _gather(connections: list[Any]) -> list[RankResult]:
    """Receive the result of every rank."""
    found: dict[int, RankResult] = {}
    waiting = list(connections)
    while waiting:
        ready = multiprocessing.connection.wait(waiting, LIMIT_S + 10)
        if not ready:
            raise RankError(f"no answer in {LIMIT_S} s")
        for connection in ready:
            waiting.remove(connection)
            rank = connections.index(connection)
            try:
                answer = connection.recv()
            except EOFError:
                answer = "the process ended without an answer"
            if isinstance(answer, str):
                raise RankError(f"rank {rank}:\n{answer}")
            found[rank] = answer
    return [found[rank] for rank in range(len(connections))]


def _run_rank(
    rank: int,
    size: int,
    folder: str,
    connection: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    dropped: frozenset[Site],
) -> None:
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="localhost",
        MASTER_PORT="1",
    )
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        connection.send(_call(rank, size, folder, function, args, dropped))
    except BaseException:
        with contextlib.suppress(BrokenPipeError):  # the other ranks may have ended the run
            connection.send(traceback.format_exc())
        os._exit(1)
    import torch.distributed as dist

    dist.barrier()  # no rank leaves while another one needs it
    os._exit(0)


def _call(
    rank: int,
    size: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    dropped: frozenset[Site],
) -> RankResult:
    import torch

    from stream_simulator import install

    torch.set_num_threads(1)
    operations.dropped = dropped
    simulator = install(size, rank)
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    from parallel2d.parallel.sync.formats import fused_quantize

    # Triton comes with torch's builds for CUDA, which these devices stand for.
    fused_quantize.has_triton = lambda: True
    value = function(simulator, *args)
    simulator.active = False
    return RankResult.of(simulator, value)

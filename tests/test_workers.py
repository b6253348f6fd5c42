"""The pools of ranks that run the other tests: survived failures and reported errors."""

import ctypes
import os
import signal

import pytest
import torch.distributed as dist
from workers import Pools, WorkerError

from parallel2d import MeshSpec, build_mesh


def rank_and_process() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def end_rank(number: int) -> None:
    if dist.get_rank() == number:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def fail_on(ranks: tuple[int, ...]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError("this rank fails")


def group_of_the_shard_axis() -> int:
    return id(build_mesh(MeshSpec(shard=2), "zero3").get_group("shard"))


def test_pool_of_a_killed_rank_restarts_and_other_pools_stay(ranks):
    before, others = ranks.run(2, rank_and_process), ranks.run(3, rank_and_process)
    with pytest.raises(WorkerError, match="the worker process ended"):
        ranks.run(2, end_rank, 1)
    after = ranks.run(2, rank_and_process)
    assert [rank for rank, _ in after] == [0, 1]
    assert not {process for _, process in after} & {process for _, process in before}
    assert ranks.run(3, rank_and_process) == others


def test_failure_on_one_rank_is_raised_with_its_traceback_and_ends_the_pool(ranks):
    before = ranks.run(2, rank_and_process)
    with pytest.raises(
        WorkerError, match="rank 1: ValueError: this rank fails\n.*Traceback"
    ) as error:
        ranks.run(2, fail_on, (1,))
    assert (error.value.kind, error.value.everywhere) == ("ValueError", False)
    assert ranks.run(2, rank_and_process) != before


def test_equal_failure_on_every_rank_keeps_the_pool_without_its_groups(ranks):
    before, group = ranks.run(2, rank_and_process), ranks.run(2, group_of_the_shard_axis)
    assert ranks.run(2, group_of_the_shard_axis) == group, (
        "meshes of later tests get the same groups"
    )
    with pytest.raises(WorkerError) as error:
        ranks.run(2, fail_on, (0, 1))
    assert error.value.everywhere
    assert ranks.run(2, rank_and_process) == before
    assert ranks.run(2, number_of_groups) == [1, 1]


def number_of_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def fault_on(number: int) -> None:
    if dist.get_rank() == number:
        ctypes.string_at(0)
    dist.barrier()


def test_native_fault_is_raised_with_its_stack():
    pools = Pools()
    try:
        with pytest.raises(WorkerError, match=r"rank 1 ended with -11:(.|\n)*fault_on"):
            pools.run(2, fault_on, 1)
    finally:
        pools.close()

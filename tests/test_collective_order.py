"""The order of collectives in a shard group: differences are found before anything hangs, without
locks, and a killed rank leaves nothing.
"""

import functools
import logging
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import TIMEOUT, Pools, logged

import parallel2d
from parallel2d import ConfigError, MeshSpec, ParallelConfig, build_mesh, parallelize
from parallel2d.base.config import CheckpointConfig
from parallel2d.base.exchange import all_gather, shared_memory
from parallel2d.parallel.parallelize.collective_order import (
    _POINTS_OF_MODELS,
    CollectiveOrder,
    _leave,
    _orders,
)
from parallel2d.parallel.parallelize.reduce_scatter import OrderedAllGather

BLOCKS = 8
SOON_S = 10.0  # the process group waits for TIMEOUT
assert TIMEOUT > 10 * SOON_S


class Gathers:
    """All-gathers of blocks that differ in size, in one order."""

    def __init__(self, group):
        self.group, self.works = group, []
        self.order = CollectiveOrder.of(group, True, "cpu")
        model = self.order.add_model([f"block{number}" for number in range(BLOCKS)])
        self.blocks = [
            OrderedAllGather(
                functools.partial(self.order.enter, model, number), lambda error: error
            )
            for number in range(BLOCKS)
        ]

    def __call__(self, number, asynchronous=False):
        own = torch.full((number + 1,), float(self.group.rank()))
        whole = torch.full((self.group.size() * (number + 1),), -1.0)
        work = self.blocks[number](whole, own, self.group, asynchronous)
        if work is not None:
            self.works.append(work)
        return whole

    def run(self, numbers, asynchronous=False):
        """The message of the error, or nothing."""
        try:
            for number in numbers:
                self(number, asynchronous)
            self.order.end_backward()
        except ConfigError as error:
            return str(error)
        finally:
            # Every rank has issued or joined every collective of the other ranks.
            for work in self.works:
                work.wait()
            self.works.clear()
        return ""


def _random_differences(seed, rounds):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gathers = Gathers(dist.new_group(list(range(ranks))))
    for number in range(rounds):
        common = random.Random(f"{seed} {number}")
        right = [common.randrange(BLOCKS) for _ in range(20)]
        own = list(right)
        position = common.randrange(20)
        if rank in common.sample(range(ranks), common.randint(1, ranks - 1)):
            shift = common.randrange(1, BLOCKS) if common.random() < 0.5 else rank + 1
            own[position] = (own[position] + shift) % BLOCKS
            if common.random() < 0.3:
                del own[position:]
        begun = time.monotonic()
        messages = all_gather(gathers.run(own, asynchronous=common.random() < 0.5))
        assert time.monotonic() - begun < SOON_S
        # A rank may have ended before another rank began to differ.
        assert len(set(filter(None, messages))) == 1, (number, messages)
        here = {f"block{each}" for each in chain(*all_gather(own[position : position + 1]))}
        assert set(re.findall(r"block\d", max(messages))) <= here, (number, messages)
        gathers.order.acknowledge()
        for each in right:
            assert gathers(each).tolist() == [
                float(r) for r in range(ranks) for _ in range(each + 1)
            ]
        assert all_gather(gathers.run([])) == [""] * ranks


@pytest.mark.parametrize("rounds", [12, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("size", [2, 4])
def test_random_collective_mismatches_are_named_on_all_ranks_and_group_stays_usable(
    ranks, size, rounds
):
    ranks.run(size, _random_differences, size, rounds)


def _slow_between_its_entry_and_its_collective():
    """Rank 0 has compared its entry, and issues only after rank 1 has found the difference."""
    gathers = Gathers(dist.new_group([0, 1]))
    order = gathers.order
    if dist.get_rank() == 0:
        write = order._write

        def late(row, value):
            if row == 0:
                time.sleep(0.5)
            write(row, value)

        order._write = late
        message = gathers.run([1])
    else:
        time.sleep(0.2)
        message = gathers.run([2])
    return message or gathers.run([1])


def test_slow_rank_is_waited_for_after_its_entry_was_compared(ranks):
    for message in ranks.run(2, _slow_between_its_entry_and_its_collective):
        assert message.startswith("rank 1 gathers block2 while rank 0 of the same shard group")


class Reversed(nn.Module):
    """Blocks of equal size that run in another order than they are registered in."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        for number, block in enumerate(self.blocks):
            nn.init.constant_(block.weight, number)

    def forward(self, x):
        for block in reversed(self.blocks):
            x = torch.tanh(block(x))
        return x


def _summons_full_parameters(model):
    with parallel2d.summon_full_params(model):
        pass


POINTS = {
    "gathers a state": lambda model, saver: parallel2d.save_full(saver.path, model),
    "loads a state": lambda model, _: parallel2d.load_full_state(model, None, None),
    "temporarily gathers full parameters": lambda model, _: _summons_full_parameters(model),
    "saves or restores a checkpoint": lambda _, saver: saver.save_if_due(1, {}, last=True),
    "calls parallel2d.reduce": lambda *_: parallel2d.reduce(torch.ones(())),
    "calls parallel2d.barrier": lambda *_: parallel2d.barrier("after an evaluation"),
    "leaves the process group": lambda *_: _leave(),
}


def _uneven_evaluation(strategy, spec, point, folder):
    """Rank 3 has one batch more than the other ranks before they reach ``point``."""
    # Ranks wait for each other in the shard groups of every model.
    other = parallelize(Reversed(), build_mesh(HYBRID[1], HYBRID[0]), ParallelConfig(HYBRID[0]))
    mesh = build_mesh(spec, strategy)
    model = parallelize(Reversed(), mesh, ParallelConfig(strategy))
    saver = parallel2d.Checkpointer(CheckpointConfig(), folder, mesh, model, None)
    saver.path = folder / "x.pt"
    begun, message = time.monotonic(), ""
    with torch.no_grad(), logged("parallel2d", logging.ERROR) as said:
        try:
            for _ in range(3 if dist.get_rank() == 3 else 2):
                model(torch.ones(4, 8))
            POINTS[point](model, saver)
        except ConfigError as error:
            message = str(error)
    assert time.monotonic() - begun < SOON_S
    assert not list(folder.rglob("*.pt")) + list(folder.rglob("step-*"))
    dist.barrier()
    order = _orders[mesh.get_group("shard")]
    if not order.others_agree:
        order.acknowledge()
    state = parallel2d.full_state(model, rank0_only=False)["model"]
    assert [state[f"blocks.{number}.weight"].unique().tolist() for number in range(3)] == [
        [0],
        [1],
        [2],
    ]
    if point.startswith("leaves"):
        # Other ranks have left in the orders of all models: later tests of this process make new ones.
        dist.barrier()
        _orders.clear()
    else:
        parallel2d.full_state(other)
    return message or "".join(said)


HYBRID = ("hybrid", MeshSpec(replicate=2, shard=2))
CASES = [("zero3", MeshSpec(replicate=1, shard=4), point) for point in POINTS]
CASES += [(*HYBRID, point) for point in POINTS if point in _POINTS_OF_MODELS]


@pytest.mark.parametrize(("strategy", "spec", "point"), CASES)
def test_a_rank_with_one_batch_more_is_named_at_the_next_point(
    ranks, tmp_path, strategy, spec, point
):
    messages = ranks.run(4, _uneven_evaluation, strategy, spec, point, tmp_path)
    assert f" {point}" in messages[3]
    assert re.search(r"rank 3 (of the same shard group )?gathers", messages[3])
    if point in _POINTS_OF_MODELS:
        assert len(set(messages)) == 1


CALLS = {"open", "fcntl.flock", "fcntl.fcntl", "fcntl.lockf", "fcntl.ioctl"}


def _calls_in_steps():
    """The calls of the file system in training steps after the first two."""
    mesh = build_mesh(MeshSpec(replicate=1, shard=2), "zero3")
    model = parallelize(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), mesh, ParallelConfig("zero3")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, watching = [], [False]

    def watch(event, arguments):
        if watching[0] and (event in CALLS or event.startswith(("os.", "mmap."))):
            seen.append((event, *map(str, arguments)))

    sys.addaudithook(watch)
    for step in range(6):
        watching[0] = step >= 2
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    watching[0] = False
    return seen


def test_steps_make_no_file_system_calls(ranks):
    assert ranks.run(2, _calls_in_steps) == [[], []]


def _without_proc():
    group = dist.new_group([0, 1])
    mesh = build_mesh(MeshSpec(replicate=1, shard=2), "zero3")
    _orders.pop(mesh.get_group("shard"), None)  # of an earlier test
    if dist.get_rank() == 1:
        readlink, os.readlink = os.readlink, lambda path: "/somewhere/else"
    try:
        refused = shared_memory(group, 64)
        with logged("parallel2d.parallel.parallelize.sharding", logging.WARNING) as said:
            parallelize(nn.Linear(4, 4), mesh, ParallelConfig("zero3"))
    finally:
        if dist.get_rank() == 1:
            os.readlink = readlink
        del _orders[mesh.get_group("shard")]
    descriptors = len(os.listdir("/proc/self/fd"))
    memory = shared_memory(group, 64)
    memory[dist.get_rank()] = 7
    dist.barrier()
    both = memory[:3]
    dist.barrier()
    return refused, said, bytes(both), len(os.listdir("/proc/self/fd")) - descriptors


def test_missing_shared_memory_is_reported(ranks):
    (refused, said, both, more), (refused_there, _, both_there, _) = ranks.run(2, _without_proc)
    assert refused is refused_there is None
    assert "cannot open each other's memory" in said[0]
    assert both == both_there == b"\7\7\0"
    assert more == 1


def _make_and_gather_forever(rank, folder, connection):
    """A job that makes groups, their shared memory and collectives until it ends."""
    tempfile.tempdir = str(folder / "temporary")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2
    )
    connection.send("begun")
    while True:
        gathers = Gathers(dist.new_group([0, 1]))
        for number in range(BLOCKS):
            gathers(number)


def _files(folder):
    # Other jobs have folders in shared memory.
    return {path for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kills", [10, pytest.param(300, marks=pytest.mark.soak)])
def test_a_rank_killed_at_any_moment_leaves_no_file(tmp_path, kills):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(Pools.preload)
    choice = random.Random(5)
    before = _files(Path("/dev/shm"))
    for number in range(kills):
        folder = tmp_path / str(number)
        (folder / "temporary").mkdir(parents=True)
        pipes = [context.Pipe() for _ in range(2)]
        job = [
            context.Process(target=_make_and_gather_forever, args=(rank, folder, pipes[rank][1]))
            for rank in range(2)
        ]
        for process in job:
            process.start()
        for ours, _ in pipes:
            assert ours.poll(60), "the job did not begin"
        time.sleep(choice.uniform(0, 0.1))
        for process in choice.sample(job, 2):
            process.kill()  # the other rank may have ended already, as its connection broke
            process.join()
        assert _files(folder / "temporary") == set()
    left = _files(Path("/dev/shm")) - before
    # Files of other jobs may exist for a moment.
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(path.exists() for path in left):
        time.sleep(0.1)
    assert {path for path in left if path.exists()} == set()

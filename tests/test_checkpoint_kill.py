"""After SIGKILL at any moment the newest published checkpoint is complete, and the run resumes
from it.
"""

import contextlib
import multiprocessing.connection
import os
import random
import signal
from collections import Counter

import pytest
import torch
from workers import Pool, Pools

from parallel2d.base.config import CheckpointConfig
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.training.checkpoint import Checkpointer

INTERVAL = 2
SHAPES = {"a": (257, 64), "b": (3, 5), "c": (1000,), "d": (2, 128, 33)}


class Numbers(torch.nn.Module):
    """Parameters that all hold the number of the step: a mixture of two steps shows in the values."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))


def _build(folder, keep_last, asynchronous):
    from torch.distributed.fsdp import fully_shard

    from parallel2d import MeshSpec, build_mesh

    mesh = build_mesh(MeshSpec(), "zero3")
    model = fully_shard(Numbers(), mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    settings = CheckpointConfig(every=INTERVAL, keep_last=keep_last, asynchronous=asynchronous)
    return model, optimizer, Checkpointer(settings, folder, mesh, model, optimizer)


def _local_values(model, optimizer):
    for parameter in model.parameters():
        for value in (parameter, *optimizer.state[parameter].values()):
            yield local_part(value.detach())


def _values(model, optimizer):
    return {
        number for value in _local_values(model, optimizer) for number in value.unique().tolist()
    }


def save_without_end(folder, keep_last, asynchronous):
    """Restore, check that the state belongs to one step, and save until the process is killed."""
    import torch.distributed as dist

    model, optimizer, checkpointer = _build(folder, keep_last, asynchronous)
    state = checkpointer.restore()
    step = state["step"] if state else 0
    assert _values(model, optimizer) <= {float(step)} | ({0.0, 1.0} if not state else set())
    while True:
        step += 1
        for value in _local_values(model, optimizer):
            value.fill_(step)
        checkpointer.save_if_due(step, {"samples": step})
        # The run records its published steps, for comparison with the steps on the disk.
        if dist.get_rank() == 0:
            with open(os.path.join(folder, "known"), "a") as file:
                file.write(f"{step} {max(checkpointer.published, default=0)}\n")


def restore_once(folder):
    model, optimizer, checkpointer = _build(folder, 2, True)
    state = checkpointer.restore()
    return state, _values(model, optimizer)


def recorded_steps(known):
    """Return the pairs in the complete lines of the file ``known``."""
    with contextlib.suppress(FileNotFoundError), open(known) as file:
        return [tuple(map(int, line.split())) for line in file.read().split("\n")[:-1]]
    return []


def kill_while_saving(ranks, tmp_path, seed, rounds):
    """Kills all ranks at ``rounds`` random moments of one run; returns (restored step, steps lost) of
    each."""
    generator = random.Random(seed)
    results = []
    for number in range(rounds):
        folder = str(tmp_path)
        keep_last, asynchronous = generator.choice([1, 2]), generator.random() < 0.7
        pool = Pool(2, Pools.preload)
        known = os.path.join(folder, "known")
        if os.path.exists(known):
            os.unlink(known)
        for connection in pool.connections:
            connection.send((save_without_end, (folder, keep_last, asynchronous), {}))
        # Wait for the first saves, in the last round for the first that is published, then for a random
        # while; an answer before the kill is a failure of the run.
        least = int(number == rounds - 1)
        while max((published for _, published in recorded_steps(known)), default=-1) < least:
            assert not multiprocessing.connection.wait(pool.connections, timeout=0.005), (
                pool.connections[0].recv()
            )
        ready = multiprocessing.connection.wait(pool.connections, timeout=generator.uniform(0, 0.4))
        assert not ready, ready[0].recv()
        for process in pool.processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in pool.processes:
            process.join()
        step, published = recorded_steps(known)[-1]
        on_disk = os.listdir(os.path.join(folder, "checkpoints"))
        complete = sorted(int(name[5:]) for name in on_disk if name.startswith("step-"))
        pool.folder.cleanup()
        answers = ranks.run(1 + number % 2, restore_once, folder)
        for state, values in answers:
            if not complete:
                assert published == 0
                assert state is None
                continue
            assert state["step"] == state["samples"] == max(complete)
            assert values == {float(state["step"])}, "a mixture of steps was read"
            assert state["step"] >= published, "a published checkpoint was lost"
            # At most one save is running, and a new save waits for it: a kill costs at most two
            # intervals if the save of the last interval was still being written, otherwise one
            # interval.
            assert step - state["step"] <= (2 if asynchronous else 1) * INTERVAL
        left = os.listdir(os.path.join(folder, "checkpoints"))
        assert all(name.startswith(("step-", ".")) for name in left), "nothing is moved aside"
        results.append((answers[0][0]["step"] if answers[0][0] else 0, step))
    return results


def test_sigkill_of_all_ranks_keeps_every_published_checkpoint(ranks, tmp_path):
    results = kill_while_saving(ranks, tmp_path, seed=1, rounds=2)
    assert results[-1][0] > 0


@pytest.mark.soak
def test_two_hundred_kills_keep_a_complete_checkpoint(ranks, tmp_path):
    rounds = int(os.environ.get("PARALLEL2D_KILLS", "200"))
    seed = int(os.environ.get("PARALLEL2D_SEED", "2"))
    results = kill_while_saving(ranks, tmp_path, seed=seed, rounds=rounds)
    lost = Counter(step - restored for restored, step in results)
    print(f"{rounds} kills, last step {results[-1][1]}, steps lost {dict(lost)}")

"""Successive starts of a run on the ranks of a pool: each start resumes from the copies that the
previous start left on its nodes, and ends without cleanup.
"""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checkpoint_runs import Heard, build, train_step
from torch import nn
from training import full_tensor_of, largest_difference, weights_of

from parallel2d import outer_parameters
from parallel2d.base.config import CheckpointConfig
from parallel2d.base.launcher_environment import MEMORY_DIR
from parallel2d.parallel.sync.ema import EMAWeights
from parallel2d.training.checkpoint import Checkpointer, in_memory_checkpoints
from parallel2d.training.checkpoint.storage import LocalStore

FP64 = {"strategy": "hybrid", "precision": "fp64"}


def averages_of(model: nn.Module, average: EMAWeights) -> dict[str, Any]:
    """Return the unsharded EMA weights, which the model has for validation."""
    found = {name: full_tensor_of(each).numpy() for name, each in average.values.items()}
    with outer_parameters(model):
        assert largest_difference(weights_of(model), found) == 0
    return found


def train_until(
    run_dir: str,
    nodes: list[str],
    mesh_sizes: dict[str, Any],
    *,
    until: int,
    every: int = 2,
    disk_every: int = 0,
    restarted: bool = True,
    parallel: dict[str, Any] | None = None,
    llama: dict[str, Any] | None = None,
    end: str = "killed",
    fault: Any = None,
    decay: float | None = None,
    **checkpoint: Any,
) -> dict[str, Any]:
    """Train from the current step of the run to step ``until``.

    Args:
        nodes: memory folder of each rank.
        end: ``killed`` leaves all files as they are after the last copy, ``finished`` and
            ``preempted`` end as a trainer does.
        fault: ``fault(net)`` runs on each rank before the state is restored.
        decay: decay of the EMA weights.
    """
    rank = torch.distributed.get_rank()
    before = os.environ.get(MEMORY_DIR)
    os.environ[MEMORY_DIR] = nodes[rank]
    try:
        torch.manual_seed(rank)
        mesh, model, optimizer = build(mesh_sizes, parallel or FP64, **(llama or {}))
        average = EMAWeights(model) if decay else None
        settings = CheckpointConfig(every=disk_every, memory_every=every, **checkpoint)
        with Heard() as heard:
            net = in_memory_checkpoints(settings, run_dir, mesh)
            saver = Checkpointer(settings, run_dir, mesh, model, optimizer, copies=net)
            if fault is not None:
                fault(net)
            restored = saver.restore(restarted=restarted)
            start = restored["step"] if restored else 0
            losses, draws = {}, {}
            for step in range(start + 1, until + 1):
                losses[step] = train_step(model, optimizer, mesh, step)
                draws[step] = torch.rand(()).item()
                if average is not None and decay is not None:
                    average.update(decay)
                way = end if step == until else ""
                options = {"last": way == "finished", "preempted": way == "preempted"}
                saver.save_if_due(step, {"samples": 8 * step}, **options)
                if net is not None:
                    net.wait()
            saver.collect()
            if end != "killed":
                saver.finish()
        return {
            "start": start,
            "losses": losses,
            "draws": draws,
            "log": heard,
            "on": net is not None and net.on,
            "age": saver.age_steps,
            "averages": averages_of(model, average) if average else None,
        }
    finally:
        os.environ.pop(MEMORY_DIR)
        if before is not None:
            os.environ[MEMORY_DIR] = before
        mock.patch.stopall()


def on_rank_1(method: str, call: int, act: Any) -> None:
    """Rank 1 calls ``act``, with the arguments, before it calls a method of its store for the
    ``call``-th time.
    """
    original, calls = getattr(LocalStore, method), []

    def acting(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            act(original, *args)
        return original(*args)

    if torch.distributed.get_rank() == 1:
        mock.patch.object(LocalStore, method, acting).start()


def die_before_the_third_rename(net: Any) -> None:
    """Rank 1 is killed when it has copied and rank 0 has published its part of the third copy."""

    def wait_and_die(*_: Any) -> None:
        while not list(Path(net._folder).glob("*/rank-00000/*/step-00000006")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    on_rank_1("publish", 3, wait_and_die)


def full_on_the_second_copy(net: Any) -> None:
    """Rank 1's node has no memory left when its second copy is made."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    on_rank_1("write", 3, full)


def change_sent_values(net: Any) -> None:
    """Every state that is sent from rank to rank arrives with another last byte."""
    send = net._exchange

    def changed(sent: Any) -> torch.Tensor:
        received = send(sent)
        if len(received) and received[0] != ord("{"):  # no manifest
            received[-1] ^= 1
        return received

    net._exchange = changed

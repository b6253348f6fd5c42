"""Programs for the tests of the runtime, which need processes without a process group: `main`
calls them by name, one after another.

python runtime_runs.py FUNCTION[:ARGUMENT] ... with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
in the environment, or without
"""

import atexit
import gc
import json
import os
import sys
import threading
from pathlib import Path


def gloo_threads() -> int:
    return sum(
        "gloo" in task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()
    )


@atexit.register
def _check_threads() -> None:
    """Register before torch and parallel2d are imported, so that the check runs after their
    functions: a thread that frees a tensor when Python ends would kill the process after all of
    its work.
    """
    if gloo_threads():
        print(f"{gloo_threads()} threads of gloo are left", flush=True)
        os._exit(3)


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402


def one_run() -> float:
    """A few steps of a small sharded model between a setup and a teardown."""
    from parallel2d import (
        ParallelConfig,
        build_mesh,
        build_on_meta,
        clip_gradient_norm,
        parallelize,
        setup,
        teardown,
    )
    from parallel2d.base.config import OPTIMIZERS
    from parallel2d.training.metrics.communication import CommunicationMeter
    from parallel2d.training.optimizer import build_optimizer

    runtime = setup(timeout_s=60)
    mesh = build_mesh(strategy="hybrid")
    with build_on_meta():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    config = ParallelConfig("zero3" if mesh.size(0) == 1 else "hybrid")
    model = parallelize(model, mesh, config, seed=0, topology=runtime.topology)
    CommunicationMeter(mesh).install()  # left for teardown to remove
    optimizer = build_optimizer(model, OPTIMIZERS["muon"])
    for _ in range(2):
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        clip_gradient_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer, mesh
    teardown()
    return loss.item()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "groups": len(dist.distributed_c10d._world.pg_map)
        + sum(isinstance(o, dist.ProcessGroup) for o in gc.get_objects()),
        "meshes": sum(type(o).__name__ == "DeviceMesh" for o in gc.get_objects()),
        "resident": resident(),
    }


def soak(times: str) -> dict[str, object]:
    """Return the resources of the process after the third run and after the last run."""
    all_reduce = dist.all_reduce
    losses = [one_run() for _ in range(3)]
    early = state()
    losses += [one_run() for _ in range(int(times) - 3)]
    return {
        "early": early,
        "late": state(),
        "losses": losses,
        "unwrapped": dist.all_reduce is all_reduce,
    }


def single_process() -> dict[str, object]:
    from parallel2d import barrier, reduce, setup, teardown
    from parallel2d.base.errors import ConfigError

    runtime = setup()
    barrier("alone")
    told = ""
    try:
        setup()
    except ConfigError as error:
        told = str(error)
    answer = [
        runtime.identity.rank,
        runtime.identity.world_size,
        reduce(torch.ones(2)).tolist(),
        dist.get_backend(),
        told,
    ]
    teardown()
    teardown()
    return {"answer": answer, "left": not dist.is_initialized()}


def timeouts() -> dict[str, object]:
    from datetime import timedelta

    from parallel2d import build_mesh, limit_waiting, setup, teardown
    from parallel2d.training.checkpoint.save import Group

    def all_timeouts() -> list[float]:
        groups = dist.distributed_c10d._world.pg_map
        found = [
            group._get_backend(torch.device("cpu")).options._timeout / timedelta(seconds=1)
            for group in groups
        ]
        return sorted(set(found))

    setup(timeout_s=7, first_timeout_s=70)
    mesh = build_mesh(strategy="hybrid")
    saving = Group.new()
    groups = len(dist.distributed_c10d._world.pg_map)
    before = all_timeouts()
    limit_waiting(7)
    after = all_timeouts()
    assert mesh.size() == saving.size == dist.get_world_size()
    teardown()
    return {"groups": groups, "before": before, "after": after}


def late() -> dict[str, object]:
    """The last rank comes to the second barrier only after the others have given up on it."""
    from parallel2d import barrier, setup, teardown

    runtime = setup(timeout_s=60, host_id=f"node{os.environ['RANK']}")
    barrier("ready")
    told = ""
    if runtime.identity.rank < runtime.identity.world_size - 1:
        try:
            barrier("weights loaded", timeout_s=3)
        except TimeoutError as error:
            told = str(error)
    barrier("gone on")
    for _ in range(3):
        barrier("again")
    teardown()
    return {"told": told}


def signals() -> dict[str, object]:
    """Signal handlers are restored by a teardown."""
    import signal

    from parallel2d import setup, teardown
    from parallel2d.launching import rank_signals as ours

    before = [
        signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    ]
    setup()
    ours.listen()
    signal.raise_signal(signal.SIGUSR1)
    heard = ours.preemption_requested()
    teardown()
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    return {
        "heard": heard,
        "restored": before == after,
        "forgotten": not ours.preemption_requested(),
    }


def foreign() -> dict[str, int]:
    """A process group of another library, such as Ray, that destroys it without `teardown`."""
    from parallel2d import ParallelConfig, Topology, build_mesh, build_on_meta, parallelize

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    topology = Topology.gather()
    mesh = build_mesh(strategy="zero3", topology=topology)
    with build_on_meta():
        model = nn.Sequential(nn.Linear(8, 8))
    model = parallelize(model, mesh, ParallelConfig("zero3"), seed=0, topology=topology)
    model(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group()
    return {"threads": gloo_threads()}


def main() -> None:
    torch.set_num_threads(1)
    for call in sys.argv[1:]:
        function, *arguments = call.split(":")
        print("ANSWER " + json.dumps(globals()[function](*arguments)), flush=True)


if __name__ == "__main__":
    main()

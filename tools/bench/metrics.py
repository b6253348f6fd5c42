"""What measuring costs: CPU-seconds of one rank per collective counted and per row written.

    python tools/bench/metrics.py

One process: a collective's own time would hide what is added to it, so the collectives are replaced by nothing, with and without
the meter around them. Prints microseconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.device_mesh import init_device_mesh

from parallel2d.metrics.communication import CommunicationMeter
from parallel2d.metrics.keys import COMMUNICATION_KEYS
from parallel2d.metrics.writer import MetricsWriter

REPEATS = 2000


def microseconds(call: Callable[[], object]) -> float:
    """CPU time of one call, the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()
        for _ in range(REPEATS):
            call()
        best = min(best, time.process_time() - begin)
    return best / REPEATS * 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        group, tensor = mesh.get_group("shard"), torch.ones(1024)
        bare = microseconds(lambda: dist.all_reduce(tensor, group=group))
        meter = CommunicationMeter(mesh).install()
        meter.start()
        measured = microseconds(lambda: dist.all_reduce(tensor, group=group))
        meter.remove()
        print(f"a collective counted   {measured - bare:8.1f}")
        row = {f"key/{index}": float(index) for index in range(45 - len(COMMUNICATION_KEYS))}
        row |= dict.fromkeys(COMMUNICATION_KEYS, 1.0)
        for tensorboard in (False, True):
            writer = MetricsWriter(folder, {}, tensorboard=tensorboard, axes=("replicate", "shard"))
            writer.begin(0)
            cost = microseconds(lambda writer=writer: writer.write({**row, "step": 1}, [1.0] * 4))  # type: ignore[misc]
            writer.close()
            print(
                f"a row written          {cost:8.1f}   {'with' if tensorboard else 'without'} TensorBoard"
            )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

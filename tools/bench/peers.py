"""Compare the time of a training step with other implementations, for the same model, batches and
ranks.

    python -m tools.bench.peers [--layouts ddp hybrid zero3] [--model small] [--ranks 4] [--rounds 12] [--steps 10] [--accumulate 1]

In the layout ``ddp`` the ratios are relative to torch's DDP, in ``hybrid`` and ``zero3`` to a
hand-written FSDP2 loop. Each implementation has separate worker processes. They use gloo on CPUs,
with one thread per rank, or one accelerator per rank. In every round, each implementation runs
``--steps`` steps while all others wait; the order changes from round to round. A step is forward
and backward of each micro-batch, clipping, fused AdamW and ``zero_grad``. Implementations that are
not installed are listed as skipped. The first losses of all implementations must be equal.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel2d.base import device as devices
from tools.bench.overhead import cpu_seconds, start
from tools.bench.peer_loops import PEERS, SIZES, Job, set_environment

LAYOUTS = ("ddp", "hybrid", "zero3")
# `parallelize.script_checks` examines forwards 1, 2, 4 and so on. After the warm-up, the next
# examined forwards are 64 and 128.
WARM_UP_FORWARDS = 33
COMPARED_LOSSES = 5


class Used(NamedTuple):
    """One step of one implementation in one round."""

    seconds: float
    cpu_seconds: float  # of all ranks


def worker(key: tuple[str, str], rank: int, options: Any, folder: str, pipe: Any) -> None:
    """For each request from ``pipe``, run ``options.steps`` steps and send their seconds and
    CPU-seconds.

    Args:
        key: the layout and the implementation.
        rank: rank of this process.
        options: options of the command line.
        folder: folder for the files of the process groups.
        pipe: the worker sends the first losses, then receives requests and sends results.
    """
    layout, name = key
    set_environment(rank, options.ranks, options.port)
    device = devices.choose_device(rank)
    store = dist.FileStore(os.path.join(folder, f"{layout} {name}"), options.ranks)
    dist.init_process_group(
        devices.backend_for(device.type),
        store=store,
        rank=rank,
        world_size=options.ranks,
        device_id=devices.bound_device(device),
    )
    size = SIZES[options.model]
    loop = PEERS[name].build(Job(layout, size, device))
    torch.set_num_threads(1)  # after Accelerate, which may set another number
    generator = torch.Generator().manual_seed(rank)
    shape = (options.accumulate, size.sequences, size.seq_len + 1)
    tokens = torch.randint(0, size.vocabulary, shape, generator=generator).to(device)
    batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
    step = functools.partial(loop.step, batches)
    warm_up = max(COMPARED_LOSSES, -(-WARM_UP_FORWARDS // options.accumulate))
    losses = [step().item() for _ in range(warm_up)]
    gc.collect()
    gc.freeze()
    pipe.send(losses[:COMPARED_LOSSES])
    while pipe.recv():
        dist.barrier()
        devices.synchronize(device.type)
        cpu, begin = cpu_seconds(), time.perf_counter()
        for _ in range(options.steps):
            step()
        devices.synchronize(device.type)
        pipe.send((time.perf_counter() - begin, cpu_seconds() - cpu))
    dist.barrier()
    dist.destroy_process_group()


def turn(workers: list[tuple[Any, Any]], steps: int) -> Used:
    """Run the steps of one implementation."""
    for _, pipe in workers:
        pipe.send(True)
    taken = [pipe.recv() for _, pipe in workers]
    seconds = max(seconds for seconds, _ in taken)
    return Used(seconds / steps, sum(cpu for _, cpu in taken) / steps)


def installed(layout: str) -> tuple[list[str], list[str]]:
    """Return the installed implementations of the layout, and one line about each implementation
    that cannot be imported."""
    names, skipped = [], []
    for name, peer in PEERS.items():
        if layout not in peer.layouts:
            continue
        try:
            for module in peer.modules:
                importlib.import_module(module)
        except ImportError as error:
            skipped.append(f"skipped: {name}, which is not installed ({error})")
        else:
            names.append(name)
    return names, skipped


def check_losses(losses: dict[str, list[list[float]]]) -> None:
    """Raise SystemExit if the losses of an implementation differ from those of the first
    implementation."""
    first, *others = losses
    expected = torch.tensor(losses[first])
    for name in others:
        if not torch.allclose(torch.tensor(losses[name]), expected, rtol=1e-3):
            raise SystemExit(f"{name} and {first} have different losses: {losses}")


def measure(layout: str, names: list[str], options: Any) -> dict[str, list[Used]]:
    """Return the rounds of each implementation."""
    found: dict[str, list[Used]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        worlds = {}
        for name in names:
            worlds[name] = start(worker, options.ranks, (layout, name), options, folder)  # type: ignore[arg-type]
        losses = {}
        for name, workers in worlds.items():
            losses[name] = [pipe.recv() for _, pipe in workers]
        check_losses(losses)
        for number in range(options.rounds):
            shift = number % len(names)
            for name in (*names[shift:], *names[:shift]):
                found[name].append(turn(worlds[name], options.steps))
        for workers in worlds.values():
            for _, pipe in workers:
                pipe.send(False)
        for workers in worlds.values():
            for process, _ in workers:
                process.join()
    return found


def spread(values: list[float]) -> str:
    """Return the median and the quartiles."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def print_rows(layout: str, found: dict[str, list[Used]]) -> None:
    baseline = next(iter(found.values()))
    for name, rounds in found.items():
        seconds = statistics.median(used.seconds for used in rounds)
        cpu = statistics.median(used.cpu_seconds for used in rounds)
        time_ratios, cpu_ratios = [], []
        for used, base in zip(rounds, baseline, strict=True):
            time_ratios.append(used.seconds / base.seconds)
            cpu_ratios.append(used.cpu_seconds / base.cpu_seconds)
        print(
            f"| {layout} | {name} | {seconds:.4f} | {cpu:.4f} | {spread(time_ratios)} "
            f"| {spread(cpu_ratios)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--model", choices=list(SIZES), default="small")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument(
        "--port", type=int, default=29411, help="of Fabric's and Accelerate's ranks"
    )
    options = parser.parse_args()
    if "hybrid" in options.layouts and (options.ranks < 4 or options.ranks % 2):
        # FSDP1 does not reduce gradients over replicas of one rank.
        parser.error(f"--ranks {options.ranks}: hybrid has two replicas; use 4, 6, 8 ...")
    notes = []
    print("| layout | implementation | s per step | CPU-s per step | time ratio | CPU ratio |")
    print("|---|---|---|---|---|---|", flush=True)
    for layout in options.layouts:
        names, skipped = installed(layout)
        notes += skipped
        print_rows(layout, measure(layout, names, options))
    print("\nRatios to the first row of the layout: median (quartiles) of the rounds.")
    for line in dict.fromkeys(notes):
        print(line)


if __name__ == "__main__":
    main()

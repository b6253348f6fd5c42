"""Measure the cost of bucketing and prefetch: collectives, bytes per call, peak memory and CPU-seconds of a step.

    python tools/bench/bucketing.py [--rounds 6] [--link-ms 10]

Four gloo ranks, `strategy=hybrid` on a 2 x 2 mesh, a small Llama, one micro-batch. All models are
in the same processes and take turns, so that other work of the machine slows all of them equally.

* Counts are for one step of rank 0. The number of groups equals the number of reduce-scatters.
* Peak memory counts the tensors that a step allocates, as the allocator reports them. Memory from
  before the step is not counted.
* The second table emulates a link: all-gathers run one after the other, for ``--link-ms``
  milliseconds each. Its seconds are the minimum of all rounds, because other work of the machine
  can only lengthen a step.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d.parallel.fsdp_internals.sharded_model import set_asynchronous_gathers

WORLD, SEQ, BATCH = 4, 64, 2
LLAMA = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 8,
    "n_kv_heads": 4,
    "hidden_dim": 704,
    "vocab_size": 320,
    "max_seq_len": SEQ,
}
KINDS = ("allgather", "reduce_scatter", "allreduce")


class Collectives(TorchDispatchMode):
    """Count the collectives and their bytes, by kind. The bytes are those of the larger of input
    and output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            kind = next(kind for kind in KINDS if kind in str(function))
            tensors = [
                t
                for t in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            ]
            self.calls[kind] += 1
            self.bytes[kind] += max(t.nbytes for t in tensors)
        return function(*args, **(kwargs or {}))


class SlowLink:
    """Run torch's all-gathers one after the other, for ``seconds`` each."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.free = seconds, 0.0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.free = max(self.free, time.perf_counter()) + self.seconds
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        if async_op:
            return _Arriving(work, self.free)
        _sleep_until(self.free)
        return None


class _Arriving(dist.Work):
    def __init__(self, work: Any, at: float) -> None:
        super().__init__()
        self.work, self.at = work, at

    def wait(self, *timeout: Any) -> bool:
        self.work.wait()
        _sleep_until(self.at)
        return True


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def build(bucketing: Any, forward: int, backward: int) -> torch.nn.Module:
    from parallel2d import MeshSpec, ParallelConfig, build_mesh, build_on_meta, parallelize
    from parallel2d.base.config import PrefetchConfig
    from parallel2d.models.llama import Llama

    with build_on_meta():
        model = Llama(**LLAMA)
    config = ParallelConfig("hybrid", bucketing, prefetch=PrefetchConfig(forward, backward))
    return parallelize(
        model, build_mesh(MeshSpec(), "hybrid"), config, seed=0, init=model.init_weights
    )


def step(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    model(tokens).float().square().mean().backward()
    model.zero_grad()


def peak_mib(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Return the peak MiB of the tensors that a step allocates. The peak is computed from the
    allocations and releases of the step.

    The result is the median of three steps, because threads of the process group also allocate.
    """
    return statistics.median(_peak(model, tokens) for _ in range(3))


def _peak(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step(model, tokens)
    assert profile.profiler is not None
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


def take_turns(
    models: dict[Any, torch.nn.Module], tokens: torch.Tensor, rounds: int
) -> dict[Any, tuple[float, float]]:
    """Return the median CPU-seconds (all ranks) and the minimum wall seconds of a step, per model."""
    cpu: dict[Any, list[float]] = defaultdict(list)
    wall: dict[Any, list[float]] = defaultdict(list)
    for number in range(rounds):
        for name, model in list(models.items())[:: 1 if number % 2 else -1]:
            dist.barrier()
            begin, used = time.perf_counter(), cpu_seconds()
            step(model, tokens)
            seconds = torch.tensor(cpu_seconds() - used, dtype=torch.float64)
            dist.barrier()
            wall[name].append(time.perf_counter() - begin)
            dist.all_reduce(seconds)
            cpu[name].append(seconds.item())
    return {name: (statistics.median(cpu[name]), min(wall[name])) for name in models}


def bucketing_table(tokens: torch.Tensor, rounds: int, say: Any) -> None:
    from parallel2d.base.config import BucketingConfig

    cases = {
        "none": "none",
        "layer": "layer",
        "block": "block",
        "size 8": BucketingConfig("size", 8.0),
        "size inf": BucketingConfig("size", float("inf")),
    }
    models = {
        (name, ahead): build(case, ahead, ahead)
        for name, case in cases.items()
        for ahead in (0, 1, 2)
    }
    rows = {}
    for key, model in models.items():
        step(model, tokens)
        with Collectives() as seen:
            step(model, tokens)
        rows[key] = (seen, peak_mib(model, tokens))
    times = take_turns(models, tokens, rounds)
    say(
        "| bucketing | prefetch | all-gathers | reduce-scatters | all-reduces | KiB per all-gather | peak MiB | CPU-s per step |"
    )
    say("|---|---|---|---|---|---|---|---|")
    for (name, ahead), (seen, peak) in rows.items():
        calls = [seen.calls[kind] for kind in KINDS]
        size = seen.bytes["allgather"] / 2**10 / calls[0]
        counts = " | ".join(map(str, calls))
        say(
            f"| {name} | {ahead} | {counts} | {size:.0f} | {peak:.1f} | {times[name, ahead][0]:.3f} |"
        )


def overlap_table(tokens: torch.Tensor, rounds: int, link_ms: float, say: Any) -> None:
    models = {}
    for forward, backward in ((0, 0), (0, 1), (1, 1), (2, 2)):
        for blocking in (True, False):
            model = models[forward, backward, blocking] = build("block", forward, backward)
            if blocking:
                set_asynchronous_gathers(model, False)
            step(model, tokens)
    plain = take_turns(models, tokens, rounds)
    link = SlowLink(link_ms / 1e3)
    for model in models.values():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(link)
    slow = take_turns(models, tokens, rounds)
    say(
        f"\n| forward, backward | all-gathers | CPU-s per step | s per step | s per step, {link_ms:g} ms per all-gather |"
    )
    say("|---|---|---|---|---|")
    for (forward, backward, blocking), (cpu, wall) in plain.items():
        kind = "block" if blocking else "asynchronous"
        say(
            f"| {forward}, {backward} | {kind} | {cpu:.3f} | {wall:.3f} | {slow[forward, backward, blocking][1]:.3f} |"
        )


def worker(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    say = (lambda line: print(line, flush=True)) if rank == 0 else (lambda _line: None)
    tokens = torch.randint(
        0, LLAMA["vocab_size"], (BATCH, SEQ), generator=torch.Generator().manual_seed(rank)
    )
    if arguments.table in ("both", "bucketing"):
        bucketing_table(tokens, arguments.rounds, say)
    if arguments.table in ("both", "overlap"):
        overlap_table(tokens, arguments.rounds, arguments.link_ms, say)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6, help="steps of each model that are timed")
    parser.add_argument(
        "--link-ms", type=float, default=10.0, help="milliseconds that an emulated all-gather takes"
    )
    parser.add_argument("--table", choices=("both", "bucketing", "overlap"), default="both")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (arguments, folder), nprocs=WORLD)
    return 0


if __name__ == "__main__":
    sys.exit(main())

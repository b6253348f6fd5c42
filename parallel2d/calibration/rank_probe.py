"""What one rank measures in a calibration, in a process of its own: `main`.

All ranks measure at the same time, so that ranks which share a host's processors, memory or
network share them here as they do in training. The settings come as one line of JSON on standard
input. Rank 0 prints its progress to standard error and the result as one line of JSON to standard
output.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from parallel2d.errors import ConfigError
from parallel2d.models.llama import Llama
from parallel2d.store.client import StoreClient
from parallel2d.sync.blocks import BITS, BlockNoise, Piece
from parallel2d.sync.noise import contribution_stage
from parallel2d.sync.wire import BlockWire, CastWire, Wire

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_SMALLEST, _GROWTH = 4096, 8
_TIMEOUT_S = 60.0
# Of the model on which the host's time for a group is measured. A group has 16 kB in fp32.
_GROUPS = 16
_WIDTH = 64
_ROWS = 512
_CODED_VALUES = 1 << 18


@dataclass(frozen=True)
class RankSettings:
    """``address`` and ``secret``: of the store at which ranks meet. ``largest_bytes``: of a
    collective. ``seconds``: of each measurement."""

    address: str
    secret: str
    rank: int
    nodes: int
    ranks_per_node: int
    device_type: str
    largest_bytes: int
    seconds: float


class RankProbe:
    """Measures with all other ranks; every rank calls the same methods in the same order."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._local = settings.rank % settings.ranks_per_node
        self.device = torch.device(settings.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self._local)
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)

    def compute(self) -> dict[str, Any]:
        """Sustained TFLOP/s of matrix products by dtype, the share that training reaches in the
        usual dtype, and bytes per second of memory; of the slowest rank."""
        on_gpu = self.device.type == "cuda"
        peaks = {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            word = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[
                f"{dtype}".removeprefix("torch.")
            ]
            # Processors mostly have no products in fp16, and training on them does not use it.
            if dtype == torch.float16 and not on_gpu:
                continue
            self._say(f"matrix products in {word}")
            peaks[word] = self._slowest(self._matmul_flops(dtype)) / 1e12
        self._say("memory")
        memory = self._slowest(self._copy_speed())
        trained = "bf16" if on_gpu else "fp32"
        self._say(f"training steps in {trained}")
        reached = self._slowest(self._training_flops(torch.bfloat16 if on_gpu else torch.float32))
        efficiency = min(1.0, reached / 1e12 / peaks[trained])
        self._say("writing and reading values as they are sent")
        coding = {}
        for wire in ("bf16", "int8", "int4"):
            coding[wire] = self._slowest(self._coding_speed(wire))
        return {
            "peak_tflops": peaks,
            "efficiency": efficiency,
            "memory_bytes_per_s": memory,
            "coding_bytes_per_s": coding,
            "trained_dtype": trained,
        }

    def host_overheads(self) -> dict[str, float]:
        """Seconds by which sharding lengthens forward and backward for each group of parameters:
        ``alone``, on one rank, and ``together``, over the ranks of a node, or over the nodes where
        each has one rank, with two all-gathers and a reduce-scatter of `group_bytes`."""
        self._say("host time of sharded groups")
        own, _ = dist.new_subgroups(group_size=1)
        plain = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_GROUPS)])
        plain_s = self._step_of(plain, None)
        found = {"alone": (self._step_of(plain, own) - plain_s) / _GROUPS}
        nodes, per_node = self._settings.nodes, self._settings.ranks_per_node
        if nodes * per_node > 1:
            size = per_node if per_node > 1 else nodes
            group, _ = dist.new_subgroups(group_size=size)
            found["together"] = (self._step_of(plain, group) - plain_s) / _GROUPS
        return {key: max(0.0, value) for key, value in found.items()}

    def collectives(self) -> dict[str, list[tuple[str, int, float]]]:
        """(collective, bytes of its larger side, seconds) of groups inside nodes and between them,
        as far as there are any."""
        nodes, per_node = self._settings.nodes, self._settings.ranks_per_node
        ranks = torch.arange(nodes * per_node).view(nodes, per_node)
        found = {}
        if per_node > 1:
            found["inside_node"] = self._axis("inside nodes", ranks)
        if nodes > 1:
            found["between_nodes"] = self._axis("between nodes", ranks.t())
        return found

    def _matmul_flops(self, dtype: torch.dtype) -> float:
        size = 8192 if self.device.type == "cuda" else 512
        left = torch.rand(size, size, device=self.device).to(dtype)
        right = torch.rand(size, size, device=self.device).to(dtype)
        return 2 * size**3 * self._per_second(lambda: left @ right)

    def _copy_speed(self) -> float:
        """Bytes read and written per second."""
        numel = (1 << 30 if self.device.type == "cuda" else 1 << 26) // 4
        source = torch.ones(numel, device=self.device)
        target = torch.empty_like(source)
        return 8 * numel * self._per_second(lambda: target.copy_(source))

    def _training_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of forward and backward of a Llama model, without any collective."""
        on_gpu = self.device.type == "cuda"
        width, length = (4096, 4096) if on_gpu else (256, 64)
        model = Llama(
            dim=width,
            n_layers=2,
            n_heads=width // 32,
            n_kv_heads=width // 32,
            hidden_dim=3 * width,
            vocab_size=4 * width,
            max_seq_len=length,
        )
        model = model.to(self.device, dtype)
        tokens = torch.randint(0, 4 * width, (1, length), device=self.device)

        def step() -> None:
            model(tokens).float().sum().backward()
            model.zero_grad()

        with FlopCounterMode(display=False) as counter:
            step()
        return counter.get_total_flops() * self._per_second(step)

    def _step_of(self, plain: nn.Module, group: dist.ProcessGroup | None) -> float:
        """Seconds of forward and backward of a copy of ``plain``, each layer of which is sharded
        over ``group``, if one is given; of the slowest rank."""
        model = copy.deepcopy(plain).to(self.device)
        if group is not None:
            mesh = DeviceMesh.from_group(group, self.device.type)
            for layer in model.children():
                fully_shard(layer, mesh=mesh)
        inputs = torch.ones(_ROWS, _WIDTH, device=self.device)

        def run() -> None:
            model(inputs).sum().backward()
            model.zero_grad()

        return self._seconds_of(run)

    def _coding_speed(self, wire: str) -> float:
        """Bytes of fp32 per second that are written as ``wire`` and read twice."""
        values = torch.randn(_CODED_VALUES, device=self.device)
        form: Wire = CastWire(torch.bfloat16)
        if wire in BITS:
            noise = BlockNoise([Piece(0, 0)], [_CODED_VALUES], self.device)
            form = BlockWire(BITS[wire], noise, nearest=wire == "int4")
        stage = contribution_stage(0)

        def run() -> None:
            sent = form.encode(form.rows([values]), 0, stage)
            total = form.decode(sent, torch.float32)
            total += form.decode(sent, torch.float32)
            form.put_back(total, [values])
            values.mul_(0.5)

        return values.nbytes * self._per_second(run)

    def _per_second(self, work: Callable[[], object]) -> float:
        """How often ``work`` runs per second, after one run to warm up."""
        work()
        dist.barrier()
        self._wait()
        begin = time.perf_counter()
        runs = 0
        while time.perf_counter() - begin < self._settings.seconds:
            work()
            self._wait()
            runs += 1
        return runs / (time.perf_counter() - begin)

    def _axis(self, words: str, rows: Tensor) -> list[tuple[str, int, float]]:
        """Of the groups that ``rows`` lists, all at once."""
        own = None
        for row in rows.tolist():
            group = dist.new_group(row)
            if self._settings.rank in row:
                own = group
        assert own is not None
        found = []
        for collective in COLLECTIVES:
            self._say(f"{collective} {words}")
            found += self._sizes(collective, own, rows.shape[1])
        return found

    def _sizes(
        self, collective: str, group: dist.ProcessGroup, ranks: int
    ) -> list[tuple[str, int, float]]:
        found = []
        size = _SMALLEST
        while size <= self._settings.largest_bytes:
            numel = size // 4 // ranks * ranks
            run = _operation(collective, numel, ranks, group, self.device)
            seconds = self._seconds_of(run)
            found.append((collective, 4 * numel, seconds))
            # The next size would take too long.
            if seconds * _GROWTH > 4 * self._settings.seconds:
                break
            size *= _GROWTH
        return found

    def _seconds_of(self, run: Callable[[], object]) -> float:
        """Of one run, the median of five measurements, each of the slowest rank."""
        run()
        first = self._timed(run, 1)
        count = max(1, min(100, int(self._settings.seconds / 5 / first)))
        return statistics.median(self._timed(run, count) for _ in range(5))

    def _timed(self, run: Callable[[], object], count: int) -> float:
        dist.barrier()
        self._wait()
        begin = time.perf_counter()
        for _ in range(count):
            run()
        self._wait()
        return -self._slowest(-(time.perf_counter() - begin) / count)

    def _slowest(self, value: float) -> float:
        """The smallest value of all ranks, on every rank."""
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return shared.item()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _say(self, what: str) -> None:
        if self._settings.rank == 0:
            print(f"measuring: {what}", file=sys.stderr, flush=True)


def _operation(
    collective: str, numel: int, ranks: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """One call of ``collective`` whose larger side has ``numel`` elements of fp32."""
    whole = torch.ones(numel, device=device)
    part = torch.ones(numel // ranks, device=device)
    if collective == "all_gather":
        return lambda: dist.all_gather_single(whole, part, group=group)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, whole, group=group)
    if collective == "all_to_all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)
    # A mean, so that repeated sums do not overflow.
    return lambda: dist.all_reduce(whole, dist.ReduceOp.AVG, group=group)


def main() -> int:
    """The process of one rank. Returns the exit code. A failure is a line of JSON too."""
    settings = RankSettings(**json.loads(sys.stdin.readline()))
    try:
        result = _measure(settings)
    except (RuntimeError, ConfigError) as error:
        print(json.dumps({"problem": str(error).partition("\n")[0]}), flush=True)
        return 1
    if settings.rank == 0:
        print(json.dumps(result), flush=True)
    return 0


def _measure(settings: RankSettings) -> dict[str, Any]:
    store = StoreClient(settings.address, settings.secret, timeout_s=_TIMEOUT_S)
    dist.init_process_group(
        "nccl" if settings.device_type == "cuda" else "gloo",
        store=store,
        rank=settings.rank,
        world_size=settings.nodes * settings.ranks_per_node,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    probe = RankProbe(settings)
    result = {
        **probe.compute(),
        "host_overheads": probe.host_overheads(),
        "group_bytes": 4 * _WIDTH * (_WIDTH + 1),
        "collectives": probe.collectives(),
    }
    dist.barrier()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    sys.exit(main())

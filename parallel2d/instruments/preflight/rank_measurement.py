"""Measures ranks and the links between them, on all ranks together: `RankMeasurement`.

All ranks measure at the same time, so that they share the processors, the memory and the network of
a host as in training. The result of the slowest rank is used.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from parallel2d.base.device import synchronize
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather, reduce
from parallel2d.base.runtime import Runtime
from parallel2d.instruments.preflight.verdict import NodeFacts, RankLink
from parallel2d.models.llama import Llama
from parallel2d.parallel.cost.collectives import (
    GroupPlacement,
    collective_steps,
    placements,
    sent_bytes,
)
from parallel2d.parallel.mesh import group_of, mesh_shape
from parallel2d.parallel.parallelize.precision import DTYPES

# Arguments: a tensor, a rank's shard of the tensor, another tensor of the same shape, a group
_COLLECTIVES: dict[str, Callable[..., object]] = {
    "all_gather": lambda whole, part, _, group: dist.all_gather_single(whole, part, group=group),
    "reduce_scatter": lambda whole, part, _, group: dist.reduce_scatter_single(
        part, whole, group=group
    ),
    # A mean, because repeated sums would overflow
    "all_reduce": lambda whole, _, __, group: dist.all_reduce(whole, dist.ReduceOp.AVG, group),
    "all_to_all": lambda whole, _, other, group: dist.all_to_all_single(other, whole, group=group),
}
_SMALLEST, _GROWTH = 4096, 8
# Measurements per link. The best is used, because other traffic may disturb a measurement.
_TRIES = 3


class CollectiveSample(NamedTuple):
    """One measured collective."""

    collective: str
    whole_bytes: int  # bytes of the larger of input and output
    steps: float  # number of latencies
    # bytes in one direction, on the link of the rank inside its node or on the link of the node
    link_bytes: float
    seconds: float


class FittedLink(NamedTuple):
    """Link in the planner's model of a collective: steps times latency plus bytes over bandwidth
    (`cost.collectives`). The bandwidth is infinite if larger collectives took no longer than
    smaller collectives."""

    bytes_per_s: float
    latency_s: float


class RankMeasurement:
    """Measurement of this rank together with all other ranks. All ranks must call the same methods
    in the same order.

    Args:
        seconds: duration of each measurement.
        largest_bytes: size of the largest collective.
    """

    def __init__(
        self, runtime: Runtime, mesh: DeviceMesh, seconds: float, largest_bytes: float
    ) -> None:
        self._device, self._mesh, self._seconds = runtime.device, mesh, seconds
        sizes = []
        for power in range(7):
            sizes.append(_SMALLEST * _GROWTH**power)
        self._sizes = sizes[: bisect_right(sizes, largest_bytes)]
        self._on_gpu = self._device.type != "cpu"
        self._usual = "bf16" if self._on_gpu else "fp32"
        self._places: dict[str, GroupPlacement] = {}
        # Axis -> samples, for axes with several ranks
        self.samples: dict[str, list[CollectiveSample]] = {}
        self.fits: dict[str, FittedLink] = {}
        self.links: dict[str, list[RankLink]] = {}
        found = placements(mesh_shape(mesh).place(runtime.topology), runtime.topology)
        for axis, place in found.items():
            if place.ranks > 1:
                self._places[axis] = place
                self.samples[axis] = self._collectives(axis)
                self.fits[axis] = fit_link(self.samples[axis])
                self.links[axis] = self._neighbours(axis)
        self.flops = self._flops(self._usual)

    def cluster_keys(self, nodes: Sequence[NodeFacts]) -> dict[str, Any]:
        """Measure the figures that do not belong to an axis, and return the keys of `ClusterConfig`
        except for its name. Raises `ConfigError` if nodes differ, or if an axis uses links inside
        nodes and between nodes."""
        if len({node.ranks for node in nodes}) > 1:
            raise ConfigError(
                "--write: nodes have different numbers of ranks: give all one --nproc"
            )
        axes = self._axes_of_links()
        device = {
            "name": nodes[0].device,
            "type": self._device.type,
            "memory_gib": min(node.device_bytes for node in nodes) / 2**30,
            **self._compute(),
        }
        keys = {"nodes": len(nodes), "ranks_per_node": nodes[0].ranks, "device": device}
        for key, axis in axes.items():
            link = self.fits[axis]
            if math.isinf(link.bytes_per_s):
                raise ConfigError(f"--write: {key}: more bytes took no longer: give more --seconds")
            gbit = link.bytes_per_s * 8 / 1e9
            keys[key] = {"up_gbit": gbit, "down_gbit": gbit, "latency_us": link.latency_s * 1e6}
        return keys

    def _axes_of_links(self) -> dict[str, str]:
        """Return kind of link -> an axis with groups that use only links of this kind. The shard
        axis is preferred."""
        found = {}
        for axis in sorted(self._places, key=lambda axis: axis == "shard"):
            place = self._places[axis]
            if not place.is_inside and place.ranks > place.hosts:
                raise ConfigError(
                    f"--write: groups of the {axis} axis use links inside nodes and between them, "
                    "which cannot be distinguished: omit strategy and mesh"
                )
            found["inside_node" if place.is_inside else "between_nodes"] = axis
        # With one rank per node no group uses links inside a node.
        if "between_nodes" in found:
            found.setdefault("inside_node", found["between_nodes"])
        return found

    def _flops(self, word: str) -> list[float]:
        """Return the FLOP/s of matrix products in the dtype ``word``, by rank."""
        size = 8192 if self._on_gpu else 512
        left = torch.rand(size, size, device=self._device).to(DTYPES[word])
        right = left.t().contiguous()
        return all_gather(2 * size**3 / self._seconds_of(lambda: left @ right))

    def _collectives(self, axis: str) -> list[CollectiveSample]:
        """Measure the collectives of training on all groups of ``axis`` at the same time."""
        group, place, found = group_of(self._mesh, axis), self._places[axis], []
        for name, call in _COLLECTIVES.items():
            for size in self._sizes:
                part = torch.ones(size // 4 // group.size(), device=self._device)
                whole = torch.ones(part.numel() * group.size(), device=self._device)
                other = torch.empty_like(whole)
                seconds = self._slowest(functools.partial(call, whole, part, other, group))
                outer, inner = collective_steps(name, place, self._device.type)
                sent = sent_bytes(name, whole.nbytes, place.ranks, self._device.type)
                steps = inner if place.is_inside else outer
                carried = sent if place.is_inside else place.groups_per_host * sent
                found.append(CollectiveSample(name, whole.nbytes, steps, carried, seconds))
                # Measure at least two sizes. Stop when the next size would take too long.
                if size > self._sizes[0] and seconds * _GROWTH > 4 * self._seconds:
                    break
        return found

    def _neighbours(self, axis: str) -> list[RankLink]:
        """Measure the link from each rank in the groups of ``axis`` to the next rank. Two links
        with a common rank are not measured at the same time: first the even links, then the odd
        links, and for an odd number of ranks the last link."""
        group = group_of(self._mesh, axis)
        ranks = dist.get_process_group_ranks(group)
        own = group.rank()
        turns = []
        for number in range(len(ranks)):
            turns.append(number % 2)
        turns[-1] = 2 if len(ranks) % 2 else 1
        payload = torch.zeros(self.samples[axis][-1].whole_bytes // 4, device=self._device)
        fastest = float("inf")
        for turn in [*range(3)] * _TRIES:
            self._meet()
            begin = time.perf_counter()
            if turns[own] == turn:
                dist.send(payload, ranks[(own + 1) % len(ranks)], group)
            elif turns[own - 1] == turn:
                # The receiver measures the time: a send may return while the bytes are still in a
                # buffer of the kernel.
                dist.recv(payload, ranks[own - 1], group)
                self._wait()
                fastest = min(fastest, time.perf_counter() - begin)
        return sorted(all_gather((ranks[own - 1], ranks[own], payload.nbytes / fastest)))

    def _compute(self) -> dict[str, Any]:
        """Return the keys of `DeviceConfig`, for the slowest rank."""
        # Most CPUs have no matrix products in fp16, and training on CPUs does not use it.
        words = []
        for word in DTYPES:
            if word != "fp16" or self._on_gpu:
                words.append(word)
        peaks = {}
        for word in words:
            peaks[word] = min(self._flops(word)) / 1e12
        source = torch.ones(1 << 28 if self._on_gpu else 1 << 24, device=self._device)
        target = torch.empty_like(source)
        memory = 2 * source.nbytes / self._slowest(lambda: target.copy_(source))
        return {
            "memory_gb_per_s": memory / 1e9,
            "peak_tflops": peaks,
            "efficiency": min(1.0, self._training_flops() / 1e12 / peaks[self._usual]),
        }

    def _training_flops(self) -> float:
        """Return the FLOP/s of forward and backward of a Llama model, without collectives."""
        width, length = (4096, 4096) if self._on_gpu else (256, 64)
        model = Llama(
            dim=width,
            n_layers=2,
            n_heads=width // 32,
            n_kv_heads=width // 32,
            hidden_dim=3 * width,
            vocab_size=4 * width,
            max_seq_len=length,
        ).to(self._device, DTYPES[self._usual])
        tokens = torch.randint(0, 4 * width, (1, length), device=self._device)
        with FlopCounterMode(display=False) as counter:
            model(tokens).float().sum().backward()

        def step() -> None:
            model(tokens).float().sum().backward()
            model.zero_grad()

        return counter.get_total_flops() / self._slowest(step)

    def _slowest(self, run: Callable[[], object]) -> float:
        return self._largest(self._seconds_of(run))

    def _seconds_of(self, run: Callable[[], object]) -> float:
        """Return the seconds of one ``run`` on this rank, as the median of five measurements. All
        ranks measure at the same time."""
        run()
        count, found = 1, []
        for _ in range(6):
            self._meet()
            begin = time.perf_counter()
            for _ in range(count):
                run()
            self._wait()
            found.append((time.perf_counter() - begin) / count)
            if len(found) == 1:
                count = max(1, min(100, int(self._seconds / 5 / self._largest(found[0]))))
        return statistics.median(found[1:])

    def _largest(self, value: float) -> float:
        return float(reduce(torch.tensor(value, dtype=torch.float64), op="max"))

    def _meet(self) -> None:
        """Wait until the device has finished its work, and until all ranks have called this
        method."""
        self._wait()
        self._largest(0.0)

    def _wait(self) -> None:
        synchronize(self._device.type)


def fit_link(samples: Sequence[CollectiveSample]) -> FittedLink:
    """Fit a bandwidth and a latency. The bandwidth is computed from the smallest and the largest
    size of each collective, and the latency from the remaining time of all samples. Bandwidth and
    latency are medians, so that a few disturbed measurements have no effect."""
    by_name = defaultdict(list)
    for sample in samples:
        by_name[sample.collective].append(sample)
    slopes = []
    for small, *_, large in by_name.values():
        slopes.append((large.seconds - small.seconds) / (large.link_bytes - small.link_bytes))
    per_byte = max(0.0, statistics.median(slopes))
    rest = []
    for each in samples:
        rest.append((each.seconds - per_byte * each.link_bytes) / each.steps)
    bandwidth = 1 / per_byte if per_byte else math.inf
    return FittedLink(bandwidth, max(0.0, statistics.median(rest)))

"""The ``cluster`` and ``plan`` sections: the machines that a job is planned for, whose presets are
in ``conf/cluster``, and how it is planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from parallel2d.config.options import option


@dataclass
class PeakConfig:
    """Peak TFLOP/s (1e12 per second) of one device for dense matrix products, by the dtype of the
    inputs. ``null``: not known, or not supported."""

    fp64: float | None = option(None, above=0, null=True)  # TFLOP/s of products in fp64
    # TFLOP/s of products in fp32 as torch computes unless told otherwise, without TF32
    fp32: float | None = option(None, above=0, null=True)
    bf16: float | None = option(None, above=0, null=True)  # TFLOP/s of products in bf16
    fp16: float | None = option(None, above=0, null=True)  # TFLOP/s of products in fp16
    fp8: float | None = option(None, above=0, null=True)  # TFLOP/s of products in 8-bit floats


@dataclass
class CodingConfig:
    """1e9 bytes per second of values in fp32 that a device writes in the form in which
    ``sync.wire`` sends them, and reads twice. ``null``: they take no time."""

    bf16: float | None = option(None, above=0, null=True)  # 1e9 bytes of fp32 per second, as bf16
    int8: float | None = option(None, above=0, null=True)  # 1e9 bytes of fp32 per second, as int8
    int4: float | None = option(None, above=0, null=True)  # 1e9 bytes of fp32 per second, as int4


@dataclass
class DeviceConfig:
    """One device. ``null``: not known; what needs it is not computed."""

    name: str = "unknown"  # Its name; that of a GPU chooses the efficiency of compute
    # Decides which collectives there are; auto = that of this machine
    type: str = option("auto", choices=("auto", "cuda", "cpu"))
    memory_gib: float | None = option(None, above=0, null=True)  # All its memory, in 2^30 bytes
    # Bandwidth of its own memory, in 1e9 bytes per second
    memory_gb_per_s: float | None = option(None, above=0, null=True)
    peak_tflops: PeakConfig = field(default_factory=PeakConfig)
    # share of the peak that compute reaches in training, as measured; null: what published figures
    # say
    efficiency: float | None = option(None, above=0, maximum=1, null=True)
    # Microseconds of the host for each sharded group of parameters; null = none. Counts on CPU
    # alone, where the host has no device that runs meanwhile
    group_overhead_us: float | None = option(None, minimum=0, null=True)
    # Microseconds of a collective beside latency and bytes, as ranks are not ready at once; null =
    # none. Counts on CPU alone
    wait_overhead_us: float | None = option(None, minimum=0, null=True)
    coding_gb_per_s: CodingConfig = field(default_factory=CodingConfig)


@dataclass
class LinkConfig:
    """One end's connection. Both directions can be used at once. ``null``: not known."""

    # 1e9 bits per second that one end can send
    up_gbit: float | None = option(None, above=0, null=True)
    # 1e9 bits per second that one end can receive
    down_gbit: float | None = option(None, above=0, null=True)
    # Microseconds from one end to another, for one step of a collective
    latency_us: float | None = option(None, minimum=0, null=True)

    @property
    def bytes_per_s(self) -> float | None:
        """What a collective can use: its ranks send as much as they receive, so the slower
        direction decides. None where it is not known."""
        if self.up_gbit is None or self.down_gbit is None:
            return None
        return min(self.up_gbit, self.down_gbit) * 1e9 / 8


@dataclass
class ClusterConfig:
    """The machines that `python -m parallel2d.plan` plans for. Training takes the machines that it
    finds."""

    name: str = "local"  # What reports call these machines
    # Number of nodes; auto = the largest number of launch.nnodes
    nodes: int | str = option("auto", minimum=1, auto=True)
    # Ranks of each node; auto = launch.nproc_per_node
    ranks_per_node: int | str = option("auto", minimum=1, auto=True)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    inside_node: LinkConfig = field(default_factory=LinkConfig)  # of one rank
    between_nodes: LinkConfig = field(default_factory=LinkConfig)  # of a node: its ranks share it
    # Hours between two failures of the same node; a job of n nodes fails n times as often
    node_mtbf_hours: float | None = option(None, above=0, null=True)


@dataclass
class PlanConfig:
    """What `python -m parallel2d.plan` does, and ``train`` instead of training."""

    # Print what this very command would do, and start nothing: mesh, memory, bytes per axis
    dry_run: bool = False
    # Trace the peak of the parallelized model beside the predicted one; takes seconds to a minute
    verify: bool = False
    # A new file for all layouts of a search, as JSON
    json: str | None = None
    # Best layouts of several methods on 8 to 16,384 ranks. weak = the global batch grows with the
    # ranks; strong = it stays; null = one search
    scaling: str | None = option(None, choices=("weak", "strong"), null=True)
    # Share of a device's memory that a layout leaves free: for its context, NCCL and fragments
    free_memory: float = option(0.1, minimum=0, maximum=0.9)


def cluster_problems(cluster: ClusterConfig) -> Iterator[str]:
    """Yields a line for each figure without the one that gives it a meaning."""
    for key in ("inside_node", "between_nodes"):
        link: LinkConfig = getattr(cluster, key)
        missing = [item.name for item in fields(link) if getattr(link, item.name) is None]
        # All three or none: a bandwidth without a latency gives no time.
        if missing and len(missing) < len(fields(link)):
            known = [item.name for item in fields(link) if item.name not in missing]
            yield (
                f"cluster.{key} has {', '.join(known)} and no {', '.join(missing)}: a link needs "
                "all three, or none if it is not known"
            )


def plan_problems(plan: PlanConfig) -> Iterator[str]:
    """Yields a line for each key of a search beside the plan of one layout."""
    if plan.dry_run and plan.scaling is not None:
        yield (
            f"plan.scaling={plan.scaling} is about several layouts, and plan.dry_run=true plans "
            "the one that is given: omit one of the two"
        )

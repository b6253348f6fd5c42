"""The ``cluster`` section describes the machines for which a job is planned (presets are in
``conf/cluster``). The ``plan`` section has the options of the planner."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel2d.base.config.options import option


@dataclass
class PeakConfig:
    """Peak TFLOP/s (1e12 per second) of one device for dense matrix products, by the dtype of the
    inputs. ``null``: not known, or not supported."""

    fp64: float | None = option(None, "TFLOP/s of products in fp64", above=0)
    fp32: float | None = option(None, "TFLOP/s of products in fp32, without TF32", above=0)
    bf16: float | None = option(None, "TFLOP/s of products in bf16", above=0)
    fp16: float | None = option(None, "TFLOP/s of products in fp16", above=0)


@dataclass
class DeviceConfig:
    """One device. ``null`` means not known; figures that need the value are not computed."""

    name: str = option("unknown", "Its name; that of a GPU chooses the efficiency of compute")
    type: str = option("auto", "Decides which collectives it has", choices=("auto", "cuda", "cpu"))
    memory_gib: float | None = option(None, "All its memory, in 2^30 bytes", above=0)
    memory_gb_per_s: float | None = option(None, "1e9 bytes per second of its own memory", above=0)
    peak_tflops: PeakConfig = field(default_factory=PeakConfig)
    efficiency: float | None = option(
        None, "Share of the peak that training reaches; null: as published", above=0, max=1
    )


@dataclass
class LinkConfig:
    """Full-duplex connection of one end. ``null``: not known; then all three fields must be null,
    because a bandwidth without a latency gives no time."""

    up_gbit: float | None = option(
        None, "1e9 bits per second that one end sends", above=0, needs="down_gbit"
    )
    down_gbit: float | None = option(
        None, "1e9 bits per second that one end gets", above=0, needs="latency_us"
    )
    latency_us: float | None = option(
        None, "Microseconds that a step of a collective adds", min=0, needs="up_gbit"
    )

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth of a collective, or None if it is not known. In a collective, a rank sends as
        much as it receives, so the slower direction determines the bandwidth."""
        if self.up_gbit is None or self.down_gbit is None:
            return None
        return min(self.up_gbit, self.down_gbit) * 1e9 / 8


@dataclass
class ClusterConfig:
    """The machines that `python -m parallel2d.plan` plans for; training uses the machines that it
    detects."""

    name: str = option("local", "Name of these machines in reports")
    nodes: int | str = option("auto", "Number of nodes; auto = the largest of launch.nnodes", min=1)
    ranks_per_node: int | str = option("auto", "Ranks of each; auto = launch.nproc_per_node", min=1)
    # Found by python -m parallel2d.preflight --self-check
    replica_backend: str = option(
        "none",
        "The backend with which training continues on its GPUs after the loss of a replica",
        choices=("none", "gloo", "nccl2"),
    )
    device: DeviceConfig = field(default_factory=DeviceConfig)
    inside_node: LinkConfig = field(default_factory=LinkConfig)  # of one rank
    between_nodes: LinkConfig = field(default_factory=LinkConfig)  # of a node: its ranks share it


@dataclass
class PlanConfig:
    """Options of `python -m parallel2d.plan`, and of the planner in ``train``."""

    dry_run: bool = option(False, "Print mesh, memory and bytes per axis, and start nothing")
    verify: bool = option(False, "Trace the peak of the parallelized model too; up to a minute")
    json: str | None = option(None, "A new file for all layouts of a search, as JSON")
    scaling: str | None = option(
        None, "Layouts on 8 to 16,384 ranks; weak: the batch grows", choices=("weak", "strong")
    )
    free_memory: float = option(0.1, "Share left free, for NCCL and fragments", between=(0, 0.9))

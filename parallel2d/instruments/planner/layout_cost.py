"""Cost of a job per rank and step, on the machines of ``cluster``. `cost_of` computes the cost of
one layout, and `JobCosts` the costs of many layouts of one job.

The cost is computed from a `Layout`, the class that training applies. Files of data are not opened.

[Note: a traced peak] With ``plan.verify=true`` the layout is applied on a fake process group, and
forward and backward run on fake tensors under torch's memory tracker. The traced peak contains all
allocations of the step, with the kernels of the device type ``cpu``. The traced peak does not
contain the rounding to 512 bytes and the fragmentation of a GPU's allocator, nor the buffers of
NCCL and of matrix libraries. Attention runs torch's CPU kernel, which saves as many bytes for
backward as flash attention.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import PRECISIONS, CompileConfig, TrainConfig
from parallel2d.base.device import accelerator_type
from parallel2d.base.errors import ConfigError
from parallel2d.base.topology import Topology
from parallel2d.launching.processes import workers_per_node
from parallel2d.parallel.chunked_head import ChunkedHead
from parallel2d.parallel.cost.activation_profile import (
    LossOf,
    MemoryEvent,
    StepLoss,
    profile_activations,
)
from parallel2d.parallel.cost.collectives import GroupPlacement, placements
from parallel2d.parallel.cost.equal_blocks import by_blocks
from parallel2d.parallel.cost.fake_group import fake_process_group
from parallel2d.parallel.cost.flops import count_flops
from parallel2d.parallel.cost.meta_copy import TensorTraffic
from parallel2d.parallel.cost.predicted_peak import PredictedMemory, predict_peak
from parallel2d.parallel.cost.state_memory import StateBytes, state_bytes
from parallel2d.parallel.cost.step_time import StepEstimate, estimate_step
from parallel2d.parallel.cost.traffic import predicted_bytes
from parallel2d.parallel.mesh import place_mesh
from parallel2d.parallel.mesh_sizes import MeshShape, check_placement, resolve_mesh
from parallel2d.parallel.parallelize import apply_on_fake_tensors
from parallel2d.parallel.parallelize.layout import Layout, SampleShape
from parallel2d.parallel.parallelize.preconditions import check_parameters
from parallel2d.parallel.sync import accumulate
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.training.assemble import lay_out, plan_batches
from parallel2d.training.data.batch import token_sequences
from parallel2d.training.data.custom_data import CustomSamples
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.loss.model_loss import ModelLoss
from parallel2d.training.model_families import ModelParts, build_model, name_of_head
from parallel2d.training.optimizer import build_optimizer, plan_groups
from parallel2d.training.run_description import count_activations
from parallel2d.training.training_data import check_reads

_GIB = 2**30
_MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class LayoutCost:
    """The cost of one layout. The memory is the memory of the rank with the highest peak. If ranks
    send different numbers of bytes, the cost has the bytes of the first rank."""

    layout: Layout
    topology: Topology
    places: Mapping[str, GroupPlacement]  # axis -> placement of its groups
    model: str
    parameters: int  # number of elements of all parameters of the model
    sample: SampleShape
    states: StateBytes
    moved: Mapping[str, float]  # ``comm/AXIS/bytes`` -> bytes that a rank sends per step
    flops: int | None  # FLOPs of one sample, forward and backward; None: not known
    time: StepEstimate | str  # a text if the time is not known; it names the missing figures
    predicted: PredictedMemory | str = ""  # a text if the peak is not known; it is the reason
    traced: int | None = None  # bytes at the peak, with ``plan.verify=true``

    @property
    def shape(self) -> MeshShape:
        return self.layout.shape

    @property
    def needed(self) -> int:
        """Bytes that the rank with the highest peak needs: the traced peak, otherwise the predicted
        peak, otherwise only the states."""
        if self.traced is not None:
            return self.traced
        if isinstance(self.predicted, PredictedMemory):
            return self.predicted.peak
        return self.states.total

    @property
    def has_peak(self) -> bool:
        """True if `needed` is the peak of a step; False if it contains only the states."""
        return self.traced is not None or isinstance(self.predicted, PredictedMemory)


def cost_of(config: TrainConfig) -> LayoutCost:
    """Return the cost of the job. With ``plan.verify=true`` the peak is traced too. Raises
    `ConfigError` for a job that cannot run, if this is known without data and devices."""
    costs = JobCosts(config)
    cost = costs.with_peak(config, costs.cost(config))
    return costs.traced(config, cost) if config.plan.verify else cost


def seconds_in_bf16(config: TrainConfig) -> float | None:
    """Return the seconds of a step of the same layout with ``precision=bf16``; None if the job
    already computes in 16 bits, or if the time is not known."""
    if config.precision.param not in ("fp32", "fp64"):
        return None
    config = dataclasses.replace(config, precision=PRECISIONS["bf16"])
    time = JobCosts(config).cost(config).time
    return None if isinstance(time, str) else time.seconds.total


def planned_topology(config: TrainConfig) -> Topology:
    """Return a topology of equal hosts, from ``cluster.nodes`` and ``cluster.ranks_per_node``;
    ``auto`` is replaced by the launcher's values. Raises `ConfigError` for too many ranks."""
    nodes, ranks = config.cluster.nodes, config.cluster.ranks_per_node
    if nodes == "auto":
        _, nodes = config.launch.node_range
    if ranks == "auto":
        ranks = workers_per_node(config.launch)
    nodes, ranks = int(nodes), int(ranks)
    if nodes * ranks > _MOST_RANKS:
        raise ConfigError(
            f"cluster.nodes={nodes} x cluster.ranks_per_node={ranks} are more than {_MOST_RANKS:,} "
            "ranks, which no plan is made for"
        )
    return Topology.equal_hosts(nodes, ranks)


def excess(config: TrainConfig, cost: LayoutCost) -> str | None:
    """Return the needed and the available memory as text if the job does not fit into memory. None
    if it fits, or if the memory is not known."""
    memory = config.cluster.device.memory_gib
    # With offloading the states are in the memory of the host.
    if memory is None or config.cpu_offload:
        return None
    usable = memory * (1 - config.plan.free_memory) * _GIB
    if cost.needed <= usable:
        return None
    if usable < _GIB:
        return f"{cost.needed / 2**20:.2f} of {usable / 2**20:.2f} MiB"
    return f"{cost.needed / _GIB:.1f} of {usable / _GIB:.1f} GiB"


class JobCosts:
    """Costs of one model, batch and precision on one cluster, for any layout. Results that are
    equal for several layouts are computed once. Raises `ConfigError` for a job that cannot run with
    any layout."""

    def __init__(self, config: TrainConfig) -> None:
        self.topology = planned_topology(config)
        self.parts = build_model(config.model)
        self._device_type = config.cluster.device.type
        if self._device_type == "auto":
            self._device_type = accelerator_type()
        module = self.parts.module
        check_parameters(module)
        plan_groups(module, config.optimizer)
        self._sample = _planned_sample(config, self.parts)
        self._parameters = sum(map(torch.Tensor.numel, module.parameters()))
        example = functools.partial(self._sample.example, 1)
        self._flops = count_flops(module, example, ModelLoss(config, self.parts).value)
        self._places: dict[MeshShape, Mapping[str, GroupPlacement]] = {}
        # Caches. The inner axes are the context and tensor axes. (sizes of the inner axes,
        # bucketing) -> layout with one rank on the other axes
        self._layouts: dict[tuple[int, int, str], Layout] = {}
        # (sizes of the inner axes, recomputation) -> traffic, and number of samples of the counted
        # micro-batch
        self._over_tensor: dict[tuple[int, int, str], tuple[TensorTraffic | None, int]] = {}
        # (sizes of the inner axes, recomputation, bucketing, samples) -> events, or the reason
        self._profiles: dict[tuple[int, int, str, str, int], list[MemoryEvent] | str] = {}

    def on(self, config: TrainConfig) -> JobCosts:
        """Return the costs on the nodes of ``config``, with the cached results of this object."""
        other = copy.copy(self)
        other.topology = planned_topology(config)
        other._places = {}
        return other

    def cost(self, config: TrainConfig) -> LayoutCost:
        """Return the cost of one layout, without its peak.

        Args:
            config: may differ from the constructor's in strategy, mesh, bucketing, recomputation,
                micro-batch and sync.

        Raises:
            ConfigError: for a layout that cannot run.
        """
        shape = resolve_mesh(config, self.topology)
        # This check is first, because it refuses most of the impossible layouts of a search.
        batches = plan_batches(config, shape, data_rank=0, pad=False)
        places = self._place(config, shape)
        layout = self._lay_out(config, shape, batches)
        counted = self._count_inner_axes(config, layout)
        inside = {} if counted is None else counted.of_step(layout)
        return LayoutCost(
            layout=layout,
            topology=self.topology,
            places=places,
            model=type(self.parts.module).__name__,
            parameters=self._parameters,
            sample=self._sample,
            states=state_bytes(layout),
            moved=predicted_bytes(layout, inside),
            flops=self._flops,
            time=estimate_step(layout, config.cluster, places, inside, self._flops),
        )

    def with_peak(
        self, config: TrainConfig, cost: LayoutCost, *, measures: bool = True
    ) -> LayoutCost:
        """Return the ``cost`` of ``config`` with its predicted peak, or with the reason why the
        peak is not known. ``measures``: True to run a step on fake tensors where this is needed."""
        profile = self._profile(config, cost.layout, measures)
        predicted = profile if isinstance(profile, str) else predict_peak(profile, cost.layout)
        return dataclasses.replace(cost, predicted=predicted)

    def traced(self, config: TrainConfig, cost: LayoutCost) -> LayoutCost:
        """Return the ``cost`` of ``config`` with a traced peak. Raises `ConfigError` if tracing
        fails."""
        if reason := _unknown_peak(config):
            raise ConfigError(f"plan.verify=true: {reason}; use plan.verify=false")
        # Tracing needs a separate model, because it consumes the model.
        parts = build_model(config.model)
        traced = _trace_step(parts, cost.layout, self.topology, _loss_of(config, parts))
        return dataclasses.replace(cost, traced=traced)

    def _place(self, config: TrainConfig, shape: MeshShape) -> Mapping[str, GroupPlacement]:
        """Return the placement of each axis. Raises `ConfigError` for an axis that crosses hosts
        although its groups would fit in one host."""
        if shape not in self._places:
            ranks = shape.place(self.topology)
            check_placement(ranks, self.topology, config.mesh.allow_cross_node)
            self._places[shape] = placements(ranks, self.topology)
        return self._places[shape]

    def _lay_out(self, config: TrainConfig, shape: MeshShape, batches: BatchPlan) -> Layout:
        key = (shape.tensor, shape.context, f"{config.bucketing}")
        if key not in self._layouts:
            with _inner_mesh(shape) as mesh:
                self._layouts[key] = self._resolve(config, self.parts, shape, mesh, batches)
        alone = self._layouts[key]
        workload = dataclasses.replace(
            alone.workload,
            micro_batch_size=batches.micro_batch_size,
            accumulation=batches.accumulation,
        )
        # Groups do not depend on the sizes of the other axes.
        return dataclasses.replace(alone, config=config.parallel(), shape=shape, workload=workload)

    def _resolve(
        self,
        config: TrainConfig,
        parts: ModelParts,
        shape: MeshShape,
        mesh: DeviceMesh | None,
        batches: BatchPlan,
    ) -> Layout:
        inner = shape.inner
        return lay_out(config, parts, inner, batches, self._sample, self._device_type, mesh)

    def _count_inner_axes(self, config: TrainConfig, layout: Layout) -> TensorTraffic | None:
        """Return the traffic of a micro-batch over the tensor and context axes; None if it is not
        known. The traffic is counted once per sizes of these axes and recomputation, and multiplied
        for other numbers of samples."""
        shape, work = layout.shape, layout.workload
        if layout.tensor_plan is None and shape.context == 1:
            return None
        key = (shape.tensor, shape.context, f"{config.activation_checkpointing}")
        if key not in self._over_tensor:
            batches = plan_batches(config, layout.shape, data_rank=0, pad=False)
            with _inner_mesh(shape) as mesh:
                assert mesh is not None

                def count(part: nn.Module) -> dict[str, float] | None:
                    parts = dataclasses.replace(self.parts, module=part)
                    shorter = self._resolve(config, parts, shape, mesh, batches)
                    traffic = count_activations(config, parts, mesh, shorter)
                    return None if traffic is None else traffic._asdict()

                found = by_blocks(self.parts.module, count)
            counted = TensorTraffic(**found) if found else None
            self._over_tensor[key] = counted, work.micro_batch_size
        counted, samples = self._over_tensor[key]
        if counted is None:
            return None
        more = work.micro_batch_size / samples
        return counted._replace(
            passes_bytes=counted.passes_bytes * more, context_bytes=counted.context_bytes * more
        )

    def _profile(
        self, config: TrainConfig, layout: Layout, measures: bool
    ) -> list[MemoryEvent] | str:
        shape, samples = layout.shape, layout.workload.micro_batch_size
        how = f"{config.activation_checkpointing}", f"{config.bucketing}"
        key = (shape.tensor, shape.context, *how, samples)
        if reason := _unknown_peak(config):
            return reason
        if key not in self._profiles:
            if not measures:
                return "it was not computed"
            with _inner_mesh(shape) as mesh:
                self._profiles[key] = profile_activations(
                    self.parts.module, _loss_of(config, self.parts), mesh, layout
                )
        return self._profiles[key]


def _unknown_peak(config: TrainConfig) -> str:
    """Return the reason why the peak is not known; empty if it is known."""
    if config.cpu_offload:
        return "with cpu_offload=true the peak is not known"
    if config.activation_checkpointing.offloads:
        return "with activation offload the peak is not known"
    if config.precision.float8 != "none":
        return f"with precision.float8={config.precision.float8} the peak is not known"
    if config.activation_checkpointing.compiler_budget is not None:
        return "with activation_checkpointing=budget the compiler decides about the peak"
    return ""


@contextlib.contextmanager
def _inner_mesh(shape: MeshShape) -> Iterator[DeviceMesh | None]:
    """Yield a mesh with only the context and tensor axes of ``shape``, on a fake process group;
    None without these axes. The other axes are omitted because a large mesh takes long, and the
    operations of a model do not depend on them."""
    inner = shape.inner
    if inner.world_size == 1:
        yield None
        return
    with fake_process_group(inner.world_size):
        topology = Topology.equal_hosts(1, inner.world_size)
        yield place_mesh(inner, topology, allow_cross_node=False, device_type="cpu")


def _loss_of(config: TrainConfig, parts: ModelParts) -> LossOf:
    """Return the loss function of training. Raises `ConfigError` if it cannot be chunked."""
    head, chunk = name_of_head(config, parts), config.train.loss_chunk
    loss = ModelLoss(config, parts)

    def loss_of(model: nn.Module, inputs: Any, targets: Any) -> StepLoss:
        if head is None or chunk is None:
            return functools.partial(loss.value, model)
        chunked = ChunkedHead(model, chunk, head)
        args, named = loss.arguments(inputs, targets)
        # Run the head once, to record the operations of the model on its logits.
        with torch.no_grad():
            chunked.record(targets, *args, **named)

        def in_chunks(inputs: Any, targets: Any) -> Tensor:
            args, named = loss.arguments(inputs, targets)
            return chunked.loss(targets, *args, **named)

        return in_chunks

    return loss_of


def _planned_sample(config: TrainConfig, parts: ModelParts) -> SampleShape:
    """Return the shape of a sample of the configured data; for a custom data set, of its first
    sample. Raises `ConfigError` for data that the model does not read."""
    check_reads(config, parts)
    if config.data.has_own_samples:
        return CustomSamples(config.data).shape
    return token_sequences(config.train.seq_len)


def _trace_step(parts: ModelParts, layout: Layout, topology: Topology, loss_of: LossOf) -> int:
    """Return the peak bytes of a step: the traced peak of one global batch, plus the optimizer
    state of the rank with the largest state, because this state exists in every step except the
    first. ``parts.module`` cannot be used afterwards.

    See [Note: a traced peak]. At most two micro-batches run, because later micro-batches need the
    same memory as the second. Raises `ConfigError` for a model that cannot run on fake tensors.
    """
    config, workload = layout.config, layout.workload
    # Blocks are traced without compilation, which needs tensors with values.
    plain = dataclasses.replace(layout, config=dataclasses.replace(config, compile=CompileConfig()))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_process_group(layout.shape.world_size), warnings.catch_warnings():
        # Some operators warn about fake tensors, once per process.
        warnings.simplefilter("ignore")
        mesh = place_mesh(layout.shape, topology, config.allow_cross_node, "cpu")
        model = apply_on_fake_tensors(plain, parts.module, mesh, fake, topology)
        with fake:
            build_optimizer(model, workload.optimizer)
            for engine in engines_in(model):
                engine.defer_status()
            batches = []
            for _ in range(min(workload.accumulation, 2)):
                batches.append(workload.example("cpu"))
            tracker = FSDPMemTracker(model)
            for batch in batches:
                tracker.track_inputs(batch)
            try:
                loss = loss_of(model, *batches[0])
                with tracker:
                    during = config.sync.during_accumulation
                    for inputs, targets in accumulate(model, batches, during):
                        loss(inputs, targets).backward()
                        # The tracker allows each module to run once. The reset affects the
                        # statistics of modules, and not the total peak.
                        tracker.reset_mod_stats()
            except ConfigError:
                raise
            # Fake tensors have no values, so a model that reads values fails.
            except Exception as error:
                reason = str(error).split("\n")[0]
                raise ConfigError(
                    f"plan.verify=true: {type(parts.module).__name__} does not run on tensors "
                    f"without storage ({type(error).__name__}: {reason}); use plan.verify=false"
                ) from error
    # The tracker has one entry, because all tensors are on one device.
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    states = state_bytes(layout)
    return int(snapshot["Total"]) + states.optimizer + states.masters + states.outer

"""What one job costs per rank and step, on the machines of ``cluster``: `cost_of`.

Mesh, micro-batches, tensor-parallel plan and shapes come from the functions that training uses.
Data are not opened.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.assemble import plan_batches, resolve_mesh
from parallel2d.config import TrainConfig
from parallel2d.cost.collective_time import GroupPlacement, placements
from parallel2d.cost.equal_blocks import by_blocks
from parallel2d.cost.flops import count_flops
from parallel2d.cost.model_shapes import ModelShapes, collect_shapes
from parallel2d.cost.predicted_peak import PredictedMemory
from parallel2d.cost.state_memory import StateBytes, state_bytes
from parallel2d.cost.step_estimate import StepEstimate, estimate_step, float8_flops
from parallel2d.cost.traffic import RING_PASSES, predict_layout
from parallel2d.data import BatchPlan
from parallel2d.data.batch import SampleShape, labelled_images, token_sequences
from parallel2d.errors import ConfigError
from parallel2d.mesh import MeshShape, check_placement
from parallel2d.model_families import ModelParts, build_model, plan_tensor_axis
from parallel2d.optimizer import muon_names, plan_groups
from parallel2d.parallelize.compilation import check_compilation
from parallel2d.parallelize.preconditions import check_parameters
from parallel2d.parallelize.sharding import check_offload
from parallel2d.planner.machines import planned_device_type, planned_topology
from parallel2d.planner.peak_memory import PeakPredictions, tensor_mesh
from parallel2d.planner.traced_step import TracedMemory, trace_step
from parallel2d.run_description import predict_activations
from parallel2d.topology import Topology
from parallel2d.weights.initial_values import check_initializers

NOT_COMPUTED = "it was not computed"


@dataclass(frozen=True)
class LayoutCost:
    """Figures of the fullest rank, and of the first one where ranks differ in bytes sent."""

    shape: MeshShape
    topology: Topology
    model: str
    parameters: int  # elements of the whole model
    sample: SampleShape
    micro_batch_size: int
    accumulation: int
    states: StateBytes
    moved: Mapping[str, float]  # bytes a rank sends per step, by ``comm/AXIS/bytes``
    flops: int | None  # of one sample, forward and backward; None: not known
    time: StepEstimate | str  # or what is not known, in words
    predicted: PredictedMemory | str  # or why the peak is not known, in words
    traced: TracedMemory | None  # with ``plan.verify=true``

    @property
    def needed(self) -> int:
        """Bytes that are known to be needed on the fullest rank."""
        if self.traced is not None:
            return self.traced.peak
        if isinstance(self.predicted, PredictedMemory):
            return self.predicted.peak
        return self.states.total

    @property
    def has_peak(self) -> bool:
        """Whether `needed` is that of the fullest moment, and not of the states alone."""
        return self.traced is not None or isinstance(self.predicted, PredictedMemory)


def cost_of(config: TrainConfig, flops: int | None = None) -> LayoutCost:
    """What the job costs; with ``plan.verify=true`` its peak is traced too. ``flops``: of one
    sample, where they were counted before.

    Raises `ConfigError` for a job that cannot run on this cluster, as far as that can be told
    without data and devices.
    """
    costs = JobCosts(config, flops)
    cost = costs.cost(config)
    if config.plan.verify:
        return costs.traced(config, cost)
    return cost


class JobCosts:
    """Costs of one model, batch and precision on one cluster, in any layout. What layouts have in
    common is computed once. Raises `ConfigError` for a job that no layout can run."""

    def __init__(self, config: TrainConfig, flops: int | None = None) -> None:
        self.topology = planned_topology(config)
        self._nodes = len(self.topology.ranks_by_host)
        self.parts = build_model(config.model)
        self._device_type = planned_device_type(config)
        check_parameters(self.parts.module)
        # Weights that are read from files need none.
        if self.parts.weights is None:
            check_initializers(self.parts.module, self.parts.init)
        plan_groups(self.parts.module, config.optimizer)
        self._sample = planned_sample(config, self.parts)
        self._muon = muon_names(self.parts.module, config.optimizer)
        self.parameters = sum(value.numel() for value in self.parts.module.parameters())
        if flops is None:
            example = functools.partial(self._sample.example, 1)
            flops = count_flops(self.parts.module, example, self.parts.loss)
        self._flops = flops
        # What of an image a layer sees is not known.
        self._float8_flops = 0
        if self._sample.noun == "tokens":
            self._float8_flops = float8_flops(
                self.parts.module, config.parallel(), self._sample.targets_per_sample
            )
        self.peaks = PeakPredictions(self.parts, self._sample)
        self._places: dict[tuple[int, int, int], Mapping[str, GroupPlacement]] = {}
        self._shapes: dict[tuple[str, int], ModelShapes] = {}
        self._plans: dict[int, Mapping[str, object] | None] = {}
        # What goes over the tensor axis, and the samples and micro-batches that it is of.
        self._over_tensor: dict[tuple[int, str], tuple[Mapping[str, float], int, int]] = {}
        # Takes these bytes to grow with the samples, instead of running a step for each layout. The
        # sums of gradients that are among them grow with the micro-batches alone.
        self.scales_tensor_axis = False

    def on(self, config: TrainConfig) -> JobCosts:
        """The same on as many nodes as ``config`` has, with what was computed already."""
        other = copy.copy(self)
        other.topology = planned_topology(config)
        other._nodes = len(other.topology.ranks_by_host)
        return other

    def cost(self, config: TrainConfig, *, predicts: bool = True) -> LayoutCost:
        """Of one layout; without ``predicts`` its peak is left out. ``config``: may differ from
        that of the constructor in strategy, mesh, bucketing, recomputation, micro-batch and sync.
        Raises `ConfigError` for a layout that cannot run."""
        shape = resolve_mesh(config, self.topology)
        # First, since most layouts of a search that cannot run are refused by it.
        batches = plan_batches(config, shape, data_rank=0, pad=False)
        places = self._place(config, shape)
        check_compilation(config.compile, shape.tensor)
        check_offload(config.cpu_offload, self._device_type, shape.replicate)
        if shape.tensor not in self._plans:
            self._plans[shape.tensor] = plan_tensor_axis(config, self.parts, shape)
        tensor_plan = self._plans[shape.tensor]
        shapes, activations = self._split(config, shape, tensor_plan, batches)
        states = state_bytes(shapes, shape, config.parallel(), config.optimizer)
        moved = predict_layout(
            shapes,
            shape,
            config.parallel(),
            config.optimizer,
            accumulation=batches.accumulation,
            device_type=self._device_type,
            activations=activations,
        )
        time = estimate_step(
            config,
            shapes,
            shape,
            places,
            self._nodes,
            batches,
            states,
            moved,
            self._flops,
            self._device_type,
            self._float8_flops,
        )
        moved.pop(RING_PASSES, None)
        cost = LayoutCost(
            shape=shape,
            topology=self.topology,
            model=type(self.parts.module).__name__,
            parameters=self.parameters,
            sample=self._sample,
            micro_batch_size=batches.micro_batch_size,
            accumulation=batches.accumulation,
            states=states,
            moved=moved,
            flops=self._flops,
            time=time,
            predicted=NOT_COMPUTED,
            traced=None,
        )
        return self.with_peak(config, cost) if predicts else cost

    def with_peak(self, config: TrainConfig, cost: LayoutCost) -> LayoutCost:
        """``cost``, of ``config``, with its predicted peak."""
        peak = self.peaks.of(
            config, cost.shape, cost.micro_batch_size, cost.accumulation, cost.states
        )
        return replace(cost, predicted=peak)

    def traced(self, config: TrainConfig, cost: LayoutCost) -> LayoutCost:
        """``cost``, of ``config``, with a peak that was traced. Raises `ConfigError` as
        `trace_step`."""
        # A model of its own, which is used up by it.
        parts = build_model(config.model)
        tensor_plan = plan_tensor_axis(config, parts, cost.shape)
        batches = plan_batches(config, cost.shape, data_rank=0, pad=False)
        memory = trace_step(
            config,
            parts,
            cost.shape,
            self.topology,
            tensor_plan,
            self._sample,
            batches,
            cost.states,
        )
        return replace(cost, traced=memory)

    def is_inside(self, cost: LayoutCost, axis: str) -> bool:
        """Whether the groups of an axis are inside hosts, for a layout that has its cost."""
        shape = cost.shape
        return self._places[shape.replicate, shape.shard, shape.tensor][axis].is_inside

    def _place(self, config: TrainConfig, shape: MeshShape) -> Mapping[str, GroupPlacement]:
        """Where the groups of each axis are. Raises `ConfigError` for one that crosses hosts by
        accident."""
        key = (shape.replicate, shape.shard, shape.tensor)
        if key not in self._places:
            ranks = shape.place(self.topology)
            # Those that have to cross hosts are shown with their bytes.
            check_placement(ranks, self.topology, config.mesh.allow_cross_node)
            self._places[key] = placements(ranks, self.topology)
        return self._places[key]

    def _split(
        self,
        config: TrainConfig,
        shape: MeshShape,
        tensor_plan: Mapping[str, object] | None,
        batches: BatchPlan,
    ) -> tuple[ModelShapes, Mapping[str, float]]:
        """The shapes, and the bytes that activations send over the tensor axis in a step."""
        key = (f"{config.bucketing}", shape.tensor)
        if tensor_plan is None:
            if key not in self._shapes:
                self._shapes[key] = collect_shapes(
                    self.parts.module, config.parallel(), by_muon=self._muon
                )
            return self._shapes[key], {}
        known = (shape.tensor, f"{config.activation_checkpointing}")
        samples = batches.micro_batch_size * batches.accumulation
        is_known = self.scales_tensor_axis and known in self._over_tensor
        if is_known and key in self._shapes:
            counted, of_samples, of_micro_batches = self._over_tensor[known]
            scaled = {name: sent * samples / of_samples for name, sent in counted.items()}
            # Each micro-batch runs the same collectives, whatever its size.
            if RING_PASSES in counted:
                per_micro_batch = counted[RING_PASSES] / of_micro_batches
                scaled[RING_PASSES] = per_micro_batch * batches.accumulation
            return self._shapes[key], scaled
        with tensor_mesh(shape.tensor) as mesh:
            assert mesh is not None
            if key not in self._shapes:
                self._shapes[key] = self._shapes_over(mesh, config, shape)
            moved = self._count_tensor_axis(config, shape, mesh, batches)
        self._over_tensor[known] = (moved, samples, batches.accumulation)
        return self._shapes[key], moved

    def _shapes_over(self, mesh: DeviceMesh, config: TrainConfig, shape: MeshShape) -> ModelShapes:
        """Of the model that is split over a tensor axis. Of equal blocks few are split, which takes
        long."""

        def collect(part: nn.Module) -> ModelShapes:
            parts = replace(self.parts, module=part)
            plan = plan_tensor_axis(config, parts, shape)
            return collect_shapes(part, config.parallel(), mesh=mesh, plan=plan, by_muon=self._muon)

        # A name may decide about Muon, and groups of a certain size depend on the blocks before.
        if self._muon or config.bucketing.name == "size":
            return collect(self.parts.module)
        found = by_blocks(self.parts.module, lambda part: collect(part).counts(), checks=False)
        return ModelShapes.of_counts(found or {})

    def _count_tensor_axis(
        self, config: TrainConfig, shape: MeshShape, mesh: DeviceMesh, batches: BatchPlan
    ) -> Mapping[str, float]:
        """Of equal blocks few are run."""

        def count(part: nn.Module) -> Mapping[str, float]:
            parts = replace(self.parts, module=part)
            plan = plan_tensor_axis(config, parts, shape)
            return predict_activations(
                config, parts, mesh, batches, plan, self._sample, self._device_type
            )

        # The first count of the model finds out whether its blocks are alike.
        found = by_blocks(self.parts.module, count, checks=not self._over_tensor)
        return found or {}


def planned_sample(config: TrainConfig, parts: ModelParts) -> SampleShape:
    """What a sample of the configured data is made of. Raises `ConfigError` for images whose size
    neither the data nor the model gives."""
    reads_images = config.data.name == "images"
    if not reads_images and parts.reads != "images":
        return token_sequences(config.train.seq_len)
    size = config.data.image_size or parts.images.size
    channels = config.data.channels or parts.images.channels or 3
    if size is None:
        raise ConfigError(
            "data.image_size is needed to plan for images: the model does not say how large "
            "they are"
        )
    return labelled_images(channels, size)

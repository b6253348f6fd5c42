"""The layout of a model over the ranks, computed before the model changes: `resolve`, `Layout`.

`parallelize` applies the layout, `cost` predicts its memory and time, and a run records it.

[Note: the peak-memory rank] Every axis splits a dim into shards of ceil(size / ranks) rows; the
last shards are smaller or empty. Therefore the rank with coordinate 0 on every axis holds the
largest shard of each parameter, and its memory is the maximum over ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from parallel2d.base.config.job import OptimizerConfig
from parallel2d.base.config.parallel import ParallelConfig
from parallel2d.parallel.mesh_sizes import MeshShape, MeshSpec
from parallel2d.parallel.model_structure import (
    find_blocks,
    fqn_of,
    hidden_matrices,
    names_by_id,
    stays_replicated,
)
from parallel2d.parallel.parallelize.bucketing import bucket_modules, outer_groups
from parallel2d.parallel.parallelize.compilation import check_compilation, choose_compilation
from parallel2d.parallel.parallelize.conditional import (
    Always,
    Conditional,
    check_places,
    conditional_modules,
)
from parallel2d.parallel.parallelize.ignored import ignored_names
from parallel2d.parallel.parallelize.precision import Precision, buffer_dtype, storage_dtypes
from parallel2d.parallel.parallelize.preconditions import check_offload, check_symmetric_memory
from parallel2d.parallel.parallelize.tensor_parallel import split_dims
from parallel2d.parallel.sync.methods import method_of
from parallel2d.parallel.sync.methods.method import SyncMethod


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of one tensor of a sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class SampleShape:
    """Shapes and dtypes of the tensors of one sample."""

    noun: str = "tokens"  # name of the counted units in messages
    # A `TensorShape`, a tuple of them (positional arguments of the model), or a dict of them
    # (keyword arguments of the model)
    inputs: Any = TensorShape(())
    targets: TensorShape | None = TensorShape(())  # None for data without targets

    @property
    def targets_per_sample(self) -> int:
        """Number of targets of one sample: the length of a sequence of tokens; 1 for a class or for
        floating-point targets."""
        if self.targets is None or self.targets.dtype.is_floating_point:
            return 1
        return math.prod(self.targets.shape)

    def example(self, samples: int, device: torch.device | str) -> tuple[Any, torch.Tensor | None]:
        """Return inputs and targets of ``samples`` samples, filled with zeros."""

        def zeros(each: TensorShape) -> torch.Tensor:
            return torch.zeros(samples, *each.shape, dtype=each.dtype, device=device)

        inputs = tree_map_only(TensorShape, zeros, self.inputs)
        return inputs, None if self.targets is None else zeros(self.targets)

    def cast(self, floating: torch.dtype | None) -> SampleShape:
        """Return a copy with another dtype for floating-point tensors; None: no change."""

        def cast(each: TensorShape) -> TensorShape:
            if floating is None or not each.dtype.is_floating_point:
                return each
            return replace(each, dtype=floating)

        inputs, targets = tree_map_only(TensorShape, cast, (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def describe(self, samples: int) -> str:
        """Return the size of a batch of ``samples`` as text for messages."""
        each = f"x {self.targets_per_sample} " if self.targets_per_sample > 1 else ""
        return f"{samples} {each}{self.noun}"


@dataclass(frozen=True)
class Workload:
    """The computation of a rank in a step, and its device."""

    micro_batch_size: int = 1
    accumulation: int = 1
    sample: SampleShape = field(
        default_factory=SampleShape
    )  # with the dtypes of the model's inputs
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    muon: frozenset[str] = frozenset()  # FQNs of the parameters that Muon updates
    device_type: str = ""  # decides which collectives run; empty: the mesh's device type
    average: bool = False  # True if EMA weights are kept

    def example(self, device: torch.device | str) -> tuple[Any, torch.Tensor | None]:
        """Return inputs and targets of one micro-batch, filled with zeros."""
        return self.sample.example(self.micro_batch_size, device)


class ParameterShape(NamedTuple):
    """One parameter, with its shape on the first rank of the tensor axis.

    An itemsize is the bytes of one element.
    """

    shape: tuple[int, ...]  # on the first tensor rank, before the shard axis splits it
    whole: tuple[int, ...]  # shape of the unsharded parameter, over all tensor ranks
    tensor_dim: int | None  # the dim that the tensor axis splits
    stored: int  # itemsize of the sharded parameter
    gathered: int  # itemsize of the unsharded parameter
    reduced: int  # itemsize of its gradient in the reduce-scatter
    gradient: int  # itemsize of its gradient for the optimizer
    is_trained: bool
    by_muon: bool  # updated by Muon, with ``optimizer=muon``
    is_hidden: bool  # a hidden matrix
    stays_unsharded: bool = False  # between forward and backward, under every strategy

    @property
    def sum_itemsize(self) -> int:
        """Itemsize of accumulated gradients and of outer parameters: at least 4 bytes (fp32)."""
        return max(4, self.stored)


def first_part(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of the shard on rank 0, if ``ranks`` ranks split dim 0.

    See [Note: the peak-memory rank].
    """
    return (-(-shape[0] // ranks), *shape[1:])


class LayoutGroup(NamedTuple):
    """One FSDP group: modules that share one all-gather and one reduce-scatter."""

    modules: tuple[str, ...]  # names; the root has an empty name
    policy: MixedPrecisionPolicy
    parameters: tuple[ParameterShape, ...]  # without parameters that belong to an inner group
    is_replicated: bool = False  # True if each rank holds the unsharded parameters

    @property
    def stays_unsharded(self) -> bool:
        """True if the group stays unsharded between forward and backward, under every strategy."""
        return any(parameter.stays_unsharded for parameter in self.parameters)


@dataclass(frozen=True)
class Layout:
    """The FSDP groups, the settings and the workload of a job.

    The constructor, and therefore `dataclasses.replace`, raises `ConfigError` for settings that the
    mesh or the device does not support.
    """

    config: ParallelConfig
    shape: MeshShape
    workload: Workload
    tensor_plan: Mapping[str, object] | None
    blocks: tuple[str, ...]  # names of the repeated blocks
    ignored: tuple[str, ...]  # FQNs of the parameters that are excluded from sharding
    hidden: frozenset[str]  # FQNs of the hidden matrices
    groups: tuple[LayoutGroup, ...]  # innermost first, the root last
    # (parameters of a group, number of sharded groups with equal parameters). A Llama with 126
    # blocks has two entries: the block and the root.
    equal_groups: tuple[tuple[tuple[ParameterShape, ...], int], ...]
    whole: tuple[ParameterShape, ...]  # replicated parameters: without dims, empty, or ignored
    buffer_bytes: int  # bytes of all buffers, which are also replicated
    # Settings of the conditional modules by name; see `parallelize.conditional`
    conditional: Mapping[str, str | Always] = field(default_factory=dict)

    def __post_init__(self) -> None:
        MeshSpec(**self.shape.sizes).refuse_contradiction(self.config.strategy)
        check_compilation(self.config.compile)
        check_symmetric_memory(self.config.fsdp.symmetric_memory, self.workload.device_type)
        check_offload(self.config.cpu_offload, self.workload.device_type, self.shape.replicate)

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all data ranks."""
        work = self.workload
        return work.micro_batch_size * work.accumulation * self.shape.data_ranks

    @property
    def local_parameters(self) -> int:
        """Number of parameter elements on the peak-memory rank."""
        numel = sum(math.prod(parameter.shape) for parameter in self.whole)
        numel += sum(math.prod(each.shape) for group in self.replicated for each in group)
        for group, count in self.equal_groups:
            parts = []
            for parameter in group:
                parts.append(first_part(parameter.shape, self.shape.sharding.shard))
            numel += count * sum(map(math.prod, parts))
        return numel

    @property
    def replicated(self) -> list[tuple[ParameterShape, ...]]:
        """The parameters of each replicated group."""
        found: list[tuple[ParameterShape, ...]] = []
        for group in self.groups:
            if group.is_replicated:
                found.append(group.parameters)
        return found

    @cached_property
    def method(self) -> SyncMethod:
        """The sync method over the replicate axis."""
        return method_of(self.config.strategy, self.config.sync, self.shape.replicate)

    def blocks_of(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return (name, module) of the blocks."""
        return list(zip(self.blocks, map(model.get_submodule, self.blocks), strict=True))

    def replicated_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules of the replicated groups."""
        found: list[nn.Module] = []
        for group in self.groups:
            if group.is_replicated:
                found += map(model.get_submodule, group.modules)
        return found

    def groups_of(self, model: nn.Module) -> list[tuple[LayoutGroup, list[nn.Module]]]:
        """Return each group with its modules in ``model``."""
        found = []
        for group in self.groups:
            found.append((group, list(map(model.get_submodule, group.modules))))
        return found


def resolve(
    config: ParallelConfig,
    shape: MeshShape,
    model: nn.Module,
    workload: Workload | None = None,
    *,
    mesh: DeviceMesh | None = None,
    tensor_plan: Mapping[str, object] | None = None,
    ignored: Sequence[str | nn.Module | nn.Parameter] = (),
    conditional: Conditional | None = None,
) -> Layout:
    """Compute the layout of ``model``, which is not sharded and does not change.

    `preconditions.check_parameters` must have accepted the model.

    Args:
        config: all settings of `parallelize`.
        shape: the resolved sizes of the axes.
        model: the model, with weights or on meta.
        workload: the computation of a step; the default is one sequence per micro-batch.
        mesh: the mesh of these sizes, if it exists. Without a mesh, parameters with a custom
            style in ``tensor_plan`` count as not split by the tensor axis.
        tensor_plan: see `parallelize`.
        ignored: see `parallelize`.
        conditional: see `parallelize`.

    Raises:
        ConfigError: settings that this model or mesh does not support.
    """
    workload = workload or Workload()
    if mesh is not None and not workload.device_type:
        workload = replace(workload, device_type=mesh.device_type)

    precision = Precision.of(config.precision, model)
    left_out = ignored_names(model, ignored)
    stored = storage_dtypes(model, precision, left_out)
    collector = _Collector(
        precision=precision,
        stored=stored,
        names={parameter: fqn_of(name) for name, parameter in model.named_parameters()},
        ignored=left_out,
        muon=workload.muon,
        hidden=frozenset(hidden_matrices(model)),
        tensor=shape.tensor,
        tensor_dims=dict(split_dims(model, mesh, tensor_plan or {}, shape.tensor)),
    )
    blocks = find_blocks(model, config.bucketing.blocks, config.bucketing.policy)
    compilation = choose_compilation(config.compile, shape, workload.device_type, model, blocks)
    sync = config.sync.for_device(workload.device_type)
    config = replace(config, compile=compilation, sync=sync)
    ways = conditional_modules(model, conditional or {}, shape.tensor, config.cpu_offload)
    outer: list[list[nn.Module]] = []
    # All ranks gather these groups at the beginning of a forward: no rank may skip their modules.
    if config.bucketing.name == "block" and not ways and shape.sharding.shard > 1:
        outer = outer_groups(model, blocks, stored, precision.fp32_modules)
    buckets = bucket_modules(
        model, blocks, config.bucketing, stored, precision.fp32_modules, ways, outer
    )

    groups: list[LayoutGroup] = []
    parameters: list[tuple[ParameterShape, ...]] = []
    for group in collector.groups(model, buckets, outer):
        is_replicated = ways.get(group.modules[0]) == "replicate" and shape.sharding.shard > 1
        groups.append(group._replace(is_replicated=is_replicated))
        if not is_replicated:
            parameters.append(group.parameters)
    check_places(ways, [group.modules for group in groups])
    buffers = [each.numel() * buffer_dtype(each, precision).itemsize for each in model.buffers()]
    return Layout(
        config=config,
        shape=shape,
        workload=workload,
        tensor_plan=tensor_plan,
        blocks=tuple(name for name, _ in blocks),
        ignored=tuple(left_out),
        hidden=collector.hidden,
        groups=tuple(groups),
        equal_groups=tuple(Counter(filter(None, parameters)).items()),
        whole=tuple(collector.whole),
        buffer_bytes=sum(buffers),
        conditional=ways,
    )


@dataclass
class _Collector:
    """Assigns each parameter to the innermost FSDP group that contains it.

    Attributes:
        stored: storage dtypes of the parameters.
        names: FQNs of the parameters.
        ignored: FQNs of the parameters that FSDP ignores.
        muon: FQNs of the parameters that Muon updates.
        hidden: FQNs of the hidden matrices.
        tensor: size of the tensor axis.
        tensor_dims: the dim that the tensor axis splits, for each parameter that it splits.
        whole: the parameters that stay replicated.
        taken: the parameters that already have a group.
    """

    precision: Precision
    stored: Mapping[nn.Parameter, torch.dtype]
    names: Mapping[nn.Parameter, str]
    ignored: Collection[str]
    muon: frozenset[str]
    hidden: frozenset[str]
    tensor: int
    tensor_dims: Mapping[nn.Parameter, int]
    whole: list[ParameterShape] = field(default_factory=list)
    taken: set[nn.Parameter] = field(default_factory=set)

    def groups(
        self,
        model: nn.Module,
        buckets: Sequence[list[nn.Module]],
        outer: Sequence[list[nn.Module]],
    ) -> Iterator[LayoutGroup]:
        """Yield the groups from the innermost to the root. ``outer``: from `outer_groups`."""
        precision = self.precision
        names = names_by_id(model.named_modules())
        for modules in buckets:
            policy = precision.policy
            if len(modules) == 1 and id(modules[0]) in precision.fp32_modules:
                fp32 = torch.float32
                policy = MixedPrecisionPolicy(fp32, fp32, output_dtype=precision.param)
            named = tuple(names[id(module)] for module in modules)
            taken = self._take(modules, policy, stays_unsharded=modules in outer)
            yield LayoutGroup(named, policy, taken)
        # The root's group takes all parameters that no other group holds.
        policy = precision.policy
        if precision.output is not None:
            policy = replace(policy, output_dtype=precision.output)
        # Its parameters stay unsharded, as by torch's default: backward needs the head first.
        yield LayoutGroup(("",), policy, self._take([model], policy, stays_unsharded=True))

    def _take(
        self, modules: Sequence[nn.Module], policy: MixedPrecisionPolicy, stays_unsharded: bool
    ) -> tuple[ParameterShape, ...]:
        """Return the sharded parameters of ``modules``, and add the replicated parameters to
        `whole`."""
        found: list[ParameterShape] = []
        for module in modules:
            for parameter in module.parameters():
                if parameter in self.taken:
                    continue
                self.taken.add(parameter)
                shape = self._shape_of(parameter, policy)
                if stays_replicated(parameter) or self.names[parameter] in self.ignored:
                    self.whole.append(shape)
                else:
                    found.append(shape._replace(stays_unsharded=stays_unsharded))
        return tuple(found)

    def _shape_of(self, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> ParameterShape:
        dim = self.tensor_dims.get(parameter)
        local = list(parameter.shape)
        if dim is not None:
            local[dim] = -(-local[dim] // self.tensor)
        # Without ``param_dtype``, parameters are all-gathered in their storage dtype. Without
        # ``reduce_dtype``, gradients are reduced in the dtype that autograd returns.
        stored = self.stored.get(parameter, parameter.dtype)
        gathered = policy.param_dtype or stored
        # Integer and complex parameters are never cast.
        if not stored.is_floating_point:
            gathered = stored
        reduced = policy.reduce_dtype or gathered
        # `scalars.Scalar` casts the gradients of parameters without dims to their storage dtype.
        keeps_reduced = self.precision.keep_reduced and not stays_replicated(parameter)
        return ParameterShape(
            shape=tuple(local),
            whole=tuple(parameter.shape),
            tensor_dim=dim,
            stored=stored.itemsize,
            gathered=gathered.itemsize,
            reduced=reduced.itemsize,
            gradient=(reduced if keeps_reduced else stored).itemsize,
            is_trained=parameter.requires_grad,
            by_muon=self.names[parameter] in self.muon,
            is_hidden=self.names[parameter] in self.hidden,
        )

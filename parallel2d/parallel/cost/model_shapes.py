"""The shapes of a model's parameters, in the groups in which sharding gathers them, without
sharding it: `collect_shapes`.

All arithmetic about memory and bytes of a layout starts here. What depends on the sizes of the
shard and replicate axes is computed from a `ModelShapes`, which is collected once per bucketing,
precision and size of the tensor axis. Equal groups are kept once, with their number: a Llama of 126
blocks has two of them.

[Note: the fullest rank] Every axis splits a dim into parts of ceil(size / ranks) rows, of which the
last ones are smaller or empty. So the rank that is first on every axis holds at least as much of
each parameter as any other one, and what it holds is what the fullest rank holds.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from parallel2d.base.config import ParallelConfig
from parallel2d.parallel.fsdp_internals import GroupTraffic
from parallel2d.parallel.model_structure import find_blocks, fqn_of
from parallel2d.parallel.parallelize.bucketing import bucket_modules
from parallel2d.parallel.parallelize.precision import Precision, cast_storage
from parallel2d.parallel.parallelize.tensor_parallel import split_layers


class ParameterShape(NamedTuple):
    """One parameter as the first rank of the tensor axis has it, before other axes split it.
    Itemsizes are bytes of one element."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]  # over all tensor ranks
    tensor_dim: int | None  # the dim that the tensor axis splits
    stored: int  # itemsize of the sharded parameter
    gathered: int  # the itemsize in which it is gathered
    reduced: int  # the itemsize in which its gradient is reduced
    gradient: int  # the itemsize of the gradient that the optimizer gets
    is_trained: bool
    by_muon: bool  # updated by Muon, with ``optimizer=muon``

    @property
    def sum_itemsize(self) -> int:
        """That of sums and of outer parameters: fp32 at least."""
        return max(4, self.stored)


@dataclass(frozen=True)
class ModelShapes:
    """``in_order``: the parameters of each group as `bucket_modules` lists them, the root last;
    empty where all of a group's are in others. ``scalars``: parameters without dimensions, which
    every rank has whole. ``buffer_bytes``: of all buffers, which every rank has whole too."""

    in_order: tuple[tuple[ParameterShape, ...], ...]
    scalars: tuple[ParameterShape, ...]
    buffer_bytes: int

    @cached_property
    def groups(self) -> list[tuple[tuple[ParameterShape, ...], int]]:
        """The parameters of a group, and how many groups are equal to it."""
        return list(Counter(filter(None, self.in_order)).items())


def first_part(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The shape of the first of ``ranks`` parts by rows; see [Note: the fullest rank]."""
    return (-(-shape[0] // ranks), *shape[1:])


def collect_shapes(
    model: nn.Module,
    config: ParallelConfig,
    *,
    mesh: DeviceMesh | None = None,
    plan: Mapping[str, object] | None = None,
    by_muon: Collection[str] = (),
) -> ModelShapes:
    """The shapes of ``model``, before `parallelize`, which stays as it is.

    The same functions as in `parallelize` decide about dtypes, blocks and groups, on a copy without
    storage. ``mesh``, ``plan``: with a tensor axis, over which the copy is split; a mesh of a fake
    process group will do (`cost.fake_group`). ``by_muon``: FQN of the
    parameters that Muon updates (`optimizer.muon_names`).
    Raises `ConfigError` for what `parallelize` would refuse there.
    """
    twin = without_storage(model)
    precision = Precision.of(config.precision, twin)
    cast_storage(twin, precision)
    blocks = find_blocks(twin, config.bucketing.blocks, config.bucketing.policy)
    if mesh is not None and plan is not None:
        split_layers(twin, mesh, plan)
    buckets = bucket_modules(twin, blocks, config.bucketing, precision.fp32_modules)
    collector = _Collector(twin, config, precision, by_muon)
    for modules in buckets:
        policy = precision.policy
        if len(modules) == 1 and id(modules[0]) in precision.fp32_modules:
            policy = precision.fp32_policy
        collector.add(modules, policy)
    # Sharding makes one group of what is left, at the root.
    collector.add([twin], precision.policy)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in twin.buffers())
    return ModelShapes(tuple(collector.in_order), tuple(collector.scalars), buffers)


def without_storage(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on meta. Tied parameters stay tied, which ``to("meta")`` would undo, and
    no values are copied."""
    made: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in model.buffers():
        made[id(buffer)] = torch.empty_like(buffer, device="meta")
    # What is in this mapping is taken instead of copied.
    return copy.deepcopy(model, made)


class _Collector:
    """Takes groups from the innermost to the root; a parameter belongs to the first that has it."""

    def __init__(
        self,
        twin: nn.Module,
        config: ParallelConfig,
        precision: Precision,
        by_muon: Collection[str],
    ) -> None:
        self.scalars: list[ParameterShape] = []
        self.in_order: list[tuple[ParameterShape, ...]] = []
        self._config = config
        self._precision = precision
        self._taken: set[int] = set()
        self._muon: set[int] = set()
        for name, parameter in twin.named_parameters():
            if fqn_of(name) in by_muon:
                self._muon.add(id(parameter))

    def add(self, modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> None:
        """Takes the parameters of ``modules`` that no group before has taken."""
        found: list[ParameterShape] = []
        for module in modules:
            for parameter in module.parameters():
                if id(parameter) in self._taken:
                    continue
                self._taken.add(id(parameter))
                shape = self._shape_of(parameter, policy)
                if parameter.ndim == 0:
                    self.scalars.append(shape)
                else:
                    found.append(shape)
        self.in_order.append(tuple(found))

    def _shape_of(self, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> ParameterShape:
        local: torch.Tensor = parameter
        tensor_dim = None
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            for placement in parameter.placements:
                if isinstance(placement, Shard):
                    tensor_dim = placement.dim % parameter.ndim
        # Without a dtype in the policy, parameters are gathered as they are stored, and gradients
        # reduced as autograd made them.
        gathered = policy.param_dtype or parameter.dtype
        reduced = policy.reduce_dtype or gathered
        return ParameterShape(
            shape=tuple(local.shape),
            whole=tuple(parameter.shape),
            tensor_dim=tensor_dim,
            stored=parameter.dtype.itemsize,
            gathered=gathered.itemsize,
            reduced=reduced.itemsize,
            gradient=self._gradient_dtype(parameter).itemsize,
            is_trained=parameter.requires_grad,
            by_muon=id(parameter) in self._muon,
        )

    def _gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype of the gradient that the optimizer gets; see `ReplicaReducer`."""
        # Torch's own engine casts gradients to the dtype of the parameter, and so does `Scalar`.
        if self._config.sync.engine == "torch" or parameter.ndim == 0:
            return parameter.dtype
        precision = self._precision
        kept = precision.reduce if precision.keep_reduced else precision.storage
        if kept != precision.sums:
            return kept
        return torch.promote_types(precision.sums, parameter.dtype)


def group_traffic(
    group: Sequence[ParameterShape], shard: int, frees_after_forward: bool
) -> GroupTraffic:
    """What a group moves, on the first rank of ``shard``."""
    gathered = 0
    reduced = 0
    items: list[int] = []
    shapes: list[torch.Size] = []
    stored = 4
    for parameter in group:
        # No padding: the first part is as large as any.
        part = torch.Size(first_part(parameter.shape, shard))
        size = part.numel()
        gathered += size * parameter.gathered
        if parameter.is_trained:
            reduced += size * parameter.reduced
            shapes.append(part)
            stored = parameter.stored
            items.append(parameter.reduced)
    return GroupTraffic(
        gathered_bytes=gathered,
        reduced_bytes=reduced,
        reduced_itemsize=min(items, default=4),
        reduced_shapes=tuple(shapes),
        stored_itemsize=stored,
        frees_after_forward=frees_after_forward,
    )

"""`shard` shards a model over the ``shard`` axis with FSDP2's `fully_shard`. `synchronize` sets up
the reduction of gradients over the ``replicate`` axis. `bucketing.py` chooses the groups of
`fully_shard`, and `layout.py` records the groups in the `Layout`.

[Note: one engine for every strategy] `fully_shard` gets only the ``shard`` axis; with shard = 1 it
communicates nothing. The package `sync` reduces over the replicas. FSDP2's second mesh axis (HSDP)
is not used for the replicas, because HSDP accumulates wrongly when micro-batches use different
parameters. With replicate > 1, `shard` calls `fully_shard` and then replaces the sharded parameters
by `DTensor`s on both axes, so that checkpoints and gradient norms take the replicas into account.
`fully_shard` supports parameters that are replaced before the first forward. Therefore ``ddp``,
``zero2``, ``zero3`` and the hybrid strategies share one code path, one set of hooks and one kind of
parameter. Gradients are averaged over the data ranks, as in DDP and FSDP2, and `loss` relies on
this.

[Note: views and hooks] `fully_shard` registers a hook on the outputs of a group. In backward the
hook all-gathers the parameters of the group when the gradient of an output arrives. An output that
is a view breaks this hook in two ways. If the base of the view was changed in place after the view
was made (``y = h.view(-1); h[0] += 1; return y``), the process ends by SIGSEGV when torch registers
the hook (pytorch issue 196459). If the caller changes the view in place (``y = block(x); y += x``),
the hook is lost, and backward fails because the parameters are not all-gathered. Therefore each
view among the outputs is replaced by a tensor with its own autograd node. The tensor shares the
memory and the version counter of the view.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_map

from parallel2d.base.config import FSDPConfig
from parallel2d.base.topology import Topology
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup, fsdp_groups
from parallel2d.parallel.fsdp_internals.sharded_model import after_backward
from parallel2d.parallel.mesh import axis_names, mesh_shape, part_group
from parallel2d.parallel.model_structure import places_in, trained_tensors_in
from parallel2d.parallel.parallelize.collective_order import CollectiveOrder
from parallel2d.parallel.parallelize.layout import Layout
from parallel2d.parallel.parallelize.precision import Precision
from parallel2d.parallel.parallelize.reduce_scatter import OrderedAllGather, OrderedReduceScatter
from parallel2d.parallel.parallelize.scalars import Scalar
from parallel2d.parallel.sync.engine.replica_reducer import (
    ReplicaReducer,
    register_engine,
)
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.parallel.weights.named_tensors import register_part

log = logging.getLogger(__name__)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    ignored: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Apply `fully_shard` to each group of ``layout``, the root last.

    Args:
        model: the model, after all transforms that replace ``forward``.
        mesh: the mesh of the parameters, from `sharding_mesh`.
        layout: the groups with their dtypes.
        ignored: parameters that are not sharded.
    """
    config = layout.config
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    placement = config.strategy.placement
    shards = mesh_shape(mesh).shard > 1
    replicated = set(layout.replicated_of(model))
    alone = _mesh_of_this_rank(mesh.device_type) if replicated else None
    outer: list[nn.Module] = []  # the first module of each group outside of the blocks
    for group, modules in layout.groups_of(model):
        if group.stays_unsharded and modules[0] is not model:
            outer.append(modules[0])
        for module in modules:
            # Register this hook before `fully_shard`: hooks run in the order of registration, and
            # FSDP's post-forward hook must get outputs without views ([Note: views and hooks]).
            module.register_forward_hook(_without_views)
        fully_shard(
            # torch handles a list of one module differently from a module: it adds hooks that wait
            # until all modules of the list have run.
            modules if len(modules) > 1 else modules[0],
            mesh=alone if group.is_replicated and alone is not None else mesh["shard"],
            # With one shard rank there is no communication, so gradients must not be rounded to the
            # communication dtype.
            mp_policy=group.policy if shards else replace(group.policy, reduce_dtype=None),
            reshard_after_forward=placement.reshard_after_forward and not group.stays_unsharded,
            offload_policy=offload,
            ignored_params=ignored or None,
        )
    if layout.shape.replicate > 1 or replicated:
        _place_on_all_axes(model, mesh, replicated)
    if outer:
        _gather_with_root(model, outer)
    return model


def _gather_with_root(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """All-gather the groups of ``modules`` at the beginning of each forward of ``model``.

    See [Note: groups outside of the blocks] in `bucketing`.
    """

    def gather(*_: Any) -> None:
        # The embedding runs first, and is the last of the groups.
        for module in reversed(modules):
            assert isinstance(module, FSDPModule)
            module.unshard()

    # After the pre-forward hook of FSDP, which initializes all groups in the first forward.
    model.register_forward_pre_hook(gather)


def _mesh_of_this_rank(device_type: str) -> DeviceMesh:
    """Return a mesh that contains only this rank. Not collective."""
    rank = dist.get_rank()
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, device_type, [rank], mesh_dim_names=("shard",))


def _place_on_all_axes(model: nn.Module, mesh: DeviceMesh, replicated: set[nn.Module]) -> None:
    """Replace each sharded parameter by a `DTensor` that is replicated over the ``replicate`` axis.

    Parameters of ``replicated`` modules become replicated over the ``shard`` axis too. See
    [Note: one engine for every strategy].
    """
    whole: set[nn.Parameter] = set()
    for module in replicated:
        whole.update(module.parameters())
    outer = ("replicate",) if mesh_shape(mesh).replicate > 1 else ()
    for parameter, places in places_in(model.modules()).items():
        # `replicate_scalars` has placed its parameters on all axes already.
        if not isinstance(parameter, DTensor) or "replicate" in axis_names(parameter.device_mesh):
            continue
        placements: list[Placement] = [Replicate()] * len(outer)
        placements += [Replicate()] if parameter in whole else parameter.placements
        placed = DTensor.from_local(
            local_part(parameter.detach()),
            mesh[(*outer, *axis_names(parameter.device_mesh))],
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        replaced = nn.Parameter(placed, parameter.requires_grad)
        for module, name in places:
            module.register_parameter(name, replaced)
    # This call moves no memory. Its `FSDPModule._apply` makes FSDP read the new parameters from the
    # modules.
    model.to(memory_format=torch.preserve_format)


def synchronize(
    model: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    precision: Precision,
    topology: Topology,
    scalars: Sequence[Scalar] = (),
    seed: int = 0,
) -> None:
    """Set up the reduction of the gradients of ``model`` over all data ranks, after `shard`.

    Raises `ConfigError` for a group with trained parameters of several dtypes.
    """
    groups = fsdp_groups(model)
    shard_ranks = mesh_shape(mesh).shard
    replicated = set(layout.replicated_of(model))
    for group in groups:
        if group.modules[0] in replicated:
            group.replicated_over = mesh.get_group("shard")
    # The gradients of replicated conditional modules are complete only at the end of a global
    # batch. They come last, so that they do not delay other buckets.
    groups.sort(key=lambda group: group.replicated_over is not None)
    for group in groups:
        is_alone = shard_ranks == 1 or group.replicated_over is not None
        in_fp32 = id(group.modules[0]) in precision.fp32_modules
        communication_dtype = torch.float32 if in_fp32 else precision.reduce
        final = communication_dtype if precision.keep_reduced else None
        group.set_dtypes(precision.sums, communication_dtype, 1 if is_alone else shard_ranks, final)
        if is_alone and not layout.config.cpu_offload:
            group.share_memory(torch.float32 if in_fp32 else precision.param)
    # With one rank no collective runs over the shard axis.
    options, order = layout.config.fsdp, None
    if shard_ranks > 1:
        _use_options(model, options, replicated)
        order = _order_of(mesh, topology) if options.keeps_order else None
    engine = ReplicaReducer(
        mesh,
        groups,
        layout.method,
        scalars=scalars,
        order=order,
        seed=seed,
        hidden=layout.hidden,
    )
    register_engine(model, engine)
    register_part(model, part_group(mesh))
    after_backward(model, engine.end_backward)
    if shard_ranks > 1 and not options.symmetric_memory:
        _use_own_collectives(order, groups, engine)


def _order_of(mesh: DeviceMesh, topology: Topology) -> CollectiveOrder:
    """Return the `CollectiveOrder` of this rank's shard group. Collective."""
    group = mesh.get_group("shard")
    hosts = {topology.hosts[rank] for rank in dist.get_process_group_ranks(group)}
    order = CollectiveOrder.of(group, len(hosts) == 1, mesh.device_type)
    if len(hosts) == 1 and not order.shares_memory and group.rank() == 0:
        log.warning(
            "ranks of %s cannot open each other's memory in /proc: if they run different modules, "
            "this is found at the end of a backward pass, not before",
            *hosts,
        )
    return order


def _use_options(model: nn.Module, options: FSDPConfig, replicated: set[nn.Module]) -> None:
    """Set the options of FSDP2 on ``model`` and its submodules. Collective over the shard group."""
    root: Any = model
    if options.reduce_scatter_buffers > 1:
        root.set_reduce_scatter_max_input_buffers(options.reduce_scatter_buffers)
    if options.separate_reduce_scatter_group:
        root.set_separate_reduce_scatter_group()
    if options.symmetric_memory:
        for module in root.modules():
            if isinstance(module, FSDPModule) and module not in replicated:
                module.set_symm_mem_for_comm()


def _use_own_collectives(
    order: CollectiveOrder | None, groups: Sequence[FSDPGroup], engine: ReplicaReducer
) -> None:
    """Replace the collectives of FSDP2. If ``order`` is None, their order is not checked."""
    number = order.add_model([group.called for group in groups]) if order is not None else 0
    for index, group in enumerate(groups):
        if group.replicated_over is not None:
            continue
        enter: Callable[[int, int, torch.dtype], None] = _enter_without_order
        if order is not None:
            enter = functools.partial(order.enter, number, index)
        module: Any = group.module  # its methods name private classes of torch
        module.set_custom_all_gather(OrderedAllGather(enter, engine.abandon))
        module.set_custom_reduce_scatter(OrderedReduceScatter(enter, engine.abandon))


def _enter_without_order(_kind: int, _numel: int, _dtype: torch.dtype) -> None:
    pass


class _OwnTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Replace views by tensors with their own autograd nodes; see [Note: views and hooks]."""
    if not torch.is_grad_enabled():
        return output
    if not any(map(_is_live_view, trained_tensors_in(output))):
        return output
    return tree_map(lambda leaf: _OwnTensor.apply(leaf) if _is_live_view(leaf) else leaf, output)


def _is_live_view(leaf: Any) -> bool:
    """Return True if ``leaf`` is a view with a ``grad_fn``."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return False
    # Reading grad_fn also makes torch regenerate the view's autograd node if the view's base was
    # changed in place. FSDP sets its hook without this step, and torch then crashes.
    return leaf.grad_fn is not None and leaf._is_view()

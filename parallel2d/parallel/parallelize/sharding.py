"""Shards over the ``shard`` axis with FSDP2's `fully_shard` (`shard`), and has gradients reduced
over ``replicate`` (`synchronize`).

[Note: one engine for every strategy] `fully_shard` gets the ``shard`` axis, and gathers and reduces
over it; with shard = 1 it sends nothing. `sync` reduces over the replicas, because torch's own
second axis adds sums of micro-batches that use different parameters into each other. With replicate
> 1 the parameters are then placed on both axes, so that checkpoints and norms know of the replicas;
`fully_shard` takes over parameters that are replaced before the first forward. So ``ddp``,
``zero2``, ``zero3`` and the hybrids are readings of one code path, with one set of hooks and one
kind of parameter. Gradients are averaged over the data ranks, as everywhere in PyTorch; `loss`
builds on it.

[Note: views and hooks] `fully_shard` puts a hook on what a group returns; when its gradient comes,
backward gathers the group's parameters. Two things go wrong when that is a view. If the view's base
was changed in place after the view was taken (``y = h.view(-1); h[0] += 1; return y``), torch ends
the process by SIGSEGV as the hook is set (pytorch issue 196459). And if the caller changes the view
in place (``y = block(x); y += x``), the hook is lost, and backward fails, because parameters are
missing. So in place of a view the group returns a tensor that shares the view's memory and version,
and is a node of its own in the autograd graph.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map

from parallel2d.base.topology import Topology
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup, fsdp_groups
from parallel2d.parallel.fsdp_internals.sharded_model import (
    after_backward,
    collect_grad_tensors,
)
from parallel2d.parallel.mesh import axis_names, mesh_shape
from parallel2d.parallel.model_structure import places_in
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

log = logging.getLogger(__name__)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    ignored: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Applies `fully_shard` to each group of ``layout``, the root for all that is left.
    ``ignored``: parameters that stay as they are."""
    config = layout.config
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for modules, policy in layout.groups_of(model):
        for module in modules:
            # Before `fully_shard`, whose hook must come later; see [Note: views and hooks].
            module.register_forward_hook(_without_views)
        fully_shard(
            # A list would make torch hold a module of one group otherwise.
            modules if len(modules) > 1 else modules[0],
            mesh=mesh["shard"],
            mp_policy=policy,
            reshard_after_forward=config.strategy.placement.reshard_after_forward,
            offload_policy=offload,
            ignored_params=ignored or None,
        )
    if layout.shape.replicate > 1:
        _place_on_replicas(model, mesh)
    return model


def _place_on_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Place the sharded parameters on the ``replicate`` axis too; see [Note: one engine for every
    strategy]."""
    for parameter, places in places_in(model.modules()).items():
        # Those that `keep_whole` has placed are on all axes.
        if not isinstance(parameter, DTensor) or "replicate" in axis_names(parameter.device_mesh):
            continue
        placed = DTensor.from_local(
            local_part(parameter.detach()),
            mesh[("replicate", *axis_names(parameter.device_mesh))],
            [Replicate(), *parameter.placements],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        replaced = nn.Parameter(placed, parameter.requires_grad)
        for module, name in places:
            module.register_parameter(name, replaced)
    # A move that moves nothing: `FSDPModule` takes over what it finds in the modules.
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
    """Has the gradients of ``model``, which `shard` has made, reduced over all data ranks.

    Raises `ConfigError` for a group whose trained parameters have several dtypes.
    """
    groups = fsdp_groups(model)
    shard_ranks = mesh_shape(mesh).shard
    for group in groups:
        in_fp32 = id(group.modules[0]) in precision.fp32_modules
        wire = torch.float32 if in_fp32 else precision.reduce
        final = wire if precision.keep_reduced else None
        group.set_dtypes(precision.sums, wire, shard_ranks, final)
        if shard_ranks == 1 and not layout.config.cpu_offload:
            group.share_memory(torch.float32 if in_fp32 else precision.param)
    # With one rank nothing is gathered or reduced over the shard axis.
    order = _order_of(mesh, topology) if shard_ranks > 1 else None
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
    after_backward(model, engine.end_backward)
    if order is not None:
        _keep_order(order, groups, engine)


def _order_of(mesh: DeviceMesh, topology: Topology) -> CollectiveOrder:
    """Return the order of collectives of this rank's shard group. Collective."""
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


def _keep_order(
    order: CollectiveOrder, groups: Sequence[FSDPGroup], engine: ReplicaReducer
) -> None:
    number = order.add_model([group.called for group in groups])
    for index, group in enumerate(groups):
        enter = functools.partial(order.enter, number, index)
        module: Any = group.module  # its methods name private classes of torch
        module.set_custom_all_gather(OrderedAllGather(enter, engine.abandon))
        module.set_custom_reduce_scatter(OrderedReduceScatter(enter, engine.abandon))


class _OwnTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Replaces views by tensors of their own; see [Note: views and hooks]."""
    if not torch.is_grad_enabled():
        return output
    if not any(map(_is_live_view, collect_grad_tensors(output))):
        return output
    return tree_map(lambda leaf: _OwnTensor.apply(leaf) if _is_live_view(leaf) else leaf, output)


def _is_live_view(leaf: Any) -> bool:
    """Whether ``leaf`` is a view that backward passes through."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return False
    # Reading grad_fn also makes torch update the view's node in the graph, where the view's base
    # was changed in place. torch omits this before it sets its hook.
    return leaf.grad_fn is not None and leaf._is_view()

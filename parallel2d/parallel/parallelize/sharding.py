"""Shards over the ``shard`` axis with FSDP2's `fully_shard` (`shard`), and has gradients reduced
over ``replicate`` (`synchronize`).

[Note: one engine for every strategy] A mesh with replicate > 1 goes to `fully_shard` as two axes,
and parameters are placed on both; with shard = 1 that is plain replication; with replicate = 1 only
the ``shard`` axis goes in. The engine gathers and reduces over the shard axis, `sync`
reduces over the replicas. So ``ddp``, ``zero2``, ``zero3`` and the hybrids are readings of one code
path, with one set of hooks and one kind of parameter. Gradients are averaged over the data
ranks, as everywhere in PyTorch; `loss` builds on it.

[Note: views and hooks] `fully_shard` puts a hook on what a group returns; when its gradient comes,
backward gathers the group's parameters. Two things go wrong when that is a view. If the view's base
was changed in place after the view was taken (``y = h.view(-1); h[0] += 1; return y``), torch ends
the process by SIGSEGV as the hook is set (seen with 2.13; pytorch issue 196459 says 2.9 to 2.14).
And if the caller changes the view in place (``y = block(x); y += x``), the hook is lost, and
backward fails for want of parameters. So in place of a view the group returns a tensor that shares
the view's memory and version, and is a node of its own in the autograd graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map

from parallel2d.base.config import ParallelConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.topology import Topology
from parallel2d.parallel import fsdp_internals
from parallel2d.parallel.fsdp_internals import ShardedGroup, collect_grad_tensors
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.parallelize.collective_order import (
    CollectiveOrder,
    OrderedAllGather,
    OrderedReduceScatter,
)
from parallel2d.parallel.parallelize.layout import Layout
from parallel2d.parallel.parallelize.precision import Precision
from parallel2d.parallel.parallelize.scalars import Scalar
from parallel2d.parallel.sync import GradientSync, TorchSync
from parallel2d.parallel.sync.rounded_exchange import WIRES

log = logging.getLogger(__name__)


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that `fully_shard` sees; see [Note: one engine for every strategy]."""
    if mesh_shape(mesh).replicate > 1:
        return mesh["replicate", "shard"]
    return mesh["shard"]


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    ignored: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Applies `fully_shard` to each group of ``layout``, innermost first, and to the root for all
    that is left.

    ``ignored``: parameters that stay as they are.
    """
    config = layout.config
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for modules, policy in layout.groups_of(model):
        for module in modules:
            _own_outputs(module)
        fully_shard(
            # A list would make torch hold a module of one group otherwise.
            modules if len(modules) > 1 else modules[0],
            mesh=sharding_mesh(mesh),
            mp_policy=policy,
            reshard_after_forward=config.strategy.reshard_after_forward,
            offload_policy=offload,
            ignored_params=ignored or None,
        )
    return model


def synchronize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    precision: Precision,
    topology: Topology,
    scalars: Sequence[Scalar] = (),
    seed: int = 0,
) -> None:
    """Has the gradients of ``model``, which `shard` has made, reduced over all data ranks.

    Raises `ConfigError` for a group whose trained parameters have several dtypes, and for what
    torch's own engine cannot do.
    """
    groups = fsdp_internals.sharded_groups(model)
    if config.sync.engine == "torch":
        _check_torch_engine(scalars, precision)
        log.info(
            "sync.engine=torch: gradients of parameters that ranks or micro-batches use "
            "differently may land in others"
        )
        TorchSync(model, groups, mesh)
        return
    if mesh_shape(mesh).replicate > 1:
        fsdp_internals.reduce_over_shard_alone(model, mesh)
    for group in groups:
        in_fp32 = id(group.modules[0]) in precision.fp32_modules
        wire = torch.float32 if in_fp32 else precision.reduce
        # Words that stand for no dtype are those of sync=diloco, which sends no gradients.
        between_replicas = WIRES.get(config.sync.wire, wire)
        group.set_dtypes(precision.sums, wire, between_replicas)
    order = _collective_order(mesh, topology)
    kept = precision.reduce if precision.keep_reduced else precision.storage
    engine = GradientSync(
        model,
        mesh,
        groups,
        final_dtype=kept if kept != precision.sums else None,
        scalars=scalars,
        order=order,
        config=config.sync,
        splits_updates=config.strategy.splits_updates,
        seed=seed,
    )
    fsdp_internals.after_backward(model, engine.end_backward)
    if order is not None:
        _keep_order(order, groups, engine)


def _check_torch_engine(scalars: Sequence[Scalar], precision: Precision) -> None:
    if scalars:
        what = "parameters without dimensions are"
    elif precision.keep_reduced:
        what = "precision.keep_low_precision_gradients is"
    else:
        return
    raise ConfigError(f"sync.engine=torch: {what} a matter of sync.engine=parallel2d alone")


def _collective_order(mesh: DeviceMesh, topology: Topology) -> CollectiveOrder | None:
    """None where nothing is gathered or reduced over the shard axis."""
    if mesh_shape(mesh).shard == 1:
        return None
    group = mesh.get_group("shard")
    hosts = {topology.hosts[rank] for rank in dist.get_process_group_ranks(group)}
    return CollectiveOrder.of(group, len(hosts) == 1, mesh.device_type)


def _keep_order(
    order: CollectiveOrder, groups: Sequence[ShardedGroup], engine: GradientSync
) -> None:
    number = order.add_model([group.called for group in groups])
    for index, group in enumerate(groups):
        # Modules of one group share the state that holds it.
        module = group.modules[0]
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(OrderedAllGather(order, number, index, engine.abandon))
        module.set_custom_reduce_scatter(OrderedReduceScatter(order, number, index, engine.abandon))


class _OwnTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _own_outputs(module: nn.Module) -> None:
    """Makes ``module`` return no views. Before `fully_shard`, whose hook must come later; see
    [Note: views and hooks]."""
    module.register_forward_hook(_without_views)


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return output
    if not any(_is_live_view(tensor) for tensor in collect_grad_tensors(output)):
        return output
    return tree_map(_own, output)


def _own(leaf: Any) -> Any:
    return _OwnTensor.apply(leaf) if _is_live_view(leaf) else leaf


def _is_live_view(leaf: Any) -> bool:
    """Whether ``leaf`` is a view that backward passes through."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return False
    # Reading grad_fn also makes torch update the view's node in the graph, where the view's base
    # was changed in place. torch omits this before it sets its hook.
    if leaf.grad_fn is None:
        return False
    return leaf._is_view()

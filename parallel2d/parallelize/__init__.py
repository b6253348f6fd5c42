"""`parallelize`: the one page that turns a plain ``nn.Module`` into one that is sharded, replicated
and ready to train.

A model (on meta or with weights), a mesh and a `ParallelConfig` flow in; the same model object
flows out, its parameters DTensors, its parameter names unchanged. The transforms run in a fixed
order, each in a file of its own:

    float8 -> tensor parallel -> activation checkpointing -> compile -> sharding and replicate sync
    -> prefetch -> weights

Float8 and tensor parallelism come first because they change what a layer computes; checkpointing
and compilation wrap what a block runs and so must see the split layers; sharding comes last because
its hooks must stay outside of what is recomputed or compiled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.config import ConfigError, ParallelConfig
from parallel2d.mesh import Topology, check_placement, mesh_shape
from parallel2d.obsolete import refuse
from parallel2d.parallelize.activation_checkpointing import (
    checkpoint_activations,
    select_without_hooks,
)
from parallel2d.parallelize.bucketing import bucket_modules
from parallel2d.parallelize.compilation import compile_blocks
from parallel2d.parallelize.float8 import check_float8, convert_to_float8
from parallel2d.parallelize.ignored import cast_ignored, ignored_names, ignored_parameters
from parallel2d.parallelize.initialization import (
    Initializer,
    allocate,
    build_on_meta,
    check_equal_on_all_ranks,
    check_same_structure,
    has_meta_parameters,
    plan_weights,
)
from parallel2d.parallelize.misuse import (
    check_arguments,
    check_no_optimizer,
    check_parameters,
    check_same_torch,
    check_tensor_ranks_share_data,
    explain_calls,
    refuse_direct_forward,
)
from parallel2d.parallelize.prefetch import prefetch_parameters
from parallel2d.parallelize.scalars import keep_whole, scalar_places
from parallel2d.parallelize.sharding import (
    DTYPES,
    cast_storage,
    check_offload,
    fp32_modules,
    shard,
    synchronize,
)
from parallel2d.parallelize.structure import find_blocks
from parallel2d.parallelize.tensor_parallel import apply_tensor_parallel
from parallel2d.parallelize.weights import hand_over, scatter
from parallel2d.sync import clear_with_gradients

__all__ = ["build_on_meta", "parallelize"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig | None = None,
    *,
    seed: int | None = None,
    init: Initializer | None = None,
    tensor_plan: Mapping[str, object] | None = None,
    broadcast_from: int | None = None,
    weights: Callable[[nn.Module], Container[str]] | None = None,
    topology: Topology | None = None,
    ignored: Sequence[str | nn.Module | nn.Parameter] = (),
    **unknown: object,
) -> nn.Module:
    """Shards ``model`` over ``mesh`` in place and returns it. Collective: every rank calls it with
    equal arguments.

    Args:
        model: any ``nn.Module``. Built under `build_on_meta` its weights are drawn here, from
            ``seed`` and the canonical names alone; built with real weights they are kept, after a
            check that all ranks hold the same.
        mesh: from `parallel2d.build_mesh`, or your own with axes named ``replicate``, ``shard`` and
            optionally ``tensor``.
        config: strategy, bucketing, precision, activation checkpointing, compilation, prefetch,
            offloading; presets by name.
        seed: of the initial weights; required when parameters are on meta.
        init: ``init(module, name)`` sets the parameters that ``module`` owns; default: each
            module's own initializer.
        tensor_plan: module pattern -> parallel style or word
            (`parallel2d.parallelize.tensor_parallel`); required when the mesh has a tensor axis.
        broadcast_from: the rank whose weights and buffers all ranks start from. The others may hold
            any, or be on meta; they never hold the whole model. None: no rank is asked.
        weights: for a model on meta: ``weights(model)`` fills what it has values for once the model
            is sharded and has storage, and returns the canonical names; the rest is drawn from
            ``seed``.
        topology: which rank is on which host, if known; otherwise the ranks are asked.

        ignored: modules, or patterns of names, whose frozen parameters stay whole and plain on
            every rank; see `parallel2d.parallelize.ignored`.

    Build the optimizer after this call, on the returned model's parameters.

    Raises:
        ConfigError: a setting that cannot work on this model or mesh, with what can.
    """
    refuse(unknown, "parallelize", _OPTIONS)
    check_arguments(model, mesh, config)
    settings = (config or ParallelConfig()).resolved()
    shape = mesh_shape(mesh)
    shape.spec().refuse_contradiction(settings.strategy.name)
    topology = topology or Topology.gather()
    check_placement(
        mesh.mesh.reshape(shape.replicate, shape.shard, shape.tensor),
        topology,
        settings.allow_cross_node,
    )

    check_offload(settings.cpu_offload, mesh.device_type, shape.replicate)
    check_float8(settings.precision, mesh.device_type)
    check_same_torch()
    check_no_optimizer(model)
    check_parameters(model)
    kept = hand_over(model, broadcast_from) if broadcast_from is not None else None
    check_same_structure(model)
    on_meta = has_meta_parameters(model, seed if kept is None else 0)
    if weights is not None and (not on_meta or kept is not None):
        raise ConfigError(
            "weights= is for a model on meta without broadcast_from: build it under "
            "parallel2d.build_on_meta"
        )
    fp32 = fp32_modules(model, settings.precision)
    left_out = ignored_names(model, ignored)
    cast_storage(model, settings.precision, fp32)
    cast_ignored(model, left_out, DTYPES[settings.precision.param], fp32)
    if not on_meta:
        check_equal_on_all_ranks(model)
    blocks = find_blocks(model, settings.bucketing.blocks, settings.bucketing.policy)
    initial = plan_weights(model, blocks, init) if on_meta and kept is None else None

    convert_to_float8(blocks, settings.precision, fp32)
    apply_tensor_parallel(model, mesh, tensor_plan)
    checkpoint_activations(model, blocks, settings.activation_checkpointing)
    budget = settings.activation_checkpointing
    compile_blocks(
        model,
        blocks,
        settings.compile,
        shape.tensor,
        budget.memory_budget if budget.name == "budget" else None,
    )
    groups = bucket_modules(model, blocks, settings.bucketing, fp32)
    left = ignored_parameters(model, left_out, mesh.device_type)
    scalars = scalar_places(model, left)
    shard(model, mesh, groups, settings, fp32, left | set(scalars))
    synchronize(model, mesh, settings, topology, fp32, keep_whole(model, mesh, scalars.values()))
    select_without_hooks(model, settings.activation_checkpointing)
    prefetch_parameters(model, mesh, settings.prefetch)
    if on_meta:
        allocate(model, mesh.device_type, offload=settings.cpu_offload)
    if kept is not None:
        scatter(model, kept, source=broadcast_from or 0)
    if initial is not None:
        assert seed is not None
        initial.write(
            model, seed, mesh.device_type, given=weights(model) if weights is not None else ()
        )
    refuse_direct_forward(model)
    explain_calls(model)
    clear_with_gradients(model)
    check_tensor_ranks_share_data(model, mesh)
    return model


_OPTIONS = ("seed", "init", "tensor_plan", "broadcast_from", "weights", "topology", "ignored")


class _CallableModule(ModuleType):
    """``from parallel2d import parallelize`` may give this module, which has the name of its
    function: then it acts as one."""

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        return parallelize(*args, **kwargs)

    # Ray and others send functions to their workers with the globals they name
    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallableModule

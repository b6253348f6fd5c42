"""Shard, replicate and prepare any ``nn.Module`` for training: `parallelize`.

`parallelize` works in place: the model keeps its class and its parameter names, and its parameters
become `DTensor`s. Each transform has a file of this package. The order of the transforms is fixed.
Float8 and tensor parallelism come first, because both replace the computation of layers. Activation
checkpointing and compilation come next, because both wrap the ``forward`` of a block and must see
the split layers. Sharding comes after these transforms, because the hooks of FSDP must stay outside
of the recomputed or compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config.parallel import ParallelConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import among
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh import mesh_shape, part_group, sharding_mesh
from parallel2d.parallel.model_structure import fqn_of
from parallel2d.parallel.parallelize.activation_checkpointing import (
    checkpoint_activations,
    offload_activations,
    select_without_hooks,
)
from parallel2d.parallel.parallelize.block_calls import prepare_block_calls
from parallel2d.parallel.parallelize.compilation import compile_blocks
from parallel2d.parallel.parallelize.conditional import Always, Conditional, run_dummies
from parallel2d.parallel.parallelize.context_blocks import Stack
from parallel2d.parallel.parallelize.context_parallel import (
    intercept_attention,
    learn_at_first,
    slice_blocks,
)
from parallel2d.parallel.parallelize.float8 import convert_to_float8
from parallel2d.parallel.parallelize.ignored import ignored_parameters
from parallel2d.parallel.parallelize.layout import Layout, resolve
from parallel2d.parallel.parallelize.model_calls import explain_model_calls
from parallel2d.parallel.parallelize.model_copy import DEEPCOPY, copier, refuse_copy, sharded_copy
from parallel2d.parallel.parallelize.optimizer_hooks import follow_steps
from parallel2d.parallel.parallelize.precision import Precision, cast_inputs, cast_storage
from parallel2d.parallel.parallelize.preconditions import check, check_arguments, mark_sharded
from parallel2d.parallel.parallelize.prefetch import prefetch_parameters
from parallel2d.parallel.parallelize.running_statistics import average_buffers, watch_statistics
from parallel2d.parallel.parallelize.scalars import replicate_scalars, scalar_places
from parallel2d.parallel.parallelize.script_checks import check_script
from parallel2d.parallel.parallelize.sharding import shard, synchronize
from parallel2d.parallel.parallelize.tensor_parallel import apply_tensor_parallel
from parallel2d.parallel.parallelize.unsharded_parameters import follow_updates
from parallel2d.parallel.sync import clear_with_gradients
from parallel2d.parallel.sync.engine.replica_reducer import engine_of, note_update_mesh
from parallel2d.parallel.weights.construction import build_on_meta, seeds_of
from parallel2d.parallel.weights.initial_values import Initializer
from parallel2d.parallel.weights.named_tensors import all_tensors
from parallel2d.parallel.weights.source import WeightSource
from parallel2d.parallel.weights.unsharded_tensors import sharded_modules

__all__ = [
    "Always",
    "average_buffers",
    "build_on_meta",
    "model_sharded_context",
    "parallelize",
    "sharded_copy",
]


ModelT = TypeVar("ModelT", bound=nn.Module)


def parallelize(
    model: ModelT,
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
    conditional: Conditional | None = None,
) -> ModelT:
    """Shard ``model`` over ``mesh`` in place and return the model.

    Collective: every rank calls this function with equal arguments. Build the optimizer after this
    call, from the parameters of the returned model.

    Args:
        model: any ``nn.Module``. If it was built under `build_on_meta`, this function initializes
            each module's weights from ``seed`` and the FQN of the module. If the constructor of
            the model sets weights directly, the weights equal those of a constructor call in one
            process under ``torch.manual_seed(seed)``. If the model is not on meta, its weights are
            used, after a check that they are equal on all ranks.
        mesh: from `parallel2d.build_mesh`, or a custom mesh with axes named ``replicate``,
            ``shard`` and optionally ``context`` and ``tensor``.
        config: strategy, bucketing, precision, activation checkpointing, compilation, prefetch and
            offloading; each section also accepts the name of a preset.
        seed: seed of the initial weights, required when parameters are on meta. It also seeds the
            stochastic rounding of ``sync.wire``.
        init: ``init(module, name)`` initializes the direct parameters of ``module`` and may depend
            only on its arguments. For each module it runs on one rank of a replica. Default: the
            ``reset_parameters`` or ``_init_weights`` of the modules, or the constructor.
        tensor_plan: module pattern -> ``ParallelStyle`` or its short name
            (see `parallelize.tensor_parallel`); required when the mesh has a tensor axis.
        broadcast_from: the rank that broadcasts its weights and buffers at the start. On the other
            ranks the model may have other weights, or be on meta to save memory. These ranks
            receive only pieces of the unsharded weights. None: no rank broadcasts.
        weights: for a model on meta. ``weights(model)`` is called once the model is sharded and has
            storage; it fills the tensors that it has values for and returns their FQNs. The other
            tensors are drawn from ``seed``.
        topology: the host of each rank, if known. None: the ranks exchange their hosts.
        ignored: modules, or patterns of names. Their frozen parameters are not sharded: each rank
            holds them as ``torch.Tensor``; see `parallelize.ignored`.
        conditional: name or pattern of a module that only some ranks run -> ``replicate``,
            ``root``, ``always`` or `parallel2d.Always`; see `parallelize.conditional`.

    Raises:
        ConfigError: a setting that this model or mesh does not support. The message names a
            supported value.
    """
    check_arguments(model, mesh, config)
    config = config or ParallelConfig()
    # Sharding replaces the parameters. Their attributes are copied to the new parameters, because
    # scripts choose parameter groups of the optimizer by them.
    attributes = {}
    for name, each in model.named_parameters():
        attributes[fqn_of(name)] = dict(vars(each))
    with among(part_group(mesh)):
        topology = topology or Topology.gather()
        check(model, mesh, config, topology)
        source = WeightSource(
            model, seed=seed, init=init, broadcast_from=broadcast_from, given=weights
        )
        # `resolve` comes after `WeightSource`: if one rank broadcasts, `WeightSource` ties the same
        # parameters on all ranks, and the layout depends on these ties.
        shape = mesh_shape(mesh)
        layout = resolve(
            config,
            shape,
            model,
            mesh=mesh,
            tensor_plan=tensor_plan,
            ignored=ignored,
            conditional=conditional,
        )
        apply_layout(layout, model, mesh, source, topology, seed or 0)
    for name, parameter in model.named_parameters():
        kept = attributes.get(fqn_of(name), {})
        vars(parameter).update(kept | vars(parameter))
    return model


@contextmanager
def model_sharded_context(
    mesh: DeviceMesh,
    config: ParallelConfig | None = None,
    *,
    seed: int,
    init: Initializer | None = None,
    tensor_plan: Mapping[str, object] | Callable[[nn.Module], Mapping[str, object]] | None = None,
) -> Iterator[None]:
    """Build the modules of the body on meta, and parallelize them over ``mesh`` at its end.

    Collective. The end of the body parallelizes each outermost module that has parameters. ::

        with model_sharded_context(mesh, ParallelConfig("hybrid"), seed=0):
            model = MyModel(...)
        optimizer = build_optimizer(model, ...)

    A module is not outermost if the body frees it or makes it a child of another module. If the
    body raises, nothing is parallelized.

    Args:
        mesh: see `parallelize`.
        config: see `parallelize`; the same for every outermost module.
        seed: seed of the first outermost module. Each further outermost module has a seed derived
            from ``seed`` and its number, but a deep copy gets the weights of its original.
        init: see `parallelize`; the same for every outermost module. It is called after the
            body, so ``lambda module, name: model.init_weights(module, name)`` may refer to a
            ``model`` that the body builds.
        tensor_plan: see `parallelize`, or a function of the module that returns the plan, because
            the module does not exist before the context.

    Raises:
        ConfigError: the body built no module with parameters; a module holds weights that are not
            on meta, because they were built before the context; or any error of `parallelize`. If
            `parallelize` raises for one of several outermost modules, the modules before it have
            already been parallelized.
    """
    with build_on_meta() as built:
        yield
    # A constructor may have been called twice for one module.
    modules = dict.fromkeys(reference() for reference in built)
    inner: set[nn.Module] = set()
    for each in modules:
        if each is not None:
            inner.update(list(each.modules())[1:])  # without the module itself
    with_parameters = []
    for each in modules:
        if each is not None and each not in inner and next(each.parameters(), None) is not None:
            with_parameters.append(each)
    if not with_parameters:
        raise ConfigError(
            "model_sharded_context: no module with parameters was built inside; call the model's "
            "constructor inside the context and keep the model in a variable"
        )
    seeds = seeds_of(with_parameters, seed)
    for module, own_seed in zip(with_parameters, seeds, strict=True):
        plan = tensor_plan(module) if callable(tensor_plan) else tensor_plan
        parallelize(module, mesh, config, seed=own_seed, init=init, tensor_plan=plan)


def apply_layout(
    layout: Layout,
    model: ModelT,
    mesh: DeviceMesh,
    source: WeightSource,
    topology: Topology,
    seed: int,
) -> ModelT:
    """Apply ``layout``, from `resolve` for this model and mesh, to ``model``.

    `parallelize` calls this function after its checks.

    Args:
        layout: the resolved layout.
        model: the model, not sharded yet; changed in place.
        mesh: the mesh of the sizes in ``layout``.
        source: the source of the weights.
        topology: the host of each rank.
        seed: seed of the stochastic rounding of ``sync.wire``.
    """
    copy = copier(
        model, lambda twin, weights: apply_layout(layout, twin, mesh, weights, topology, seed)
    )
    # The first call marks the original parameters, which other models may share. The second call,
    # after `_fill`, marks the parameters that have replaced them.
    mark_sharded(model, layout.ignored)
    stacks = _transform(layout, model, mesh, source, topology, seed)
    _fill(layout, model, mesh, source, topology)
    mark_sharded(model, layout.ignored)
    # Hooks that raise errors for misuse of the model.
    prepare_block_calls(model)
    explain_model_calls(model, mesh)
    gathered = follow_updates(model, sharding_mesh(mesh))
    follow_steps(gathered)
    check_script(model, mesh, layout.config, gathered)
    watch_statistics(model, mesh)
    clear_with_gradients(model)
    learn_at_first(model, mesh, stacks)
    # `fully_shard` has given the class a `__deepcopy__` that raises; the instance attribute wins.
    vars(model)[DEEPCOPY] = copy
    for name, module in sharded_modules(model):
        if module is not model:
            vars(module)[DEEPCOPY] = functools.partial(refuse_copy, name)
    return model


def apply_on_fake_tensors(
    layout: Layout,
    model: nn.Module,
    mesh: DeviceMesh,
    fake: FakeTensorMode,
    topology: Topology,
) -> nn.Module:
    """Apply ``layout`` to a ``model`` on meta, with tensors of ``fake`` instead of storage.

    The fake tensors show the allocations of the layout. No hooks against misuse are installed.
    """
    # All tensors count as given, so that no weight is initialized.
    given = all_tensors(model)
    source = WeightSource(
        model, seed=0, init=lambda *_: None, broadcast_from=None, given=lambda _: given
    )
    stacks = _transform(layout, model, mesh, source, topology, seed=0)
    with fake:
        _fill(layout, model, mesh, source, topology)
    learn_at_first(model, mesh, stacks, compares=False)
    return model


def _transform(
    layout: Layout,
    model: nn.Module,
    mesh: DeviceMesh,
    source: WeightSource,
    topology: Topology,
    seed: int,
) -> list[Stack]:
    """Apply the transforms in their order. Return the `Stack`s that a context axis splits."""
    config = layout.config
    parameters = sharding_mesh(mesh)
    precision = Precision.of(config.precision, model)
    cast_storage(model, precision, layout.ignored)
    blocks = layout.blocks_of(model)
    source.remember(model, blocks)

    convert_to_float8(blocks, config.precision, precision.fp32_modules)
    apply_tensor_parallel(model, parameters, layout.tensor_plan)
    stacks = intercept_attention(model, mesh)
    checkpoint_activations(model, blocks, config.activation_checkpointing)
    budget = config.activation_checkpointing.compiler_budget
    compile_blocks(blocks, config.compile, budget, intercepts=bool(stacks))
    offload_activations(model, blocks, config.activation_checkpointing)
    slice_blocks(stacks)
    plain = ignored_parameters(model, layout.ignored, mesh.device_type)
    without_dims = scalar_places(model, plain)
    shard(model, parameters, layout, plain | set(without_dims))
    scalars = replicate_scalars(model, parameters, without_dims.values(), precision.param)
    synchronize(model, parameters, layout, precision, topology, scalars, seed)
    if mesh_shape(parameters).shard > 1:
        run_dummies(model, layout.conditional, blocks, engine_of(model).gradients)
    select_without_hooks(model, config.activation_checkpointing)
    prefetch_parameters(model, parameters, config.prefetch)
    cast_inputs(model, precision)
    return stacks


def _fill(
    layout: Layout, model: nn.Module, mesh: DeviceMesh, source: WeightSource, topology: Topology
) -> None:
    """Allocate this rank's local shards and fill them."""
    source.fill(model, sharding_mesh(mesh), topology, offload=layout.config.cpu_offload)
    engine = engine_of(model)
    engine.updates.make(model)
    note_update_mesh(model, engine.update_mesh)

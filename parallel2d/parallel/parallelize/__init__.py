"""`parallelize` turns a plain ``nn.Module`` into one that is sharded, replicated and ready to
train.

The same model object comes back, its parameters `DTensor`s, its parameter names unchanged. Each
transform is in a file of its own. Float8 and tensor parallelism come first because they change what
a layer computes; activation checkpointing and compilation wrap what a block runs and so must see
the split layers; sharding comes last because its hooks must stay outside of what is recomputed or
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config.parallel import ParallelConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh import mesh_shape, sharding_mesh
from parallel2d.parallel.model_structure import fqn_of
from parallel2d.parallel.parallelize.activation_checkpointing import (
    checkpoint_activations,
    select_without_hooks,
)
from parallel2d.parallel.parallelize.block_calls import prepare_block_calls
from parallel2d.parallel.parallelize.compilation import compile_blocks
from parallel2d.parallel.parallelize.context_blocks import Stack
from parallel2d.parallel.parallelize.context_parallel import (
    intercept_attention,
    learn_at_first,
    slice_blocks,
)
from parallel2d.parallel.parallelize.copies import DEEPCOPY, copier, sharded_copy
from parallel2d.parallel.parallelize.float8 import convert_to_float8
from parallel2d.parallel.parallelize.gathered import follow_updates
from parallel2d.parallel.parallelize.ignored import ignored_parameters
from parallel2d.parallel.parallelize.layout import Layout, resolve
from parallel2d.parallel.parallelize.model_calls import explain_model_calls
from parallel2d.parallel.parallelize.optimizer_hooks import follow_steps
from parallel2d.parallel.parallelize.precision import Precision, cast_inputs, cast_storage
from parallel2d.parallel.parallelize.preconditions import check, check_arguments, mark_sharded
from parallel2d.parallel.parallelize.prefetch import prefetch_parameters
from parallel2d.parallel.parallelize.running_statistics import average_buffers, watch_statistics
from parallel2d.parallel.parallelize.scalars import keep_whole, scalar_places
from parallel2d.parallel.parallelize.script_checks import check_script
from parallel2d.parallel.parallelize.sharding import shard, synchronize
from parallel2d.parallel.parallelize.tensor_parallel import apply_tensor_parallel
from parallel2d.parallel.sync import clear_with_gradients
from parallel2d.parallel.sync.engine.replica_reducer import engine_of, note_update_mesh
from parallel2d.parallel.weights.construction import build_on_meta, seeds_of
from parallel2d.parallel.weights.initial_values import Initializer
from parallel2d.parallel.weights.named_tensors import all_tensors
from parallel2d.parallel.weights.source import WeightSource

__all__ = [
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
) -> ModelT:
    """Shards ``model`` over ``mesh`` in place and returns it. Collective: every rank calls it with
    equal arguments.

    Args:
        model: any ``nn.Module``. Built under `build_on_meta` its weights are drawn here, from
            ``seed`` and the FQNs alone, or, where its constructor sets some by itself, those that
            the constructor gives in one process under ``torch.manual_seed(seed)``; built with
            real weights they are kept, after a check that all ranks hold the same.
        mesh: from `parallel2d.build_mesh`, or your own with axes named ``replicate``, ``shard`` and
            optionally ``context`` and ``tensor``.
        config: strategy, bucketing, precision, activation checkpointing, compilation, prefetch,
            offloading; presets by name.
        seed: of the initial weights, required when parameters are on meta; and of what
            ``sync.wire`` rounds at random.
        init: ``init(module, name)`` sets the parameters that ``module`` owns; default: each
            module's own initializer, or the constructor.
        tensor_plan: module pattern -> parallel style or word
            (`parallelize.tensor_parallel`); required when the mesh has a tensor axis.
        broadcast_from: the rank whose weights and buffers all ranks start from. The others may hold
            any, or be on meta; they never hold the whole model. None: no rank is asked.
        weights: for a model on meta: ``weights(model)`` fills what it has values for once the model
            is sharded and has storage, and returns the FQNs; the rest is drawn from
            ``seed``.
        topology: which rank is on which host, if known; otherwise the ranks are asked.
        ignored: modules, or patterns of names, whose frozen parameters stay whole and plain on
            every rank; see `parallelize.ignored`.

    Build the optimizer after this call, on the returned model's parameters.

    Raises:
        ConfigError: a setting that cannot work on this model or mesh, with what can.
    """
    check_arguments(model, mesh, config)
    config = config or ParallelConfig()
    topology = topology or Topology.gather()
    check(model, mesh, config, topology)
    # Scripts choose parameter groups by attributes of parameters, which are replaced from here on.
    attributes = {fqn_of(name): dict(vars(each)) for name, each in model.named_parameters()}
    source = WeightSource(model, seed=seed, init=init, broadcast_from=broadcast_from, given=weights)
    # After the weights were handed over, which ties on all ranks what is tied on one.
    shape = mesh_shape(mesh)
    layout = resolve(config, shape, model, mesh=mesh, tensor_plan=tensor_plan, ignored=ignored)
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
    """Inside, modules are built without weights; at the end each outermost one with parameters is
    parallelized over ``mesh``. Collective. ::

        with model_sharded_context(mesh, ParallelConfig("hybrid"), seed=0):
            model = MyModel(...)
        optimizer = build_optimizer(model, ...)

    Args:
        mesh, config, seed, init: as of `parallelize`, for every outermost module alike. ``init`` is
            called after the context, so ``lambda module, name: model.init_weights(module, name)``
            may name a model that is built inside. The first outermost module draws from ``seed``,
            each other one from a seed made of ``seed`` and its number, and a copy as its original.
        tensor_plan: also a function of the module that returns the plan, because the module does
            not exist before.

    A module that is built and dropped inside, or put into another one, is not outermost. After an
    exception inside nothing is parallelized.

    Raises:
        ConfigError: nothing with parameters was built inside, a module was given weights that are
            not on meta (built outside), or what `parallelize` raises; of several outermost modules,
            those before the one it refuses are parallelized.
    """
    with build_on_meta() as built:
        yield
    # A constructor may have been called twice.
    modules = dict.fromkeys(reference() for reference in built)
    alive = [module for module in modules if module is not None]
    # The first of its modules is a module itself.
    inner = set(chain.from_iterable(list(module.modules())[1:] for module in alive))
    outermost = [module for module in alive if module not in inner]
    with_parameters = [each for each in outermost if next(each.parameters(), None) is not None]
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
    """Makes of ``model`` what ``layout`` says, which `resolve` has found for it on this mesh; the
    rest of `parallelize`, after `check`. ``seed``: of what ``sync.wire`` rounds at random."""
    copy = copier(
        model, lambda twin, weights: apply_layout(layout, twin, mesh, weights, topology, seed)
    )
    mark_sharded(model, layout.ignored)
    stacks = _transform(layout, model, mesh, source, topology, seed)
    _fill(layout, model, mesh, source, topology)
    mark_sharded(model, layout.ignored)
    # Errors for calls that would go wrong.
    prepare_block_calls(model)
    explain_model_calls(model, mesh)
    gathered = follow_updates(model, sharding_mesh(mesh))
    follow_steps(gathered)
    check_script(model, mesh, layout.config, gathered)
    watch_statistics(model, mesh)
    clear_with_gradients(model)
    learn_at_first(model, mesh, stacks)
    # `fully_shard` has given the class one that raises.
    vars(model)[DEEPCOPY] = copy
    return model


def apply_on_fake_tensors(
    layout: Layout,
    model: nn.Module,
    mesh: DeviceMesh,
    fake: FakeTensorMode,
    topology: Topology,
) -> nn.Module:
    """As `apply_layout`, for a ``model`` on meta whose parameters become tensors of ``fake``,
    without storage: to ask what a layout allocates. Calls that would go wrong are not refused."""
    # Nothing is left to be drawn.
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
    """The transforms, in their order. Returns what a context axis is to split."""
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
    compile_blocks(blocks, config.compile, config.activation_checkpointing.compiler_budget)
    slice_blocks(stacks)
    plain = ignored_parameters(model, layout.ignored, mesh.device_type)
    without_dims = scalar_places(model, plain)
    shard(model, parameters, layout, plain | set(without_dims))
    scalars = keep_whole(model, parameters, without_dims.values(), precision.param)
    synchronize(model, parameters, layout, precision, topology, scalars, seed)
    select_without_hooks(model, config.activation_checkpointing)
    prefetch_parameters(model, parameters, config.prefetch)
    cast_inputs(model, precision)
    return stacks


def _fill(
    layout: Layout, model: nn.Module, mesh: DeviceMesh, source: WeightSource, topology: Topology
) -> None:
    """Weights on this rank."""
    source.fill(model, sharding_mesh(mesh), topology, offload=layout.config.cpu_offload)
    engine = engine_of(model)
    engine.updates.make(model)
    note_update_mesh(model, engine.update_mesh)

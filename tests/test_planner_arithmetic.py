"""Memory and bytes that are computed from shapes against real parallelized models on a process group without processes."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import pytest
import torch
from planned import MODELS, fake_mesh, measured, plan_of, small_llama

from parallel2d import ConfigError, ParallelConfig, build_on_meta
from parallel2d.config import (
    OPTIMIZERS,
    BucketingConfig,
    OptimizerConfig,
    PrecisionConfig,
    SyncConfig,
)
from parallel2d.cost.fake_group import fake_process_group
from parallel2d.cost.model_shapes import ModelShapes, collect_shapes
from parallel2d.cost.state_memory import StateBytes, state_bytes
from parallel2d.cost.traffic import predict_layout
from parallel2d.mesh import MeshShape
from parallel2d.models import llama
from parallel2d.optimizer import muon_names

ADAMW = OPTIMIZERS["adamw"]
HYBRID = (2, 3, 1)
# A mesh that each strategy allows, with a shard axis that divides none of the sizes of `Odd`.
MESHES = {
    "ddp": (4, 1, 1),
    "zero2": (1, 5, 1),
    "zero3": (1, 5, 1),
    "hybrid_zero2": HYBRID,
    "hybrid": HYBRID,
    "hybrid_full": (3, 4, 1),
}


def shapes_of(
    model: torch.nn.Module, config: ParallelConfig, optimizer: OptimizerConfig, tensor: int = 1
) -> ModelShapes:
    muon = muon_names(model, optimizer)
    if tensor == 1:
        return collect_shapes(model, config, by_muon=muon)
    with fake_mesh((1, 1, tensor), "hybrid") as (mesh, _):
        return collect_shapes(model, config, mesh=mesh, plan=plan_of(model, tensor), by_muon=muon)


def compare(
    name: str,
    sizes: tuple[int, int, int],
    config: ParallelConfig,
    optimizer: OptimizerConfig = ADAMW,
    accumulation: int = 1,
) -> StateBytes:
    """Asserts that the first rank of the real model has what is computed; returns that."""
    with build_on_meta():
        plain = MODELS[name]()
    shapes = shapes_of(plain, config, optimizer, sizes[2])
    shape = MeshShape(*sizes)
    real = measured(MODELS[name](), sizes, config, optimizer, accumulation=accumulation)
    computed = state_bytes(shapes, shape, config, optimizer)
    assert computed == real.states
    moved = predict_layout(
        shapes, shape, config, optimizer, accumulation=accumulation, device_type="cpu"
    )
    assert moved == pytest.approx(real.moved, rel=1e-12)
    return computed


@pytest.mark.parametrize("name", ["odd", "untied", "attending", "turning", "llama", "tied_llama"])
@pytest.mark.parametrize("strategy", MESHES)
def test_every_strategy_and_model(strategy, name):
    # Torch's fused kernels take no complex parameters.
    optimizer = dataclasses.replace(ADAMW, implementation="foreach")
    computed = compare(name, MESHES[strategy], ParallelConfig(strategy), optimizer)
    assert computed.total > computed.parameters > 0


@pytest.mark.parametrize("bucketing", ["layer", "block", "size", "none"])
@pytest.mark.parametrize("strategy", ["zero2", "hybrid"])
def test_every_bucketing(strategy, bucketing):
    # Some of the modules fit together into this size, some do not.
    bucket = BucketingConfig(bucketing)
    if bucketing == "size":
        bucket.size_mib = 1500 / 2**20
    compare("odd", MESHES[strategy], ParallelConfig(strategy, bucket))


@pytest.mark.parametrize("strategy", ["zero3", "hybrid", "hybrid_full"])
@pytest.mark.parametrize(
    "optimizer",
    [
        OPTIMIZERS["adam"],
        dataclasses.replace(ADAMW, amsgrad=True),
        dataclasses.replace(ADAMW, implementation="foreach"),
        OPTIMIZERS["sgd"],
        dataclasses.replace(OPTIMIZERS["sgd"], momentum=0.0),
        OPTIMIZERS["adafactor"],
        OPTIMIZERS["muon"],
    ],
    ids=lambda config: f"{config.name}-{config.amsgrad}-{config.implementation}-{config.momentum}",
)
def test_every_optimizer(strategy, optimizer):
    compare("odd", MESHES[strategy], ParallelConfig(strategy), optimizer)


PRECISIONS: dict[str, Any] = {
    "fp64": "fp64",
    "bf16": "bf16",
    "bf16_reduce_bf16": "bf16_reduce_bf16",
    "stored in bf16": PrecisionConfig("bf16", "bf16", "bf16", "bf16"),
    "stored in bf16, sent in fp32": PrecisionConfig("bf16", "bf16", "bf16", "fp32"),
    "norms in fp32": PrecisionConfig("bf16", "fp32", "bf16", "fp32", fp32_modules=["LayerNorm"]),
    "buffers in bf16": PrecisionConfig("bf16", "fp32", "bf16", "fp32", buffers="bf16"),
}


@pytest.mark.parametrize("strategy", ["zero3", "hybrid", "hybrid_full"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision(precision, strategy):
    compare("odd", MESHES[strategy], ParallelConfig(strategy, precision=PRECISIONS[precision]))


@pytest.mark.parametrize("strategy", ["zero3", "hybrid", "hybrid_full"])
def test_gradients_that_stay_narrower_than_their_parameters(strategy):
    precision = PrecisionConfig("bf16", "fp32", "bf16", "bf16", keep_low_precision_gradients=True)
    # Torch's AdamW takes no such gradients; this optimizer does, and its momentum has their dtype.
    sgd = dataclasses.replace(OPTIMIZERS["sgd"], implementation="loop")
    compare("odd", MESHES[strategy], ParallelConfig(strategy, precision=precision), sgd)


SYNCS = {
    "bf16": SyncConfig(wire="bf16"),
    "fp32": SyncConfig(wire="fp32"),
    "int8": SyncConfig(wire="int8"),
    "torch": SyncConfig(engine="torch"),
    "full": SyncConfig(during_accumulation="full"),
    "none": SyncConfig(during_accumulation="none"),
    "diloco": SyncConfig("diloco", every=1),
    "diloco bf16": SyncConfig("diloco", wire="bf16", every=1, outer_momentum=0),
    "diloco int4": SyncConfig("diloco", wire="int4", every=1),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16_reduce_bf16"])
@pytest.mark.parametrize("sync", SYNCS)
def test_every_sync_method(sync, precision):
    # Torch's own engine takes no parameter without dimensions.
    name = "attending" if sync == "torch" else "odd"
    config = ParallelConfig("hybrid", precision=precision, sync=SYNCS[sync])
    computed = compare(name, HYBRID, config, accumulation=3)
    assert (computed.outer > 0) == sync.startswith("diloco")


def test_split_updates_that_are_sent_rounded_keep_unrounded_rows():
    config = ParallelConfig("hybrid_full", sync=SyncConfig(wire="bf16"))
    computed = compare("odd", MESHES["hybrid_full"], config)
    assert 0 < computed.masters < computed.parameters


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("name", ["llama", "tied_llama"])
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("zero3", (1, 3, 2)), ("hybrid", (2, 2, 4)), ("hybrid_full", (3, 2, 2)), ("ddp", (3, 1, 4))],
)
def test_every_kind_of_layout_with_a_tensor_axis(strategy, sizes, name, optimizer):
    # A vocabulary of 37 is split in unequal parts.
    compare(name, sizes, ParallelConfig(strategy, precision="bf16"), OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("zero3", (1, 1024, 1)),
        ("hybrid", (128, 8, 1)),
        ("hybrid_full", (32, 8, 4)),
        ("hybrid", (64, 4, 4)),
    ],
)
def test_a_thousand_ranks(strategy, sizes):
    compare("llama", sizes, ParallelConfig(strategy, precision="bf16"), accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes", "name"),
    [
        ("zero3", (1, 8, 1), "odd"),
        ("hybrid_full", (3, 2, 1), "odd"),
        ("hybrid", (1, 3, 4), "llama"),
    ],
)
def test_no_rank_has_more_than_the_fullest(strategy, sizes, name):
    config = ParallelConfig(strategy)
    shape = MeshShape(*sizes)
    fullest = state_bytes(shapes_of(MODELS[name](), config, ADAMW, sizes[2]), shape, config, ADAMW)
    totals = []
    for rank in range(shape.world_size):
        states = measured(MODELS[name](), sizes, config, ADAMW, rank=rank).states
        pairs = zip(dataclasses.astuple(states), dataclasses.astuple(fullest), strict=True)
        assert all(real <= computed for real, computed in pairs)
        totals.append(states.total)
    assert max(totals) == fullest.total
    # The sizes are not divided: without that this test would compare equal ranks.
    assert min(totals) < fullest.total


def test_equal_blocks_are_one_entry_and_nothing_is_lost():
    with build_on_meta():
        model = small_llama(n_layers=9)
    shapes = collect_shapes(model, ParallelConfig())
    assert sorted(count for _, count in shapes.groups) == [1, 9]
    assert sum(count * len(group) for group, count in shapes.groups) == len(
        list(model.parameters())
    )


def test_a_tied_parameter_is_counted_once_whether_the_model_has_storage_or_not():
    with build_on_meta():
        empty = MODELS["odd"]()
    assert collect_shapes(MODELS["odd"](), ParallelConfig()) == collect_shapes(
        empty, ParallelConfig()
    )


def test_the_model_stays_as_it_is():
    model = MODELS["odd"]()
    before = {name: (value.dtype, value.clone()) for name, value in model.named_parameters()}
    collect_shapes(model, ParallelConfig(precision=PRECISIONS["stored in bf16"]))
    for name, value in model.named_parameters():
        dtype, values = before[name]
        assert value.dtype == dtype
        assert torch.equal(value, values)


def test_shapes_are_not_collected_beside_a_process_group():
    with fake_process_group(2), pytest.raises(ConfigError) as caught, fake_process_group(2):
        pass
    assert "has a process group already" in str(caught.value)


def test_ten_thousand_layouts_of_405_billion_parameters():
    with build_on_meta():
        model = llama.Llama(
            dim=16384,
            n_layers=126,
            n_heads=128,
            n_kv_heads=8,
            hidden_dim=53248,
            vocab_size=128256,
            max_seq_len=8192,
        )
    configs = [
        ParallelConfig(name, precision="bf16") for name in ("hybrid", "hybrid_full", "zero3")
    ]
    shapes = collect_shapes(model, configs[0])
    begin = time.process_time()
    computed = 0
    for config, power, accumulation in itertools.product(configs, range(14), range(1, 240)):
        sizes = MeshShape(2 ** (14 - power), 2**power)
        if not config.strategy.replicates:
            sizes = MeshShape(1, 2**power)
        state_bytes(shapes, sizes, config, ADAMW)
        predict_layout(shapes, sizes, config, ADAMW, accumulation=accumulation, device_type="cuda")
        computed += 1
    assert computed > 10_000
    # Seconds of one core; a shared machine takes several times as long as an idle one.
    assert time.process_time() - begin < 30
    whole = state_bytes(shapes, MeshShape(1, 1), configs[0], ADAMW)
    assert whole.parameters == 4 * sum(parameter.numel() for parameter in model.parameters())

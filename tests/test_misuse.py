"""Mistakes that would train wrongly or hang: each is impossible, or one clear error."""

from __future__ import annotations

import pytest
import torch
import training
from torch import nn
from workers import WorkerError

from parallel2d import ConfigError, MeshSpec, ParallelConfig, build_mesh, build_on_meta, data_coordinate, parallelize
from parallel2d.config import BucketingConfig


def _sharded(sizes=None):
    mesh = build_mesh(MeshSpec(**(sizes or {})), "hybrid")
    with build_on_meta():
        model = training.build_llama()
    plan = training.tensor_plan(model, 2) if (sizes or {}).get("tensor") else None
    return parallelize(model, mesh, ParallelConfig("hybrid"), seed=0, init=model.init_weights, tensor_plan=plan), mesh


def _optimizer_first(sharded_later):
    torch.manual_seed(0)
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD((model if sharded_later else other).parameters(), lr=0.1)
    parallelize(model, build_mesh(MeshSpec(), "hybrid"))
    return len(optimizer.param_groups)


def test_an_optimizer_built_before_sharding_is_refused(ranks):
    assert ranks.run(2, _optimizer_first, False) == [1, 1]
    with pytest.raises(WorkerError, match="SGD was built before parallelize.*build it after") as error:
        ranks.run(2, _optimizer_first, True)
    assert error.value.kind == "ConfigError"


def _call(direct):
    model, _ = _sharded()
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    return (model.forward(tokens) if direct else model(tokens)).shape


def test_calling_forward_directly_is_refused(ranks):
    assert ranks.run(2, _call, False)[0] == (2, 4, training.VOCAB)
    with pytest.raises(WorkerError, match=r"model.forward\(...\) was called directly.*call the model") as error:
        ranks.run(2, _call, True)
    assert error.value.kind == "RuntimeError"


def test_an_integer_reshard_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="reshard_after_forward is an option of fully_shard"):
        ParallelConfig(reshard_after_forward=2)


def _other_torch():
    with pytest.MonkeyPatch.context() as patch:  # the worker goes on to other tests
        if torch.distributed.get_rank() == 1:
            patch.setattr(torch, "__version__", "2.99.0")
        _sharded()


def test_torch_versions_that_differ_are_refused(ranks):
    with pytest.raises(WorkerError, match=r"different torch versions \(.*torch 2.99.0\).*install the same one"):
        ranks.run(2, _other_torch)


def _feed(key):
    model, mesh = _sharded({"tensor": 2})
    tokens, _ = training.global_batch(0)
    rank = torch.distributed.get_rank() if key == "global" else data_coordinate(mesh)
    return model(tokens[rank : rank + 1]).shape[0]


def test_a_sampler_keyed_on_the_global_rank_under_a_tensor_axis_is_refused(ranks):
    assert ranks.run(4, _feed, "data") == [1, 1, 1, 1]
    with pytest.raises(WorkerError, match=r"share one tensor axis and were fed different data.*data_coordinate") as error:
        ranks.run(4, _feed, "global")
    assert error.value.kind == "ConfigError"


def _tied_apart():
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    model[2].weight = model[0].weight
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    from parallel2d.config import PrecisionConfig

    parallelize(model, build_mesh(MeshSpec(), "hybrid"), ParallelConfig(precision=PrecisionConfig(
        param="bf16", fp32_modules=["Embedding"])))  # fmt: skip


def test_a_tie_between_fp32_and_other_modules_names_both_sides(ranks):
    with pytest.raises(WorkerError, match="precision.fp32_modules: 0 is tied to"):
        ranks.run(2, _tied_apart)


def _tied_split_apart(plan):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    plan = {"2": torch.distributed.tensor.parallel.ColwiseParallel()} if plan is None else plan
    parallelize(model, build_mesh(MeshSpec(tensor=2), "hybrid"), ParallelConfig("hybrid"), tensor_plan=plan)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (None, r"0.weight whole, 2.weight as S\(0\)"),
        ({"0": "replicate", "2": "colwise"}, r"0.weight whole, 2.weight as S\(0\)"),
        ({"0": "rowwise"}, r"0.weight as S\(0\), 2.weight whole"),
    ],
    ids=["a style", "words", "the embedding alone"],
)
def test_a_tied_weight_of_which_one_place_is_split_is_refused(ranks, plan, told):
    with pytest.raises(WorkerError, match=f"0.weight and 2.weight are one parameter, and the plan makes {told}"):
        ranks.run(2, _tied_split_apart, plan)


def _wrong_arguments():
    mesh = build_mesh(MeshSpec(), "hybrid")
    by_class = ParallelConfig(bucketing=BucketingConfig("block", blocks=[nn.Linear]))  # type: ignore[list-item]
    sharded = parallelize(nn.Linear(4, 4), mesh, broadcast_from=0)
    told = []
    for arguments in ((nn.Linear(4, 4), None), (nn.Linear(4, 4), mesh, "zero3"), (sharded, mesh)):
        with pytest.raises(ConfigError) as error:
            parallelize(*arguments)
        told.append(str(error.value))
    for configuration in (by_class, ParallelConfig("ddp"), ParallelConfig("zero2")):
        wide = build_mesh(MeshSpec(2, 1) if configuration.strategy == "zero2" else MeshSpec(1, 2), "hybrid")
        with pytest.raises(ConfigError) as error:
            parallelize(nn.Sequential(nn.Linear(4, 4)), wide, configuration, broadcast_from=0)
        told.append(str(error.value))
    return told


def test_arguments_of_another_kind_are_one_clear_message(ranks):
    no_mesh, no_config, sharded, classes, ddp, zero2 = ranks.run(2, _wrong_arguments)[0]
    assert no_mesh == "the second argument of parallelize is the mesh, from parallel2d.build_mesh; got None"
    assert no_config == "the third argument of parallelize is a ParallelConfig, such as ParallelConfig('zero3'); got 'zero3'"
    assert sharded == "the model is sharded already, by parallelize or fully_shard: give the plain one, once"
    assert classes.startswith("bucketing.blocks are names of classes, in quotes, got [<class")
    assert ddp.startswith("strategy=ddp keeps a full copy per rank, so mesh.shard=2 must be 1")
    assert zero2.startswith("strategy=zero2 shards over all ranks, so mesh.replicate=2 must be 1")

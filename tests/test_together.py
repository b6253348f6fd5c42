"""Ranks with different numbers of batches end a custom loop together, with the weights of one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from workers import refusal

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    cross_entropy_sum,
    data_coordinate,
    full_state,
    parallelize,
    together,
    token_weight,
)

BATCHES = (3, 1, 2, 5)  # of each data rank
LAYOUTS = {"hybrid": {"replicate": 2, "shard": 2}, "zero3": {"shard": 4}, "ddp": {"replicate": 4}}


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def batches_of(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(BATCHES[rank]):
        inputs = torch.randn(2, 6, generator=generator, dtype=torch.float64)
        yield inputs, torch.randint(0, 5, (2,), generator=generator)


def weights_of_one_process(steps):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = [list(batches_of(rank)) for rank in range(4)]
    for step in range(steps):
        present = [batches[step] for batches in given if step < len(batches)]
        inputs, targets = (torch.cat(each) for each in zip(*present, strict=True))
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train_together(strategy, sizes, end):
    mesh = build_mesh(MeshSpec(**sizes), strategy)
    model = parallelize(classifier(), mesh, ParallelConfig(strategy, precision="fp64"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = 0
    for inputs, targets in together(batches_of(data_coordinate(mesh)), mesh, end=end):
        weight = token_weight((targets != -100).sum(), mesh)
        (cross_entropy_sum(model(inputs), targets) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps, copy.deepcopy(full_state(model).get("model"))


@pytest.mark.parametrize(
    ("strategy", "end"),
    [("hybrid", "longest"), ("zero3", "longest"), ("ddp", "longest"), ("hybrid", "shortest")],
)
def test_unequal_batches_give_the_weights_of_one_process(ranks, strategy, end):
    results = ranks.run(4, train_together, strategy, LAYOUTS[strategy], end)
    expected = max(BATCHES) if end == "longest" else min(BATCHES)
    assert [steps for steps, _ in results] == [expected] * 4
    for name, value in weights_of_one_process(expected).items():
        assert torch.allclose(results[0][1][name], value, rtol=0, atol=1e-12), name


def take_without_batches():
    mesh = build_mesh(MeshSpec(shard=2), "zero3")
    batches = [(torch.zeros(1), torch.zeros(1, dtype=torch.int64))]
    loop = together([] if data_coordinate(mesh) else batches, mesh)
    return refusal(lambda: next(loop))


def test_rank_without_any_batch_is_named_on_all_ranks(ranks):
    for text in ranks.run(2, take_without_batches):
        assert "rank 1 has no batch at all" in text


def test_batch_without_targets_needs_a_function():
    from parallel2d.training.data.together import mask_targets

    assert "give weightless=" in refusal(mask_targets, torch.zeros(2))
    masked = mask_targets({"input_ids": torch.ones(2), "labels": torch.tensor([1, 2])})
    assert masked["labels"].tolist() == [-100, -100]

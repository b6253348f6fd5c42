"""Features of all ranks inside a step: a contrastive loss has the gradients of one process on
every layout.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from workers import refusal

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    accumulate,
    all_gather,
    attach_optimizer,
    build_mesh,
    data_coordinate,
    full_state,
    parallelize,
    updated_parameters,
)

SAMPLES, STEPS = 8, 3
LAYOUTS = {
    "hybrid": {"replicate": 2, "shard": 2},
    "zero3": {"shard": 4},
    "ddp": {"replicate": 4},
    "hybrid_full": {"replicate": 2, "shard": 2},
}


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def samples(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, SAMPLES, 6, generator=generator, dtype=torch.float64)


def contrast(left, right, every_left, every_right, first):
    """The mean loss of the samples from ``first`` on, each against all samples of the other view."""
    targets = torch.arange(first, first + len(left))
    return (
        F.cross_entropy(left @ every_right.T, targets)
        + F.cross_entropy(right @ every_left.T, targets)
    ) / 2


def weights_of_one_process():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        left, right = map(model, samples(step))
        contrast(left, right, left, right, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def backward_at_once(model, mesh, own, first):
    left, right = map(model, own)
    every = all_gather(left, mesh), all_gather(right, mesh)
    contrast(left, right, *every, first).backward()


def backward_by_chunks(model, mesh, own, first):
    """The recipe of docs/library.md: features without a graph, their gradients, then one chunk
    after the other.
    """
    with torch.no_grad():
        features = [model(view) for view in own]
    leaves = [each.requires_grad_() for each in features]
    contrast(*leaves, *(all_gather(each, mesh) for each in leaves), first).backward()
    chunks = [(i, view, rows) for i, view in enumerate(own) for rows in (slice(0, 1), slice(1, 2))]
    for i, view, rows in accumulate(model, chunks):
        model(view[rows]).backward(leaves[i].grad[rows])


def weights_on(strategy, sizes, backward):
    mesh = build_mesh(MeshSpec(**sizes), strategy)
    model = parallelize(encoder(), mesh, ParallelConfig(strategy, precision="fp64"))
    optimizer = torch.optim.SGD(updated_parameters(model), lr=0.5)
    attach_optimizer(model, optimizer)
    count = SAMPLES // 4
    first = data_coordinate(mesh) * count
    for step in range(STEPS):
        backward(model, mesh, samples(step)[:, first : first + count], first)
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(full_state(model).get("model"))


@pytest.mark.parametrize("backward", [backward_at_once, backward_by_chunks])
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_contrastive_loss_gives_weights_of_one_process(ranks, strategy, backward):
    found = ranks.run(4, weights_on, strategy, LAYOUTS[strategy], backward)[0]
    expected = weights_of_one_process()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


def gather_over_context_ranks():
    mesh = build_mesh(MeshSpec(shard=2, context=2), "zero3")
    return all_gather(torch.tensor([float(data_coordinate(mesh))]), mesh).tolist()


def test_context_ranks_share_their_features(ranks):
    assert ranks.run(4, gather_over_context_ranks) == [[0.0, 1.0]] * 4


def gather_unequal():
    mesh = build_mesh(MeshSpec(shard=2), "zero3")
    rows = 1 + data_coordinate(mesh)
    return refusal(lambda: all_gather(torch.zeros(rows, 2), mesh))


def test_features_of_different_shapes_are_refused(ranks):
    for text in ranks.run(2, gather_unequal):
        assert "features of shape (2, 2) (torch.float32) on rank 1, and (1, 2)" in text

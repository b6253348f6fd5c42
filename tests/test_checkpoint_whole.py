"""Whole states leave a sharded model for a bare one and come back, from rank 0 alone."""

from __future__ import annotations

import pytest
import torch
from checkpoint_runs import build, train_step
from training import build_llama, optimizer_of
from workers import WorkerError

from parallel2d.checkpoint.whole import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
    rekey_optimizer_state,
)
from parallel2d.config import ConfigError

LAYOUTS = [
    (4, {"replicate": 2, "shard": 2}, {"strategy": "hybrid"}),
    (4, {"replicate": 1, "shard": 2, "tensor": 2}, {"strategy": "hybrid"}),
    (2, {"replicate": 2}, {"strategy": "ddp"}),
]


def there_and_back(mesh_sizes, config):
    """Trains two steps, gathers, gives everything to a fresh model of another seed, and compares what both do
    next."""
    mesh, model, optimizer = build(mesh_sizes, config)
    for step in (1, 2):
        train_step(model, optimizer, mesh, step)
    weights = full_model_state(model)
    state = full_optimizer_state(model, optimizer)
    by_number = full_optimizer_state(model, optimizer, key="id")
    _, other, other_optimizer = build(mesh_sizes, config, seed=7)
    load_full_model_state(other, weights or None)
    load_full_optimizer_state(other, other_optimizer, state or None)
    losses = [train_step(m, o, mesh, 3) for m, o in ((model, optimizer), (other, other_optimizer))]
    after = [train_step(m, o, mesh, 4) for m, o in ((model, optimizer), (other, other_optimizer))]
    as_numbers = {name: tensor.numpy() for name, tensor in weights.items()}
    return losses, after, as_numbers, [len(weights), len(state), len(by_number)]


@pytest.mark.parametrize(("world", "mesh", "config"), LAYOUTS)
def test_a_whole_state_from_rank_0_continues_bitwise(ranks, world, mesh, config):
    results = ranks.run(world, there_and_back, mesh, config)
    for losses, after, _, _ in results:
        assert losses[0] == losses[1]
        assert after[0] == after[1]
    assert results[1][3] == [0, 0, 0], "other ranks keep nothing"
    bare = build_llama()
    bare.load_state_dict({name: torch.from_numpy(value) for name, value in results[0][2].items()})


def test_optimizer_state_by_number_is_what_a_bare_optimizer_takes():
    model = build_llama()
    optimizer = optimizer_of(model)
    model(torch.arange(8)[None]).square().mean().backward()
    optimizer.step()
    other = build_llama()
    other.load_state_dict(full_model_state(model))
    fresh = optimizer_of(other)
    fresh.load_state_dict(full_optimizer_state(model, optimizer, key="id"))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, fresh.state[b][key])


def test_names_and_numbers_convert_both_ways():
    model = build_llama()
    optimizer = optimizer_of(model)
    model(torch.arange(8)[None]).square().mean().backward()
    optimizer.step()
    named = full_optimizer_state(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    numbered = rekey_optimizer_state(named, key="id")
    assert set(numbered["state"]) == set(range(len(names)))
    assert rekey_optimizer_state(numbered, key="name", names=names) == named
    with pytest.raises(ConfigError, match="names must give"):
        rekey_optimizer_state(numbered, key="name", names=names[1:])


def wrong_shapes():
    _, model, _ = build({}, {"strategy": "ddp"})
    load_full_model_state(model, {name: torch.zeros(1) for name, _ in model.named_parameters()})


def test_a_state_that_does_not_fit_is_refused_on_every_rank(ranks):
    with pytest.raises(WorkerError) as error:
        ranks.run(2, wrong_shapes)
    assert error.value.kind == "ConfigError"
    assert "does not fit" in error.value.message

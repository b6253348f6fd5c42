"""A model built straight into its shards; parameters that are left out of sharding."""

import contextlib
import copy
import cProfile
import sys

import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.distributed.tensor import DTensor
from workers import refusal

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_on_meta,
    full_state,
    model_sharded_context,
    parallelize,
)
from parallel2d.models.llama import tensor_plan


def plan(model):
    return tensor_plan(model, 2)


def built():
    """Build the same model in the context and by `parallelize`; return the unsharded weights of
    both.
    """
    mesh = build_mesh(MeshSpec(replicate=1, shard=2, tensor=2), "hybrid")
    config = ParallelConfig("hybrid")
    with model_sharded_context(
        mesh, config, seed=3, init=lambda m, name: model.init_weights(m, name), tensor_plan=plan
    ):
        model = training.build_llama()
        nn.Linear(4, 4)  # dropped
        nn.CrossEntropyLoss()
        assert all(parameter.is_meta for parameter in model.parameters())
    with build_on_meta():
        other = training.build_llama()
    other = parallelize(
        other, mesh, config, seed=3, init=other.init_weights, tensor_plan=plan(other)
    )
    first, second = (full_state(m, rank0_only=False)["model"] for m in (model, other))
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    same = all(torch.equal(value, second[key]) for key, value in first.items())
    return sharded, same and first.keys() == second.keys()


def test_model_built_in_context_equals_parallelize(ranks):
    assert ranks.run(4, built) == [(True, True)] * 4


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        raise ValueError("no such size")


def misused():
    mesh = build_mesh(MeshSpec(), "zero3")
    said = []
    kept = []
    with pytest.raises(ValueError, match="no such size"):
        with model_sharded_context(mesh, ParallelConfig("zero3"), seed=0):
            kept.append(nn.Linear(4, 4))
            Broken()
    half_done = any(isinstance(p, DTensor) for module in kept for p in module.parameters())
    for content in (lambda: None, nn.ReLU, lambda: kept.append(nn.Linear(2, 2)) or kept.pop()):
        with pytest.raises(ValueError) as error:
            with model_sharded_context(mesh, ParallelConfig("zero3"), seed=0):
                held = content()
                del held
        said.append(str(error.value)[:63])
    return said, half_done, nn.Linear(2, 2).weight.is_meta, several(mesh)


def several(mesh):
    with model_sharded_context(mesh, ParallelConfig("zero3"), seed=0):
        inner = nn.Linear(8, 8)
        first = nn.Sequential(inner, nn.Tanh())
        second = nn.Sequential(nn.Linear(8, 4))
    both = all(isinstance(p, DTensor) for model in (first, second) for p in model.parameters())
    out = second(first(torch.ones(2, 8)))
    out.sum().backward()
    return both, type(inner).__name__, tuple(out.shape)


def test_each_outermost_module_is_parallelized_unless_an_exception_is_raised(ranks):
    nothing = "model_sharded_context: no module with parameters was built insi"
    for said, half_done, still_on_meta, outermost in ranks.run(2, misused):
        assert said == [nothing] * 3
        assert (half_done, still_on_meta) == (False, False)
        assert outermost == (True, "FSDPLinear", (2, 4))


class Critic(nn.Module):
    def __init__(self, draws):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        if draws:
            self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("noise", torch.randn(3))


def weights_of_critics(draws):
    """The first weights of two critics that are built in one context, and of a copy of the second
    where its initializers set all of it.
    """
    mesh = build_mesh(MeshSpec(), "zero3")
    torch.manual_seed(0)
    with model_sharded_context(mesh, ParallelConfig("zero3"), seed=0):
        critics = [Critic(draws), Critic(draws)]
        critics += [] if draws else [copy.deepcopy(critics[1])]
    states = [full_state(each, rank0_only=False)["model"] for each in critics]
    return [state["layers.0.weight"].tolist() for state in states]


@pytest.mark.parametrize("draws", [False, True])
def test_modules_of_one_context_have_different_weights_and_copies_equal_weights(ranks, draws):
    for first, second, *copied in ranks.run(2, weights_of_critics, draws):
        assert first != second
        assert copied == ([] if draws else [second])


def build_with_other_noise():
    mesh = build_mesh(MeshSpec(), "zero3")
    torch.manual_seed(dist.get_rank())
    with build_on_meta():
        model = Critic(draws=False)
    return refusal(parallelize, model, mesh, ParallelConfig("zero3"), seed=0)


def test_buffer_that_ranks_draw_differently_is_refused_by_name(ranks):
    for message in ranks.run(2, build_with_other_noise):
        assert message.startswith("ranks [1] hold different values of the buffer noise than rank 0")


def test_context_replaces_no_attribute_of_modules_and_restores_profilers():
    def attributes():
        return {name: id(value) for name, value in vars(nn.Module).items()}

    before, seen = attributes(), []
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with build_on_meta():
            nn.Linear(2, 2)
            seen.append(attributes())
        kept = sys.getprofile() is profiler
    finally:
        profiler.disable()
    seen.append(attributes())
    assert seen == [before] * 2
    assert kept
    assert not nn.Linear(2, 2).weight.is_meta


class Adapted(nn.Module):
    """A frozen base with a small trained layer that changes its output."""

    def __init__(self, dim=16):
        super().__init__()
        self.base = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(3)))
        self.adapter = nn.Linear(dim, dim)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.adapter(self.base(x))


def trained(model, parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 32).view(2, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def left_out(how, config, meta):
    """Losses of three steps with the base left out; which parameters are sharded; dtypes of the
    base; the state.
    """
    mesh = build_mesh(MeshSpec(), "hybrid")
    torch.manual_seed(0)
    with build_on_meta() if meta else contextlib.nullcontext():
        model = Adapted()
    ignored = [model.base] if how == "module" else [how]
    model = parallelize(
        model, mesh, ParallelConfig("hybrid", **config), seed=0 if meta else None, ignored=ignored
    )
    sharded = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    dtypes = {p.dtype for p in model.base.parameters()}
    losses = trained(model, [p for p in model.parameters() if p.requires_grad])
    state = full_state(model, rank0_only=False)["model"]
    return losses, sharded, dtypes, {name: value.double().numpy() for name, value in state.items()}


@pytest.mark.parametrize("how", ["module", "base.*"])
def test_frozen_parameters_can_be_ignored_by_sharding(ranks, how):
    torch.manual_seed(0)
    model = Adapted()
    losses = trained(model, model.adapter.parameters())
    for found, sharded, _, state in ranks.run(4, left_out, how, {}, False):
        assert found == pytest.approx(losses, rel=1e-6)
        assert sharded == {"adapter.weight", "adapter.bias"}
        assert state.keys() == model.state_dict().keys()


def test_ignored_weights_do_not_depend_on_the_mesh_and_compute_in_the_param_dtype(ranks):
    ((alone, _, _, expected),) = ranks.run(1, left_out, "base*", {"precision": "bf16"}, True)
    for losses, _, dtypes, state in ranks.run(4, left_out, "base*", {"precision": "bf16"}, True):
        assert dtypes == {torch.bfloat16}
        assert losses[0] == pytest.approx(alone[0], rel=1e-2)
        for name in expected:
            assert name.startswith("adapter.") or (state[name] == expected[name]).all()


REFUSED = {
    "module": "adapter.weight, adapter.bias are trainable, and nothing averages the gradient",
    "adapter.weight": "adapter.weight is trainable",
    "bsae.0.weight": "pattern bsae.0.weight chooses no parameter of Adapted; near: base.0.weight",
}


def refused():
    """Return the error for each case, and for a parameter of the tensor plan."""
    said = []
    mesh, config = build_mesh(MeshSpec(), "zero3"), ParallelConfig("zero3")
    for ignored in REFUSED:
        torch.manual_seed(0)
        model = Adapted()
        ignored = model.adapter if ignored == "module" else ignored
        said.append(refusal(parallelize, model, mesh, config, ignored=[ignored]))
    with build_on_meta():
        llama = training.build_llama()
    llama.requires_grad_(False)
    llama.output.requires_grad_(True)
    split = build_mesh(MeshSpec(replicate=1, shard=1, tensor=2), "hybrid")
    options = {"seed": 0, "tensor_plan": plan(llama), "ignored": ["layers.*"]}
    return said, refusal(parallelize, llama, split, **options)


def test_invalid_ignored_parameters_are_refused(ranks):
    for said, planned in ranks.run(2, refused):
        for text, expected in zip(said, REFUSED.values(), strict=True):
            assert expected in text
        assert "is in the tensor plan" in planned

"""A model built straight into its shards; parameters that are left out of sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.distributed.tensor import DTensor
from workers import WorkerError

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


def built(sizes):
    """The same model built in the context and by `parallelize`; whole weights of both."""
    mesh = build_mesh(MeshSpec(**sizes), "hybrid")
    plan = (lambda model: tensor_plan(model, 2)) if sizes.get("tensor") else None
    with model_sharded_context(
        mesh,
        ParallelConfig("hybrid"),
        seed=3,
        init=lambda m, name: model.init_weights(m, name),
        tensor_plan=plan,
    ):
        model = training.build_llama()
        nn.Linear(4, 4)  # dropped
        nn.CrossEntropyLoss()
        assert all(parameter.is_meta for parameter in model.parameters())
    with build_on_meta():
        other = training.build_llama()
    given = tensor_plan(other, 2) if plan else None
    other = parallelize(
        other, mesh, ParallelConfig("hybrid"), seed=3, init=other.init_weights, tensor_plan=given
    )
    first, second = (full_state(m, rank0_only=False)["model"] for m in (model, other))
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return sharded, first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) for key in first
    )


@pytest.mark.parametrize(
    "sizes", [{"replicate": 2, "shard": 2}, {"replicate": 1, "shard": 2, "tensor": 2}]
)
def test_a_model_built_in_the_context_is_the_one_that_parallelize_makes(ranks, sizes):
    assert ranks.run(4, built, sizes) == [(True, True)] * 4


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        raise ValueError("no such size")


def misused():
    mesh = build_mesh(MeshSpec(), "zero3")
    said = []
    original = nn.Module.__init__, nn.Module.register_parameter
    kept = []
    try:
        with model_sharded_context(mesh, ParallelConfig("zero3"), seed=0):
            kept.append(nn.Linear(4, 4))
            Broken()
    except ValueError as error:
        said.append(str(error))
    half_done = any(isinstance(p, DTensor) for module in kept for p in module.parameters())
    for content in (lambda: None, nn.ReLU, lambda: kept.append(nn.Linear(2, 2)) or kept.pop()):
        try:
            with model_sharded_context(mesh, ParallelConfig("zero3"), seed=0):
                held = content()
                del held
        except ValueError as error:
            said.append(str(error)[:63])
    restored = (nn.Module.__init__, nn.Module.register_parameter) == original
    return said, half_done, restored, nn.Linear(2, 2).weight.is_meta


def test_an_exception_inside_leaves_nothing_half_done_and_an_empty_context_is_refused(ranks):
    nothing = "model_sharded_context: no module with parameters was built insi"
    for said, half_done, restored, still_on_meta in ranks.run(2, misused):
        assert said == ["no such size", nothing, nothing, nothing]
        assert (half_done, restored, still_on_meta) == (False, True, False)


def several():
    mesh = build_mesh(MeshSpec(), "zero3")
    with model_sharded_context(mesh, ParallelConfig("zero3"), seed=0):
        inner = nn.Linear(8, 8)
        first = nn.Sequential(inner, nn.Tanh())
        second = nn.Sequential(nn.Linear(8, 4))
    both = all(isinstance(p, DTensor) for model in (first, second) for p in model.parameters())
    out = second(first(torch.ones(2, 8)))
    out.sum().backward()
    return both, type(inner).__name__, tuple(out.shape)


def test_each_outermost_module_is_parallelized(ranks):
    assert ranks.run(2, several) == [(True, "FSDPLinear", (2, 4))] * 2


class Adapted(nn.Module):
    """A frozen base whose output a small trained layer changes."""

    def __init__(self, dim=16):
        super().__init__()
        self.base = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(3)))
        self.adapter = nn.Linear(dim, dim)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.adapter(self.base(x))


def left_out(how, config, meta):
    """Losses of three steps with the base left out; which parameters are plain; bytes are the same with and without a mesh."""
    mesh = build_mesh(MeshSpec(), "hybrid")
    torch.manual_seed(0)
    if meta:
        with build_on_meta():
            model = Adapted()
    else:
        model = Adapted()
    ignored = [model.base] if how == "module" else [how]
    model = parallelize(
        model, mesh, ParallelConfig("hybrid", **config), seed=0 if meta else None, ignored=ignored
    )
    kinds = {name: isinstance(p, DTensor) for name, p in model.named_parameters()}
    dtypes = {str(p.dtype) for name, p in model.named_parameters() if name.startswith("base.")}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 32).view(2, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = full_state(model, rank0_only=False)["model"]
    return losses, kinds, dtypes, {name: value.double().numpy() for name, value in state.items()}


@pytest.mark.parametrize("how", ["module", "base", "base.*"])
def test_frozen_parameters_can_be_left_out_of_sharding(ranks, how):
    results = ranks.run(4, left_out, how, {}, False)
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 32).view(2, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for found, kinds, _, state in results:
        assert found == pytest.approx(losses, rel=1e-6)
        assert all(sharded == name.startswith("adapter.") for name, sharded in kinds.items())
        assert state.keys() == model.state_dict().keys()


def test_ignored_weights_do_not_depend_on_the_mesh_and_compute_in_the_param_dtype(ranks):
    wide = ranks.run(4, left_out, "base*", {"precision": "bf16"}, True)
    alone = ranks.run(1, left_out, "base*", {"precision": "bf16"}, True)[0]
    for losses, _, dtypes, state in wide:
        assert dtypes == {"torch.bfloat16"}
        assert all(
            (state[name] == value).all()
            for name, value in alone[3].items()
            if name.startswith("base.")
        )
        assert losses[0] == pytest.approx(alone[0][0], rel=1e-2)


def refused(ignored):
    mesh = build_mesh(MeshSpec(), "zero3")
    torch.manual_seed(0)
    model = Adapted()
    parallelize(
        model,
        mesh,
        ParallelConfig("zero3"),
        ignored=[getattr(model, ignored) if ignored == "adapter" else ignored],
    )


@pytest.mark.parametrize(
    ("ignored", "says"),
    [
        (
            "adapter",
            "adapter.weight, adapter.bias are trainable, and nothing averages the gradient",
        ),
        ("adapter.weight", "adapter.weight is trainable"),
        (
            "bsae.0.weight",
            "pattern bsae.0.weight chooses no parameter of Adapted; near: base.0.weight",
        ),
    ],
)
def test_what_cannot_be_left_out_is_refused(ranks, ignored, says):
    with pytest.raises(WorkerError) as error:
        ranks.run(2, refused, ignored)
    assert error.value.kind == "ConfigError"
    assert says in error.value.message


def ignored_in_the_tensor_plan():
    mesh = build_mesh(MeshSpec(replicate=1, shard=1, tensor=2), "hybrid")
    with build_on_meta():
        model = training.build_llama()
    model.requires_grad_(False)
    model.output.requires_grad_(True)
    plan = tensor_plan(model, dist.get_world_size())
    parallelize(
        model,
        mesh,
        ParallelConfig("hybrid"),
        seed=0,
        init=model.init_weights,
        tensor_plan=plan,
        ignored=["layers.*"],
    )


def test_an_ignored_parameter_in_the_tensor_plan_is_refused(ranks):
    with pytest.raises(WorkerError) as error:
        ranks.run(2, ignored_in_the_tensor_plan)
    assert "is in the tensor plan" in error.value.message

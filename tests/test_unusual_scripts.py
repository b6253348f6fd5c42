"""Unusual models and loops that DDP allows: correct results, or one sentence with the remedy."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from parallel2d import ConfigError, MeshSpec, ParallelConfig, build_mesh, full_state, parallelize


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.a = nn.Parameter(torch.empty(0, 4))
        self.b = nn.Parameter(torch.empty(4, 0))

    def attend(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0] + x @ self.a.T @ self.b.T

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False)


class Odd(nn.Module):
    """Blocks in containers that are never called, forwards called directly, sparse and empty
    gradients.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=True)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleDict({"attention": Attention()}), nn.LayerNorm(4), None])
            for _ in range(2)
        )

    def forward(self, x):
        x = self.embedding(x)
        for inner, norm, _ in self.layers:
            x = norm(inner["attention"].forward(x))
        return x


def _train(model, tokens):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model.forward(tokens).square().mean().backward()
        optimizer.step()
    return model


def _odd(strategy, bucketing):
    torch.manual_seed(0)
    alone, model = Odd().double(), Odd().double()
    model.load_state_dict(alone.state_dict())
    # The model's own dtype until it runs; then the configured dtype is used.
    config = ParallelConfig(strategy, bucketing, precision="fp64")
    sizes = {"replicate": 2, "shard": 2} if strategy == "hybrid" else {}
    mesh = build_mesh(MeshSpec(**sizes), strategy)
    model = parallelize(model, mesh, config, broadcast_from=0)
    tokens = torch.arange(8).view(4, 2)
    _train(model, tokens[dist.get_rank() : dist.get_rank() + 1])
    whole = full_state(model, rank0_only=False)["model"]
    expected = _train(alone, tokens).state_dict()
    filled = {name: value for name, value in expected.items() if value.numel()}
    worst = [(whole[name] - value).abs().max().item() for name, value in filled.items()]
    config = ParallelConfig(strategy, precision="fp64")
    low = parallelize(nn.Linear(4, 4), mesh, config, broadcast_from=0)
    low.float()(torch.ones(2, 4)).sum().backward()
    return max(worst), {parameter.grad.dtype for parameter in low.parameters()}


@pytest.mark.parametrize("strategy", ["hybrid", "zero3", "ddp"])
def test_unusual_models_train_as_in_one_process(ranks, strategy):
    for bucketing in ("block", "layer"):
        for worst, dtypes in ranks.run(4, _odd, strategy, bucketing):
            assert worst < 1e-12
            assert dtypes == {torch.float32}


class Saving(nn.Sequential):
    module: nn.Module

    def save_pretrained(self, folder, state_dict=None):
        return state_dict


def _refused():
    mesh = build_mesh(MeshSpec(), "zero3")

    def build(**options):
        model = Saving(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        return parallelize(model, mesh, ParallelConfig("zero3"), broadcast_from=0, **options)

    def penalize():
        (model(x).sum() + sum(each.square().sum() for each in model.parameters())).backward()

    def differentiate():
        with forward_ad.dual_level():
            model(forward_ad.make_dual(x, x))

    def send_sparse():
        plain = nn.Linear(4, 4)
        plain.register_buffer("edges", torch.eye(4).to_sparse())
        parallelize(plain, mesh, broadcast_from=0)

    model, x = build(), torch.ones(2, 4)
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    assert not hasattr(model, "module")
    model.add_module("module", nn.Identity())
    assert isinstance(model.module, nn.Identity)
    del model.module
    assert model.save_pretrained("folder", state_dict={"a": 1}) == {"a": 1}
    told = []
    for call in (
        lambda: x[0] @ model[0].weight,
        penalize,
        differentiate,
        send_sparse,
        lambda: parallelize(nn.ModuleList([nn.Linear(4, 4)]), mesh),
        lambda: model.double(),
        lambda: model.save_pretrained("folder"),
        lambda: model.module,
    ):
        with pytest.raises((RuntimeError, ConfigError, AttributeError)) as error:
            call()
        told.append(str(error.value))
    return told


TOLD = (
    "got a plain tensor and a sharded parameter.*full_tensor",
    "got a plain tensor and a sharded parameter.*full_tensor",
    "Saving was called with a derivative of torch.autograd.forward_ad.*torch.func.jvp",
    "broadcast_from=0: edges is sparse",
    "a ModuleList has no forward.*parallelize each of its members",
    r"model.to\(torch.float64\).*updated in torch.float32.*ParallelConfig",
    r"save_pretrained\(...\) .*full_state.*checkpoint convert",
    r"parallelize\(...\) returns the model itself",
)


def test_refused_scripts_name_the_remedy(ranks):
    for told in ranks.run(2, _refused):
        for sentence, pattern in zip(told, TOLD, strict=True):
            assert re.search(pattern, sentence), sentence
